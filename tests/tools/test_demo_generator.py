"""The demo model's data generator, its masks and the exported files."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from tools.demo_model.free_phrasings import FREE
from tools.demo_model.generate import MIX, POLISH, conversation
from tools.demo_model.skills import addition, counting, json_pairs, json_record, word_list
from tools.demo_model.talk import Talk, held_out

ASSETS = Path(__file__).parents[2] / "src" / "weft" / "assets" / "demo"
SIZE_LIMIT = 24_000_000


def documents(seed: int, count: int, late: int = POLISH) -> list[list[tuple[str, str]]]:
    rng = random.Random(seed)
    return [conversation(rng, rng.choice(list(MIX)), i % 7 == 0, late) for i in range(count)]


def test_same_seed_gives_the_same_conversations() -> None:
    assert documents(3, 30) == documents(3, 30)
    assert documents(3, 30) != documents(4, 30)


def test_conversations_alternate_and_have_no_empty_message() -> None:
    for document in documents(5, 300):
        roles = [role for role, _ in document if role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert all(text and text == text.strip() for _, text in document)
        assert [role for role, _ in document[1:]].count("system") == 0


def test_held_out_sums_are_never_shown() -> None:
    seen = set()
    for document in documents(6, 1200):
        for role, text in document:
            if role == "assistant" and (found := re.fullmatch(r"(\d+) \+ (\d+) = (\d+)", text)):
                a, b, c = map(int, found.groups())
                assert a + b == c
                assert not held_out(a, b) and not held_out(b, a)
                seen.add((a, b))
    assert len(seen) > 1000
    assert sum(held_out(a, b) for a in range(100) for b in range(100)) > 300


def test_free_phrasings_are_not_training_text() -> None:
    spoken = {text for document in documents(7, 1200) for role, text in document if role == "user"}
    for free in FREE:
        assert free.turns[-1] not in spoken, free.turns
    assert len(FREE) == 60 and sum(f.lang == "zh" for f in FREE) == 30


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_answers_are_right(lang: str) -> None:
    """A reversed list has the same items as the question, a count its two ends, JSON parses."""
    import json

    rng = random.Random(11)
    for _ in range(200):
        talk = Talk(rng, lang)
        user, reply = word_list(talk, "repeat")[0]
        assert reply in user
        for make in (json_record, json_pairs):
            assert isinstance(json.loads(make(talk)[0][1]), dict)
        numbers = [int(n) for n in re.findall(r"\d+", counting(talk, 80)[0][1])]
        assert sorted(numbers) == list(range(min(numbers), max(numbers) + 1))
        assert addition(talk, (17, 25))[0][1] == "17 + 25 = 42"


def test_mask_covers_assistant_text_and_end_mark_only() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from tools.demo_model.data import Encoder

    tokenizer = tokenizers.Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
    turns = [("user", "你好"), ("assistant", "你好！"), ("user", "1+1"), ("assistant", "1 + 1 = 2")]
    document = [("system", "Be brief."), *turns]
    ids, mask = Encoder(tokenizer).encode([document], 128)
    runs = tokenizer.decode(ids[0][mask[0]].tolist(), skip_special_tokens=False)
    assert runs == "你好！<|im_end|>1 + 1 = 2<|im_end|>"
    template = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in document)
    used = ids[0][: int((ids[0] != 0).sum())].tolist()
    assert used == tokenizer.encode(template, add_special_tokens=False).ids


def test_a_turn_that_does_not_fit_is_left_out() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from tools.demo_model.data import Encoder

    tokenizer = tokenizers.Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
    document = [("user", "Hi"), ("assistant", "Hello!"), ("user", "Say: " + "sun " * 60), ("assistant", "sun " * 60)]
    ids, mask = Encoder(tokenizer).encode([document], 64)
    assert tokenizer.decode(ids[0][mask[0]].tolist(), skip_special_tokens=False) == "Hello!<|im_end|>"


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_gguf_of_the_shipped_model(tmp_path: Path, kind: str) -> None:
    np = pytest.importorskip("numpy")
    gguf = pytest.importorskip("gguf")
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    from tools.demo_model.export_gguf import export

    reader = gguf.GGUFReader(export(ASSETS, tmp_path / "demo.gguf", kind))
    weights = load_file(ASSETS / "model.safetensors")
    assert len(reader.tensors) == len(weights)
    tensors = {t.name: t for t in reader.tensors}
    want = weights["model.layers.2.mlp.down_proj.weight"].to(torch.float32).numpy()
    tensor = tensors["blk.2.ffn_down.weight"]
    got = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    np.testing.assert_allclose(got, want, atol=float(abs(want).max()) / (100 if kind == "Q8_0" else 1000))
    norm = tensors["output_norm.weight"]
    np.testing.assert_array_equal(norm.data, weights["model.norm.weight"].to(torch.float32).numpy())
    assert reader.fields["general.architecture"].contents() == "qwen3"
    assert reader.fields["tokenizer.ggml.pre"].contents() == "qwen2"
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == 4096


def test_asset_size() -> None:
    files = [p for p in ASSETS.iterdir() if p.is_file()]
    assert sum(p.stat().st_size for p in files) <= SIZE_LIMIT
    assert all(p.stat().st_mode & 0o044 == 0o044 for p in files)
