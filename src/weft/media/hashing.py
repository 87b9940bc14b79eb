"""Tells equal media apart from different ones: digests of what was decoded, and keys for the prefix cache.

All tokens of an image have the same id, whatever it shows, so the ids alone would let the cache take one image for
another. `media_keys` gives numbers that no token id and no adapter's key can be, for they are negative. They are drawn
from the digest, 31 bits each: that all n keys of two media agree has a chance of 2**(-31 n). One key alone may agree by
chance, so a request begins with the cached KV of a whole medium or with none of it (`PrefixCache.attach`).
"""

from __future__ import annotations

import hashlib

import numpy as np

from weft.core.media import Modality, Samples
from weft.core.plan import Int32s

DIGEST_BYTES = 32
_DTYPES = {"image": "|u1", "audio": "<f4"}
_RANGE = 2**31 - 1  # keys lie in [-2**31, -2]: -1 stands for a token in flight


def media_digest(kind: Modality, samples: Samples) -> bytes:
    """32 bytes (BLAKE2b) over kind, shape and samples: the same pixels are the same image, however they were packed."""
    digest = hashlib.blake2b(f"{kind} {samples.shape} ".encode(), digest_size=DIGEST_BYTES, person=b"weft-media")
    digest.update(np.ascontiguousarray(samples, dtype=_DTYPES[kind]).data)
    return digest.digest()


def media_keys(digest: bytes, n_tokens: int, adapter: int = 0) -> Int32s:
    """int32 [n_tokens], all in [-2**31, -2]: keys of the tokens that stand for the medium with this digest.

    The same for the same arguments, everywhere and always. Another number of tokens, or another LoRA adapter, means
    other KV, and so gives other keys from the first one on.
    """
    source = hashlib.shake_128(b"weft-media-keys %d %d " % (n_tokens, adapter) + digest)
    values = np.frombuffer(source.digest(4 * n_tokens), dtype="<u4").astype(np.int64)
    keys: Int32s = (-2 - values % _RANGE).astype(np.int32)
    return keys
