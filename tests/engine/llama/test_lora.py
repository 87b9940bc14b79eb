"""LoRA adapters in llama.cpp: what they answer is what a model answers into which they were merged, in any company."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("torch", reason="PyTorch, which reads the bundled model's weights, is not installed")

from tests.engine.llama import lora
from tests.engine.llama.rig import Rig, alone, chat, output
from weft.backends.llama_cpp.backend import LlamaCppBackend
from weft.core.errors import ModelLoadError

PROMPTS = [
    chat("Count from 1 to 5."),
    chat("What is 2 + 3?"),
    chat("Tell me a story."),
    chat("My name is Mira.", "Nice to meet you, Mira!", "What is my name?"),
]


class Files:
    """The model, its two adapters, and the model with each adapter merged in; `models[k]` belongs to adapter k."""

    def __init__(self, folder: Path) -> None:
        pairs = [lora.adapter(1), lora.adapter(2)]
        self.models = [lora.write_model(folder / "base.gguf")]
        self.models += [lora.write_model(folder / f"merged{k}.gguf", pair) for k, pair in enumerate(pairs, 1)]
        self.adapters = {f"a{k}": lora.write_adapter(folder / f"a{k}.gguf", pair) for k, pair in enumerate(pairs, 1)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("lora"))


@pytest.fixture
def rig(files: Files) -> Iterator[Rig]:
    rig = Rig(model=files.models[0], lora=files.adapters)
    yield rig
    rig.close()


def test_an_adapter_answers_as_the_model_into_which_it_was_merged(rig: Rig, files: Files) -> None:
    """Base and adapters in turn, so that what one of them leaves behind would show in the next."""
    answers = [[rig.say(prompt, adapter=k) for k in (0, 1, 2, 0)] for prompt in PROMPTS]
    for prompt, (base, *others, base_again) in zip(PROMPTS, answers, strict=True):
        assert [base, *others] == [alone(prompt, model=model) for model in files.models]
        assert base_again == base
    by_adapter = list(zip(*answers, strict=True))[:3]
    assert by_adapter[0] != by_adapter[1] != by_adapter[2] != by_adapter[0], "an adapter changes nothing"


def test_requests_of_all_adapters_at_once_are_answered_as_alone(rig: Rig, files: Files) -> None:
    requests = [rig.add(prompt, adapter=k) for prompt in PROMPTS[1:3] for k in (0, 1, 2)]
    seen = []
    while rig.scheduler.has_work:
        plan = rig.step()
        assert plan is not None
        seen.append(plan.adapter)
    assert seen[:9] == [0, 1, 2] * 3
    for request in requests:
        assert output(request) == alone(request.prompt_ids.tolist(), model=files.models[request.adapter])


def test_kv_is_found_again_by_the_same_adapter_only(rig: Rig) -> None:
    prompt = chat("Please remember this list: apple, river, stone, cloud, lamp. " * 4)
    for again in (False, True):
        for adapter in (0, 1, 2):
            request = rig.add(prompt, adapter=adapter, new=4)
            rig.run()
            assert request.reused_tokens == (len(prompt) - 1 if again else 0)


def test_a_new_context_starts_without_an_adapter(files: Files) -> None:
    rig = Rig(model=files.models[0], lora=files.adapters)
    assert rig.say(PROMPTS[1], adapter=1) != rig.say(PROMPTS[1])
    with_adapter = rig.say(PROMPTS[1], adapter=1)
    rig.cache.flush()
    rig.check()
    rig.backend.allocate_kv(4096)
    assert rig.say(PROMPTS[1], adapter=1) == with_adapter
    rig.close()


def test_files_that_are_no_adapter_of_this_model_are_refused_with_the_reason(files: Files, tmp_path: Path) -> None:
    narrow = {name: (a[:, :-32], b) for name, (a, b) in lora.adapter(1).items()}
    unknown = {name.replace("attn_q", "attn_x"): pair for name, pair in lora.adapter(1).items()}
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(b"GGUF" + bytes(64))
    wrong = [
        (lora.write_adapter(tmp_path / "narrow.gguf", narrow), "incorrect shape"),
        (lora.write_adapter(tmp_path / "unknown.gguf", unknown), "attn_x"),
        (lora.write_adapter(tmp_path / "kind.gguf", lora.adapter(1), kind="model"), "general.type"),
        (files.models[0], "general.type"),
        (garbage, "GGUF version"),
    ]
    for file, reason in wrong:
        backend = LlamaCppBackend(files.models[0], lora={"mine": file})
        with pytest.raises(ModelLoadError, match=f"model.lora 'mine': .*{file.name}.*{reason}"):
            backend.load()
        backend.close()
