"""Architectures without a native decoder run through the library's own modules, or are refused by name."""

from __future__ import annotations

import time

import pytest

from tests.engine.torch.harness import Driver, Sequence_, random_prompts
from tests.engine.torch.zoo import ADAPTED, NATIVE, REFUSED, VOCAB, Zoo, logits
from weft.backends.torch.adapter import load_adapter
from weft.backends.torch.backend import TorchBackend
from weft.core.errors import ModelLoadError


@pytest.mark.parametrize("name", ADAPTED)
def test_tokens_equal_the_library(zoo: Zoo, name: str) -> None:
    backend = TorchBackend(zoo.path(name))
    geometry = backend.load()
    assert geometry.description.endswith("transformers")
    assert geometry.num_layers == 3 and geometry.vocab_size == VOCAB
    prompts = random_prompts((5, 1, 23, 60), VOCAB)
    reference = None
    for page_size, chunk in ((1, 64), (16, 7), (1, 1)):
        driver = Driver(backend, page_size=page_size)
        outputs = driver.generate([Sequence_(i, prompt) for i, prompt in enumerate(prompts)], 10, chunk)
        reference = reference or outputs
        assert outputs == reference, f"page size {page_size}, chunk {chunk}"
    for prompt, output in zip(prompts, reference, strict=True):
        assert output == logits(zoo.model(name), prompt + output)[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert len({token for output in reference for token in output}) > 5, "too uniform to prove anything"


def test_cached_prefix_and_company(zoo: Zoo) -> None:
    backend = TorchBackend(zoo.path("gemma2"))
    backend.load()
    shared, tail = random_prompts((32, 9), VOCAB)
    cold = Driver(backend).generate([Sequence_(0, shared + tail)], 8)
    driver = Driver(backend, page_size=16)
    first = Sequence_(0, shared + [5])
    driver.generate([first], 4)
    reader = Sequence_(1, shared + tail, slots=first.slots[:32], cached=32)
    company = Sequence_(2, random_prompts((50,), VOCAB, seed=9)[0])
    assert driver.generate([company, reader], 8)[1] == cold[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["gpt2", "gemma3", "qwen2-moe"])
def test_half_precision_runs(zoo: Zoo, name: str, dtype: str) -> None:
    backend = TorchBackend(zoo.path(name), dtype=dtype)
    assert dtype in backend.load().description
    [output] = Driver(backend).generate([Sequence_(0, random_prompts((20,), VOCAB)[0])], 5)
    assert len(output) == 5


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_architectures_are_named_at_once(zoo: Zoo, name: str) -> None:
    path = zoo.path(name)
    start = time.monotonic()
    with pytest.raises(ModelLoadError, match=REFUSED[name][1]):
        TorchBackend(path).load()
    assert time.monotonic() - start < 10


def test_proof_on_loading_notices_a_wrong_result(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the attention function wrong for an architecture, loading it would fail rather than serving nonsense."""
    from weft.backends.torch import adapter

    honest = adapter.AdapterModel.attend

    def off_by_scale(self, queries, keys, values, options):  # as if a factor of the architecture went unnoticed
        return honest(self, queries * 3.0, keys, values, options)

    monkeypatch.setattr(adapter.AdapterModel, "attend", off_by_scale)
    with pytest.raises(ModelLoadError, match="GPT2LMHeadModel is not supported.*logits come out different"):
        TorchBackend(zoo.path("gpt2")).load()


def test_native_families_run_through_the_adapter_too(zoo: Zoo) -> None:
    """Both ways to run an architecture agree."""
    import torch

    from weft.backends.checkpoint import Checkpoint

    assert "qwen3" in NATIVE
    backend = TorchBackend(zoo.path("qwen3"))
    backend.load()
    [prompt] = random_prompts((40,), VOCAB)
    native = Driver(backend).generate([Sequence_(0, prompt)], 8)
    with torch.inference_mode():
        adapted = load_adapter(Checkpoint.open(zoo.path("qwen3")), torch.float32, torch.device("cpu"), None)
    backend._model = adapted
    assert Driver(backend).generate([Sequence_(0, prompt)], 8) == native
