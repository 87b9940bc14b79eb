"""A model that keeps one state for a whole sequence: a conversation goes on, no prefix is shared, all else works."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

import gguf
from gguf.constants import TokenType

from tests.engine.llama.rig import Rig, output
from weft.backends.registry import BUNDLED_MODEL
from weft.backends.steps import StepCancelled
from weft.core.request import RequestState

EMBEDDING, INNER, STATE, RANK, KERNEL, LAYERS = 32, 64, 8, 4, 4, 2


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mamba of random weights with the bundled model's vocabulary."""
    path = tmp_path_factory.mktemp("mamba") / "mamba.gguf"
    tokenizer = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(EMBEDDING)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(KERNEL)
    writer.add_ssm_inner_size(INNER)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_time_step_rank(RANK)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.NORMAL] * len(tokens))
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(2)
    rng = np.random.default_rng(0)

    def add(name: str, *shape: int, scale: float = 0.3) -> None:
        writer.add_tensor(name, (rng.standard_normal(shape) * scale).astype(np.float32))

    add("token_embd.weight", len(tokens), EMBEDDING, scale=1.0)
    writer.add_tensor("output_norm.weight", np.ones(EMBEDDING, np.float32))
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        writer.add_tensor(f"{block}.attn_norm.weight", np.ones(EMBEDDING, np.float32))
        add(f"{block}.ssm_in.weight", 2 * INNER, EMBEDDING)
        add(f"{block}.ssm_conv1d.weight", INNER, KERNEL)
        add(f"{block}.ssm_conv1d.bias", INNER)
        add(f"{block}.ssm_x.weight", RANK + 2 * STATE, INNER)
        add(f"{block}.ssm_dt.weight", INNER, RANK)
        add(f"{block}.ssm_dt.bias", INNER)
        writer.add_tensor(f"{block}.ssm_a", -np.tile(np.arange(1, STATE + 1, dtype=np.float32), (INNER, 1)))
        writer.add_tensor(f"{block}.ssm_d", np.ones(INNER, np.float32))
        add(f"{block}.ssm_out.weight", EMBEDDING, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_it_is_recognised_and_says_so_once(mamba: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(model=mamba, sequences=4)
    assert not rig.geometry.shares_prefixes
    assert sum("recurrent" in record.message for record in caplog.records) == 1
    rig.close()


def test_same_prompts_one_after_another_and_together(mamba: Path) -> None:
    rig = Rig(model=mamba, sequences=4, max_batch_size=4)
    prompt = list(range(100, 160))
    first = rig.say(prompt, new=12, ignore_eos=True)
    second = rig.add(prompt, new=12, ignore_eos=True)
    rig.run()
    assert output(second) == first and second.reused_tokens == 0
    together = [rig.add(prompt, new=12, ignore_eos=True) for _ in range(6)]
    rig.run()
    assert all(output(request) == first for request in together)
    rig.close()


def test_a_conversation_goes_on_with_its_state(mamba: Path) -> None:
    rig, cold = Rig(model=mamba, sequences=4), Rig(model=mamba, sequences=4, retain="none")
    prompt = list(range(100, 160))
    for turn in range(3):
        request = rig.add(prompt, new=8, ignore_eos=True)
        rig.run()
        assert request.reused_tokens == (len(prompt) - 6 if turn else 0)
        assert output(request) == cold.say(prompt, new=8, ignore_eos=True)
        prompt = request.tokens.tolist() + list(range(200, 205))
    rig.close()
    cold.close()


def test_a_broken_off_prompt_leaves_no_state_behind(mamba: Path) -> None:
    rig = Rig(model=mamba, sequences=4, chunked_prefill_size=16, max_prefill_tokens=16)
    prompt = list(range(100, 180))
    expected = Rig(model=mamba, sequences=4).say(prompt, new=8, ignore_eos=True)
    request = rig.add(prompt, new=8)
    rig.step()
    plan = rig.scheduler.plan()
    assert plan is not None
    rig.scheduler.abort(request.request_id)
    rig.backend.cancel(plan.step)
    with pytest.raises(StepCancelled):
        rig.backend.forward(plan)
    rig.scheduler.cancelled(plan)
    rig.check()
    again = rig.add(prompt, new=8, ignore_eos=True)
    rig.run()
    assert again.reused_tokens == 0 and output(again) == expected
    rig.close()


def test_chunks_and_aborts(mamba: Path) -> None:
    rig = Rig(model=mamba, sequences=4, max_batch_size=4, chunked_prefill_size=16, max_prefill_tokens=16)
    prompt = list(range(100, 180))
    roomy = Rig(model=mamba, sequences=4)
    expected = roomy.say(prompt, new=8, ignore_eos=True)
    roomy.close()
    stays, goes = rig.add(prompt, new=8, ignore_eos=True), rig.add(prompt[::-1], new=8)
    rig.step()
    rig.scheduler.abort(goes.request_id)
    rig.run()
    assert goes.state is RequestState.CANCELLED
    assert output(stays) == expected
    rig.close()
