"""Requests and caches of a few tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

import numpy as np
import pytest

from weft.core.request import Request
from weft.core.sampling import SamplingParams
from weft.kv.prefix_cache import PrefixCache

NewRequest = Callable[..., Request]
NewCache = Callable[..., PrefixCache]


@pytest.fixture
def new_request() -> NewRequest:
    """`new_request(tokens, limit)`."""
    ids = count()

    def make(tokens: Sequence[int], limit: int = 1000) -> Request:
        prompt = np.array(tokens, dtype=np.int32)
        return Request(next(ids), prompt, SamplingParams(), max_device_len=limit, seed=0)

    return make


@pytest.fixture
def new_cache() -> NewCache:
    """`new_cache(capacity, page, retain=...)` with four rows."""

    def make(capacity: int = 64, page: int = 1, retain: str = "prefix") -> PrefixCache:
        return PrefixCache(capacity, page_size=page, max_rows=4, max_len=capacity, retain=retain)  # type: ignore[arg-type]

    return make
