"""Digests and keys; and with the real radix tree, that no image is taken for another."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.media import MediaSpan, Medium
from weft.core.request import Request
from weft.core.sampling import SamplingParams
from weft.kv.prefix_cache import PrefixCache
from weft.kv.radix_tree import RadixTree
from weft.media.hashing import media_digest, media_keys

IMAGE = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
SOUND = np.array([0.25, -0.5, 1.0], np.float32)
DIGESTS = st.binary(min_size=32, max_size=32)
VOCAB = 1000


def test_digests_are_those_of_earlier_versions() -> None:
    """Gateways and traces may keep them."""
    assert media_digest("image", IMAGE).hex() == "ba85798d252d16e1c63460faeab6145564875463cafb11a1ca5240c5e7c01bed"
    assert media_digest("audio", SOUND).hex() == "c18dff74d4fa229ebb78d33e06863786d2c486c888c7d5eb56ec947dadce5647"


def test_a_digest_is_of_kind_shape_and_samples() -> None:
    changed = IMAGE.copy()
    changed[1, 2, 0] ^= 1
    others = [IMAGE.reshape(4, 2, 3), IMAGE.reshape(1, 8, 3), changed, IMAGE[:, ::-1]]
    digests = [media_digest("image", image) for image in (IMAGE, *others)]
    assert len({*digests, media_digest("audio", SOUND), media_digest("audio", SOUND[:2])}) == 7


def test_a_digest_does_not_tell_how_samples_lie_in_memory() -> None:
    assert media_digest("image", np.asfortranarray(IMAGE)) == media_digest("image", IMAGE)
    assert media_digest("audio", SOUND.astype(">f4")) == media_digest("audio", SOUND)


@given(DIGESTS, st.integers(1, 600), st.integers(0, 5))
def test_keys_are_no_tokens_and_always_the_same(digest: bytes, n: int, adapter: int) -> None:
    keys = media_keys(digest, n, adapter)
    assert keys.dtype == np.int32 and keys.shape == (n,) and (keys <= -2).all()
    assert (keys == media_keys(digest, n, adapter)).all()


@given(st.lists(DIGESTS, min_size=2, max_size=20, unique=True), st.integers(4, 50))
def test_different_media_have_different_keys(digests: list[bytes], n: int) -> None:
    assert len({media_keys(digest, n).tobytes() for digest in digests}) == len(digests)


def test_keys_spread_over_the_whole_range() -> None:
    keys = media_keys(bytes(32), 100_000).astype(np.int64)
    assert len(np.unique(keys)) > 99_990
    assert keys.min() < -(2**31) + 2**17 and keys.max() > -(2**17)


def test_another_length_or_adapter_gives_other_keys_from_the_first_one_on() -> None:
    first = [int(media_keys(bytes(32), n, a)[0]) for n, a in ((4, 0), (5, 0), (4, 1), (5, 1), (45, 0))]
    assert len(set(first)) == 5


# ---- in the radix tree -------------------------------------------------------------------------------------------

TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)


def keys_of(before: list[int], digest: bytes, n: int, after: list[int]) -> np.ndarray:
    return np.concatenate([np.array(before, np.int32), media_keys(digest, n), np.array(after, np.int32)])


@given(TOKENS, DIGESTS, DIGESTS, st.integers(1, 40), TOKENS, TOKENS)
def test_prompts_share_what_comes_before_another_image_and_all_of_the_same_one(
    before: list[int], mine: bytes, other: bytes, n: int, after: list[int], otherwise: list[int]
) -> None:
    tree = RadixTree()
    keys = keys_of(before, mine, n, after)
    tree.insert(keys, np.arange(len(keys), dtype=np.int32))
    same = tree.match(keys_of(before, mine, n, otherwise)).length
    common = next((i for i, (a, b) in enumerate(zip(after, otherwise, strict=False)) if a != b), None)
    assert same == len(before) + n + (min(len(after), len(otherwise)) if common is None else common)
    if other != mine:
        assert tree.match(keys_of(before, other, n, after)).length == len(before)
    assert tree.match(np.array(before + [0] * n + after, np.int32)).length == len(before)
    tree.check()


# ---- requests in the cache ---------------------------------------------------------------------------------------


def span(start: int, digest: bytes, n: int, adapter: int = 0) -> MediaSpan:
    return MediaSpan(start, Medium("image", digest, IMAGE), media_keys(digest, n, adapter))


def request(number: int, tokens: int, *spans: MediaSpan, adapter: int = 0) -> Request:
    """All of its tokens are 7, the media's as well."""
    prompt = np.full(tokens, 7, np.int32)
    return Request(
        number, prompt, SamplingParams(), max_device_len=tokens + 10, seed=0, adapter=adapter,
        key_offset=adapter * VOCAB, media=spans,
    )  # fmt: skip


def served(cache: PrefixCache, one: Request) -> int:
    """Computes it and leaves it in the cache; how many tokens it found there."""
    cache.attach(one)
    found = one.cached_len
    cache.extend(one, one.device_len)
    one.planned_len = one.device_len
    one.advance(one.device_len - found)
    cache.check([one])
    cache.cache_finished(one)
    cache.check([])
    return found


A, B = b"a" * 32, b"b" * 32


@pytest.fixture(params=[1, 4])
def cache(request: pytest.FixtureRequest) -> PrefixCache:
    return PrefixCache(1024, page_size=request.param, max_rows=4, max_len=256)


def test_keys_of_any_stretch_of_a_request() -> None:
    one = request(1, 20, span(3, A, 5), span(10, B, 4))
    whole = one.keys(0, 20)
    assert (whole[3:8] == media_keys(A, 5)).all() and (whole[10:14] == media_keys(B, 4)).all()
    assert (whole[[0, 1, 2, 8, 9, 14, 19]] == 7).all()
    for start in range(20):
        for end in range(start, 21):
            assert (one.keys(start, end) == whole[start:end]).all()
    assert (one.tokens == 7).all()


def test_a_request_shares_what_comes_before_another_image(cache: PrefixCache) -> None:
    assert served(cache, request(1, 40, span(8, A, 12))) == 0
    assert served(cache, request(2, 40, span(8, B, 12))) == 8
    assert served(cache, request(3, 40)) == 8
    assert served(cache, request(4, 40, span(8, A, 12))) == 36 + 3 * (cache.page_size == 1)
    assert served(cache, request(5, 40, span(8, B, 12))) == 36 + 3 * (cache.page_size == 1)


def test_the_same_image_at_another_place_is_another_prompt(cache: PrefixCache) -> None:
    served(cache, request(1, 40, span(8, A, 12)))
    assert served(cache, request(2, 40, span(12, A, 12))) == 8


def test_the_order_of_images_counts(cache: PrefixCache) -> None:
    served(cache, request(1, 40, span(4, A, 4), span(8, B, 4)))
    assert served(cache, request(2, 40, span(4, B, 4), span(8, A, 4))) == 4
    assert served(cache, request(3, 40, span(4, A, 4), span(8, A, 4))) == 8


def test_adapters_share_no_images_even_at_the_start(cache: PrefixCache) -> None:
    served(cache, request(1, 40, span(0, A, 12)))
    assert served(cache, request(2, 40, span(0, A, 12, adapter=1), adapter=1)) == 0
    assert served(cache, request(3, 40, span(0, A, 12))) > 12


def test_an_image_is_reused_as_a_whole_or_not_at_all(cache: PrefixCache) -> None:
    """Even where its first keys agree by chance: here the cache holds no more than a part of it."""
    one = request(1, 40, span(8, A, 24))
    cache.attach(one)
    cache.extend(one, 20)
    one.planned_len = 20
    one.advance(20)
    cache.cache_unfinished(one)
    two = request(2, 40, span(8, A, 24))
    cache.attach(two)
    assert two.cached_len == two.prefix.length == 8
    cache.check([one, two])
    assert two.miss is not None and two.miss.at_token == 8
    cache.cache_finished(one)
    cache.cache_finished(two)
    three = request(3, 15, span(8, A, 7))  # it ends with an image, of which the last token is to be computed
    assert served(cache, three) == 8
    assert served(cache, request(4, 15, span(8, A, 7))) == 8


def test_whole_pages_and_whole_images_together() -> None:
    cache = PrefixCache(1024, page_size=16, max_rows=4, max_len=256)
    served(cache, request(1, 100, span(20, A, 10), span(40, B, 30)))
    assert served(cache, request(2, 100, span(20, A, 10), span(40, B, 30))) == 96
    assert served(cache, request(3, 72, span(20, A, 10), span(40, B, 30))) == 32  # 64 would end within B
    assert served(cache, request(4, 31, span(20, A, 10))) == 16
