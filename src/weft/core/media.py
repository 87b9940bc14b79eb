"""What stands behind some of a prompt's tokens: decoded images and sound, and the keys that the cache knows them by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Modality = Literal["image", "audio"]
"""Also the name of the feature that a backend needs for it."""

MODALITIES: tuple[Modality, ...] = ("image", "audio")

Samples = npt.NDArray[Any]
"""An image: uint8 [height, width, 3], RGB. Sound: float32 [samples], mono, 16,000 a second."""


@dataclass(frozen=True, slots=True, eq=False)
class Medium:
    """One decoded image or sound; `digest` is equal exactly where kind and samples are."""

    kind: Modality
    digest: bytes
    samples: Samples


@dataclass(frozen=True, slots=True, eq=False)
class MediaSpan:
    """Tokens [start, end) of a prompt that stand for `medium`.

    Attributes:
        keys: int32 [end - start], all below -1: what the prefix cache knows them by, instead of their token ids.
    """

    start: int
    medium: Medium
    keys: npt.NDArray[np.int32]

    @property
    def end(self) -> int:
        return self.start + len(self.keys)
