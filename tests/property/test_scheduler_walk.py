"""Tens of thousands of random operations over core, KV and scheduler, each followed by every check there is."""

from __future__ import annotations

import pytest

from tests.property.walk import random_walk


@pytest.mark.parametrize("block", range(10))
def test_random_walks(block: int) -> None:
    operations = 0
    for seed in range(block * 20, block * 20 + 20):
        try:
            operations += random_walk(seed, 120)
        except BaseException as error:
            error.add_note(f"random_walk(seed={seed}, operations=120)")
            raise
    assert operations >= 20 * 120
