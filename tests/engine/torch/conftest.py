"""Fixtures shared by the torch backend's tests; without PyTorch and transformers none of them is collected."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.engine.torch.zoo import Zoo

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    import torch

    from tests.engine.torch.zoo import Zoo

    torch.set_num_threads(1)  # tiny models: a second thread only waits for the first
    return Zoo(tmp_path_factory.mktemp("zoo"))
