"""Native families give `transformers`' greedy tokens, however the work is cut and wherever it lies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests.engine.torch.harness import Driver, Sequence_, random_prompts
from tests.engine.torch.zoo import GROUPED, NATIVE, VOCAB, Zoo, build, greedy, logits
from weft.backends.torch.backend import TorchBackend

LENGTHS = (5, 1, 23, 80)
COUNT = 12


def load(path: Path, **options: str) -> TorchBackend:
    backend = TorchBackend(path, **options)
    assert backend.load().description.endswith("native")
    return backend


def check_greedy(model, prompt: list[int], output: list[int]) -> None:
    """Each token is the library's likeliest after all before it, which is what greedy generation means."""
    expected = logits(model, prompt + output)[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert output == expected


@pytest.mark.parametrize("name", NATIVE)
def test_tokens_equal_the_library(zoo: Zoo, name: str) -> None:
    backend = load(zoo.path(name))
    prompts = random_prompts(LENGTHS, VOCAB)
    reference = None
    for page_size, chunk in ((1, 64), (16, 7), (1, 1), (16, 64), (1, 7), (16, 1)):
        driver = Driver(backend, page_size=page_size)
        outputs = driver.generate([Sequence_(i, prompt) for i, prompt in enumerate(prompts)], COUNT, chunk)
        if reference is None:
            for prompt, output in zip(prompts, outputs, strict=True):
                check_greedy(zoo.model(name), prompt, output)
            assert len({token for output in outputs for token in output}) > 8, "too uniform to prove anything"
            reference = outputs
        assert outputs == reference, f"page size {page_size}, chunk {chunk}"


@pytest.mark.parametrize("name", ["qwen3", "mistral", "rope-yarn"])
def test_tokens_equal_the_librarys_generate(zoo: Zoo, name: str) -> None:
    backend = load(zoo.path(name))
    for prompt in random_prompts(LENGTHS, VOCAB, seed=7):
        assert Driver(backend).generate([Sequence_(0, prompt)], COUNT) == [greedy(zoo.model(name), prompt, COUNT)]


def test_dynamic_rope_equals_generate_within_and_beyond_the_trained_context(tmp_path: Path) -> None:
    # The library computes a prompt beyond the limit with the frequencies of its full length and leaves them to the
    # next one; only what it decodes beyond the limit is well defined, so prompts end before it.
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
    model = build(transformers.LlamaConfig(**{**GROUPED, "max_position_embeddings": 24}, rope_parameters=rope))
    model.save_pretrained(tmp_path)
    backend = load(tmp_path)
    prompts = random_prompts((4, 20, 23), VOCAB)
    expected = [greedy(model, prompt, 30) for prompt in prompts]
    for chunk in (3, 64):
        driver = Driver(backend, page_size=16)
        assert driver.generate([Sequence_(i, prompt) for i, prompt in enumerate(prompts)], 30, chunk) == expected


@pytest.mark.parametrize("name", ["qwen3", "mistral", "qwen3-moe"])
def test_cached_prefix_equals_cold(zoo: Zoo, name: str) -> None:
    backend = load(zoo.path(name))
    shared, *tails = random_prompts((40, 3, 9, 17), VOCAB, seed=3)
    cold = [Driver(backend).generate([Sequence_(0, shared + tail)], COUNT)[0] for tail in tails]
    driver = Driver(backend, page_size=16)
    first = Sequence_(0, shared + tails[0])
    warm = [driver.generate([first], COUNT, chunk=7)[0]]
    for index, tail in enumerate(tails[1:], start=1):
        reader = Sequence_(index, shared + tail)
        reader.slots, reader.cached = first.slots[:32], 32  # two pages of the first one's
        warm += driver.generate([reader], COUNT)
    assert warm == cold


def test_company_changes_nothing(zoo: Zoo) -> None:
    backend = load(zoo.path("qwen3"))
    prompts = random_prompts((3, 50, 11, 7, 30), VOCAB, seed=5)
    alone = [Driver(backend).generate([Sequence_(0, prompt)], COUNT)[0] for prompt in prompts]
    driver = Driver(backend)
    sequences = [Sequence_(i, prompt) for i, prompt in enumerate(prompts)]
    for index in range(len(sequences)):  # they join one by one, so steps mix prompts and decoding
        driver.step(sequences[: index + 1], chunk=9)
    driver.generate(sequences, COUNT, chunk=9)
    assert [sequence.output[:COUNT] for sequence in sequences] == alone


def test_long_rows_and_neighbouring_slots(zoo: Zoo) -> None:
    """Blocks of queries, growing masks, rows read in place, and groups split by length."""
    backend = load(zoo.path("mistral"))
    model = zoo.model("mistral")
    driver = Driver(backend, num_slots=2048)
    driver.slots.pages = list(range(2047, -1, -1))  # handed out in order
    sequences = [Sequence_(i, prompt) for i, prompt in enumerate(random_prompts((400, 2, 300, 5), VOCAB))]
    for sequence in sequences:
        driver.step([sequence], chunk=512)
    outputs = driver.generate(sequences, 6, chunk=512)
    for sequence, output in zip(sequences, outputs, strict=True):
        check_greedy(model, sequence.prompt, output)
    full = load(zoo.path("llama"))
    driver = Driver(full, num_slots=2048)
    driver.slots.pages = list(range(2047, -1, -1))
    sequences = [Sequence_(i, prompt) for i, prompt in enumerate(random_prompts((400, 2, 300, 5), VOCAB))]
    for sequence in sequences:
        driver.step([sequence], chunk=290)
    outputs = driver.generate(sequences, 6, chunk=512)
    for sequence, output in zip(sequences, outputs, strict=True):
        check_greedy(zoo.model("llama"), sequence.prompt, output)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["qwen3", "llama-biases", "olmo2", "mistral"])
def test_half_precision_stays_close(zoo: Zoo, name: str, dtype: str) -> None:
    """Logits differ from float32 about as the library's own do in that precision."""
    model = zoo.model(name)
    [prompt] = random_prompts((100,), VOCAB)
    exact = torch.log_softmax(logits(model, prompt), -1)
    half = transformers.AutoModelForCausalLM.from_pretrained(zoo.path(name), dtype=getattr(torch, dtype))
    theirs = float((torch.log_softmax(logits(half, prompt), -1) - exact).abs().mean())
    backend = load(zoo.path(name), dtype=dtype)
    ours = float(
        (_all_logprobs(backend, prompt) - exact[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]).abs().mean()
    )
    assert ours <= 2.5 * theirs + 1e-3
    outputs = Driver(backend).generate([Sequence_(0, prompt)], 5)
    assert len(outputs[0]) == 5


def _all_logprobs(backend: TorchBackend, prompt: list[int]) -> torch.Tensor:
    from weft.core.sampling import SamplingParams

    sequence = Sequence_(0, prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    result = Driver(backend).step([sequence], chunk=128)
    return torch.tensor([entry.logprob for entry in result.prompt_logprobs[0]])


def test_old_and_new_ways_to_write_rope_are_the_same(zoo: Zoo, tmp_path: Path) -> None:
    import json
    import shutil

    source = zoo.path("rope-llama3")
    old = tmp_path / "old"
    shutil.copytree(source, old)
    config = json.loads((old / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    config["rope_scaling"] = rope
    (old / "config.json").write_text(json.dumps(config))
    [prompt] = random_prompts((30,), VOCAB)
    outputs = [Driver(load(path)).generate([Sequence_(0, prompt)], COUNT) for path in (source, old)]
    assert outputs[0] == outputs[1]
