"""Text through llama.cpp's vocabularies: the ids and texts of `weft.text.tokenizer` for the same vocabulary."""

from __future__ import annotations

import json
import random
import shutil
import threading
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

import weft
from weft.core.errors import InvalidRequestError, ModelLoadError
from weft.text.tokenizer import Tokenizer

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (pip install 'weft[llama-cpp]')")

from weft.backends.llama_cpp import vocabulary  # noqa: E402
from weft.backends.llama_cpp.tokenizer import GgufTokenizer  # noqa: E402

DEMO = Path(weft.__file__).parent / "assets" / "demo"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
CODE = 'def f(x: int) -> str:\n\treturn f"{x!r:>10}"  # comment\r\n\n\nif __name__ == "__main__":\n    print(f(0x1F))\n'
TEXTS = [
    "",
    "a",
    " ",
    "Hello, world! I'll say: don't you've it's 'S 'T we'RE.",
    "你好，世界。今天天气很好！价格是3.14元；１２３",
    "日本語のテキスト、한국어 텍스트, русский текст, नमस्ते दुनिया, العربية، ไทย",
    "😀 👨‍👩‍👧‍👦 🇨🇳 ☎️ 👍🏽",
    "café naïve Ünï ﬁ Å ½ ² Ⅷ",
    "0 12 345 6789 1234567890 1,234.56 1e-5 0x1F 3.14.15",
    "  two   three    spaces ",
    "\t\ttabs\t and\u00a0no-break\u3000ideographic\u2028separators\u0085",
    "\n\n\nlines\r\n\r\n  \n end\n",
    "\0 \x01\x02\x1b[0m\x7f\u200b\u200d\ufeff\ufffd\uffff",
    CODE,
    "<|im_start|>user\nhi<|im_end|><|im_end|>\n<|endoftext|>",
    "<|im_end|> <|im_end|>\n<|im_end|>  ",
    "almost <|im_end| > <|im_<|im_end|>end|> <|IM_END|>",
    "x" * 30_000 + " " * 20_000 + "!" * 20_000 + "中" * 20_000,
    "word " * 5_000 + "<|im_start|>" * 500,
]


@dataclass
class Spec:
    """What to write to a GGUF file that holds a vocabulary and nothing else."""

    model: str
    tokens: list[str]
    types: list[int] | None = None
    merges: list[str] | None = None
    scores: list[float] | None = None
    pre: str | None = None
    more: dict[str, Any] = field(default_factory=dict)


def write(file: Path, spec: Spec) -> Path:
    writer = gguf.GGUFWriter(file, "t5" if spec.model == "t5" else "llama")
    writer.add_tokenizer_model(spec.model)
    writer.add_token_list(spec.tokens)
    if spec.pre is not None:
        writer.add_tokenizer_pre(spec.pre)
    if spec.types is not None:
        writer.add_token_types(spec.types)
    if spec.merges is not None:
        writer.add_token_merges(spec.merges)
    if spec.scores is not None:
        writer.add_token_scores(spec.scores)
    for key, value in spec.more.items():
        if key.startswith("split."):
            (writer.add_int32 if key.endswith("tensors.count") else writer.add_uint16)(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        else:
            (writer.add_uint32 if isinstance(value, int) else writer.add_string)(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def byte_level(*, pre: str = "qwen2", special: Sequence[str] = ("<|end|>",), **more: Any) -> Spec:
    """Byte-level BPE without merges: special tokens, then the 256 bytes."""
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    types = [CONTROL] * len(special) + [NORMAL] * 256
    return Spec("gpt2", tokens, types, merges=["a b"], pre=pre, more=more)


def save(backend: Backend, folder: Path, **config: str) -> Tokenizer:
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def demo() -> GgufTokenizer:
    return GgufTokenizer.load(DEMO / "model-q8_0.gguf")


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The demo model's own tokenizer, without the normalizer (NFC), of which a GGUF file knows nothing."""
    folder = tmp_path_factory.mktemp("demo") / "model"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.gguf", "*.safetensors"))
    spec = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    assert spec.pop("normalizer") == {"type": "NFC"}
    (folder / "tokenizer.json").write_text(json.dumps({**spec, "normalizer": None}), encoding="utf-8")
    return Tokenizer.load(folder)


def random_texts(seed: int, count: int) -> list[str]:
    """Random characters of which Python's Unicode tables, older than those of both tokenizers, know something."""
    rnd = random.Random(seed)
    blocks = [
        range(0x80),
        range(0x80),
        range(0x250),
        range(0x3000),
        range(0x3000, 0xA000),
        range(0x10000),
        range(0x20000),
    ]
    texts: list[str] = []
    while len(texts) < count:
        chars = [chr(rnd.choice(rnd.choice(blocks))) for _ in range(rnd.randint(1, 30))]
        texts.append("".join(c for c in chars if unicodedata.category(c) not in ("Cn", "Cs", "Co")))
    return texts


def assert_same(ours: GgufTokenizer, oracle: Tokenizer, texts: Sequence[str], *, exact: bool = True) -> None:
    """Same ids, and the same text of them, whole and streamed. `exact`: the text is the one that was encoded."""
    for text, ids in zip(texts, ours.encode_batch(texts, add_special_tokens=False), strict=True):
        assert ids == oracle.encode(text, add_special_tokens=False), text
        assert ours.encode(text) == oracle.encode(text), text
        for skip in (True, False):
            whole = ours.decode(ids, skip_special_tokens=skip)
            assert whole == oracle.decode(ids, skip_special_tokens=skip)
            stream = ours.detokenizer(skip_special_tokens=skip)
            assert "".join(map(stream.push_one, ids)) + stream.flush() == whole
        assert not exact or ours.decode(ids, skip_special_tokens=False) == text


def test_demo_facts(demo: GgufTokenizer) -> None:
    oracle = Tokenizer.load(DEMO)
    assert (demo.vocab_size, demo.bos_token_id, demo.eos_token_ids) == (4096, None, (2, 0))
    assert demo.eos_token_ids == oracle.eos_token_ids and demo.special_ids == oracle.special_ids == {0, 1, 2}
    for token_id in (-1, *range(4097)):
        assert demo.token_bytes(token_id) == oracle.token_bytes(token_id)
        assert demo.token_text(token_id) == oracle.token_text(token_id)


def test_demo_texts(demo: GgufTokenizer, oracle: Tokenizer) -> None:
    assert_same(demo, oracle, TEXTS)
    assert_same(demo, oracle, random_texts(1, 400))


def test_composed_texts_need_no_normalizer(demo: GgufTokenizer) -> None:
    """The one known disagreement on the demo model: its own tokenizer composes characters, llama.cpp does not."""
    oracle = Tokenizer.load(DEMO)
    for text in (*TEXTS[:-2], *random_texts(2, 200)):
        composed = unicodedata.normalize("NFC", text)
        assert demo.encode(composed) == oracle.encode(composed) == oracle.encode(text)
    decomposed = "cafe\u0301"
    assert demo.encode(decomposed) != oracle.encode(decomposed) == demo.encode("café")
    assert demo.decode(demo.encode(decomposed)) == decomposed


def test_demo_chats(demo: GgufTokenizer) -> None:
    oracle = Tokenizer.load(DEMO)
    chats: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": "你好！ hello 😀"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": " a\0b"}],
    ]
    for chat in chats:
        for prompt_follows in (True, False):
            text = demo.chat_text(chat, add_generation_prompt=prompt_follows)
            assert text == oracle.chat_text(chat, add_generation_prompt=prompt_follows)
            ids = demo.encode_chat(chat, add_generation_prompt=prompt_follows)
            assert ids == oracle.encode_chat(chat, add_generation_prompt=prompt_follows)
            assert demo.decode(ids, skip_special_tokens=False) == text
    with pytest.raises(InvalidRequestError, match="field of its own"):
        demo.encode_chat(chats[0], template_kwargs={"add_generation_prompt": True})


def test_text_continues_the_prompt(demo: GgufTokenizer) -> None:
    ids = demo.encode("ab 你好 😀 end")
    for cut in range(len(ids)):
        before = demo.detokenizer()
        stream = demo.detokenizer(prompt_ids=ids[:cut])
        assert before.push(ids[:cut]) + stream.push(ids[cut:]) + stream.flush() == demo.decode(ids)
    assert demo.decode([-1, *ids, 4096, 10**9]) == demo.decode(ids)


def test_words_end_where_they_do_elsewhere(tmp_path: Path) -> None:
    """Any two bytes merge, so that a word that ended elsewhere would have other ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in alphabet for b in alphabet]
    tokens = [*alphabet, *(a + b for a, b in pairs)]
    spec = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    spec |= {"normalizer": None, "added_tokens": []}
    spec["model"] |= {"vocab": {token: i for i, token in enumerate(tokens)}, "merges": pairs}
    oracle = save(Backend.from_str(json.dumps(spec)), tmp_path / "model")
    merges = [f"{a} {b}" for a, b in pairs]
    ours = GgufTokenizer.load(write(tmp_path / "x.gguf", Spec("gpt2", tokens, merges=merges, pre="qwen2")))
    texts = [text for text in TEXTS if "<|im" not in text and len(text) < 10_000]
    assert_same(ours, oracle, [*texts, *random_texts(3, 400)])
    # Unicode's case folding takes "ſ" for an "s"; llama.cpp knows 's and 'S only.
    assert ours.encode("x'\u017fx") != oracle.encode("x'\u017fx")


def sentencepiece(folder: Path) -> tuple[GgufTokenizer, Tokenizer]:
    """As Llama 2's: "▁" for spaces, one added in front, byte tokens, merges by score."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained = Backend(models.BPE())
    trained.normalizer = normalizer
    lines = ["the quick brown fox jumps over the lazy dog, hello world, hello again", "你好，世界。今天天气很好"]
    trained.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    vocab = json.loads(trained.to_str())["model"]["vocab"]
    words = sorted(vocab, key=vocab.__getitem__)
    tokens = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, *words, "<tool>"]
    ids = {token: i for i, token in enumerate(tokens)}
    merges = sorted((ids[a + b], ids[a], a, b) for a in words for b in words if a + b in ids)
    backend = Backend(
        models.BPE(ids, [(a, b) for _, _, a, b in merges], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizer
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in tokens[:3]])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    oracle = save(backend, folder / "model", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    scores = [0.0] * 259 + [-float(i) for i in range(len(words))] + [0.0]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words), USER_DEFINED]
    file = write(folder / "spm.gguf", Spec("llama", tokens, types, scores=scores))
    return GgufTokenizer.load(file), oracle


def test_sentencepiece(tmp_path: Path) -> None:
    ours, oracle = sentencepiece(tmp_path)
    assert (ours.bos_token_id, ours.eos_token_ids, ours.special_ids) == (1, (2,), {0, 1, 2})
    rnd = random.Random(4)
    parts = [
        *["hello ", " ", "  ", "world", "你", "😀", "\n", "▁", "\0", "<0x41>", " fox", "é"],
        "<tool>",
        "<s>",
        "</s>",
    ]
    texts = ["".join(rnd.choices(parts, k=rnd.randint(0, 12))) for _ in range(400)]
    assert_same(ours, oracle, [*TEXTS, *texts, *random_texts(5, 100)], exact=False)
    assert ours.decode(ours.encode(" a  b ")) == " a  b "
    bad = [3 + 0xE4, 3 + 0xBD, 3 + ord("a"), 3 + 0xFF]  # bytes that form no character
    stream = ours.detokenizer()
    assert "".join(map(stream.push_one, bad)) + stream.flush() == ours.decode(bad) == "\ufffd\ufffda\ufffd"
    assert ours.token_bytes(3 + 0xE4) == b"\xe4"


def test_bos_is_added_once(tmp_path: Path) -> None:
    spm, _ = sentencepiece(tmp_path)
    more = {
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
    }
    more["tokenizer.ggml.eos_token_id"] = 0
    bpe = GgufTokenizer.load(write(tmp_path / "b.gguf", byte_level(special=("<|end|>", "<|bos|>"), **more)))
    for tokenizer, bos, suffix in ((spm, "<s>", []), (bpe, "<|bos|>", [0])):
        plain = tokenizer.encode("hello")
        assert plain[0] == tokenizer.bos_token_id == 1
        assert tokenizer.encode(f"{bos}hello") == plain
        assert tokenizer.encode("hello", add_special_tokens=False) + suffix == plain[1:]
        assert tokenizer.encode("") == [1, *suffix] == tokenizer.encode(bos)
        assert tokenizer.encode(f"{bos}{bos}hello") == [1, *plain]
    assert bpe.encode("hello<|end|>") == bpe.encode("hello")


def test_llama_cpps_defaults_are_not_the_files_tokens(tmp_path: Path) -> None:
    """Token 11, which llama.cpp takes for BOS and EOS of any such file, is a letter; "<|end|>" it knows by name."""
    tokenizer = GgufTokenizer.load(write(tmp_path / "x.gguf", byte_level(pre="llama-bpe")))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.special_ids) == (None, (0,), {0})
    assert tokenizer.decode(tokenizer.encode("+*,-.")) == "+*,-."


def test_unigram(tmp_path: Path) -> None:
    tokens = ["<pad>", "</s>", "<unk>", "▁", "▁hello", "▁wor", "ld", "!", "extra"]
    types = [CONTROL, CONTROL, UNKNOWN, *[NORMAL] * 5, UNUSED]
    spec = Spec("t5", tokens, types, scores=[0.0, 0.0, 0.0, -3.0, -1.0, -1.5, -1.5, -2.0, -9.0])
    spec.more["tokenizer.ggml.add_space_prefix"] = True
    tokenizer = GgufTokenizer.load(write(tmp_path / "x.gguf", spec))
    assert tokenizer.encode("hello world!") == [4, 5, 6, 7, 1]
    assert tokenizer.decode([4, 5, 6, 7, 1]) == "hello world!"
    assert tokenizer.encode("hello 你") == [4, 3, 2, 1]
    assert tokenizer.token_bytes(8) == b"" and tokenizer.eos_token_ids == (1,)


def test_named_tokens_and_templates(tmp_path: Path) -> None:
    def rendered(tokenizer: GgufTokenizer, **kwargs: Any) -> str:
        return tokenizer.chat_text([{"role": "user", "content": "hi"}], template_kwargs=kwargs)

    more: dict[str, Any] = {
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 10**6,
        "tokenizer.chat_template": "{{ bos_token ~ eos_token }}|{{ pad_token ~ unk_token ~ messages[0].content }}",
        "tokenizer.chat_template.tool_use": "tools",
    }
    file = write(tmp_path / "x.gguf", byte_level(special=("<bos>", "<pad>"), **more))
    tokenizer = GgufTokenizer.load(file)
    assert rendered(tokenizer) == "<bos>|<pad>hi" and rendered(tokenizer, tools=[{"name": "f"}]) == "tools"
    assert rendered(GgufTokenizer.load(file, chat_template="{{ 'given' }}{{ bos_token }}")) == "given<bos>"
    (tmp_path / "other.jinja").write_text("other")
    assert rendered(GgufTokenizer.load(file, chat_template=str(tmp_path / "other.jinja"))) == "other"
    bare = GgufTokenizer.load(write(tmp_path / "y.gguf", byte_level()))
    assert bare.chat is None
    with pytest.raises(InvalidRequestError, match="no chat template"):
        rendered(bare)
    broken = write(tmp_path / "z.gguf", byte_level(**{"tokenizer.chat_template": "a\n{% if %}"}))
    with pytest.raises(ModelLoadError, match=r"z\.gguf: chat template 'default', line 2"):
        GgufTokenizer.load(broken)


def test_texts_that_llama_cpp_alone_would_not_survive(tmp_path: Path) -> None:
    """A word of 60,000 letters overflows the stack of its regular expressions."""
    tokenizer = GgufTokenizer.load(write(tmp_path / "x.gguf", byte_level(pre="deepseek-v3")))
    for text in ("a" * 60_000, "\n" * 60_000, "1" * 60_000, "!" * 60_000, "a\u0301" * 30_000):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    many = "<|end|>" * 40_000
    assert tokenizer.encode(many) == [0] * 40_000


def test_cutting_long_texts_changes_nothing(demo: GgufTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [
        CODE * 20,
        "Don't say 'it's 1,234.5 o'clock', he said; she'll\tnod...  " * 30,
        TEXTS[4] * 20,
        TEXTS[5] * 20,
    ]
    whole = demo.encode_batch(texts)
    monkeypatch.setattr(vocabulary, "PIECE_CHARS", 200)
    assert demo.encode_batch(texts) == whole


def test_several_threads_at_once(demo: GgufTokenizer) -> None:
    texts = [*TEXTS, *random_texts(6, 50)]
    expected = demo.encode_batch(texts)
    results: list[list[list[int]]] = []
    threads = [threading.Thread(target=lambda: results.append(demo.encode_batch(texts))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


def test_lone_surrogates_are_the_users_error(demo: GgufTokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="U\\+D83D at character 2"):
        demo.encode_batch(["fine", "ab\ud83d"])


def test_shards(tmp_path: Path) -> None:
    spec = byte_level(**{"split.no": 0, "split.count": 2})
    first = tmp_path / "m-00001-of-00002.gguf"
    second = Spec("", [], more={"split.no": 1, "split.count": 2})
    for file, part in ((first, spec), (tmp_path / "m-00002-of-00002.gguf", second)):
        part.more["split.tensors.count"] = 0
        write(file, part)
    for file in (first, tmp_path / "m-00002-of-00002.gguf"):
        assert GgufTokenizer.load(file).vocab_size == 257
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelLoadError, match=r"m-00002-of-00002\.gguf: missing"):
        GgufTokenizer.load(first)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    def refusal(spec: Spec | bytes) -> str:
        file = tmp_path / "x.gguf"
        file.write_bytes(spec) if isinstance(spec, bytes) else write(file, spec)
        with pytest.raises(ModelLoadError) as caught:
            GgufTokenizer.load(file)
        assert caught.value.message.startswith(f"{file}: ")
        return caught.value.message

    with pytest.raises(ModelLoadError, match=r"nothing\.gguf: cannot be read: No such file"):
        GgufTokenizer.load(tmp_path / "nothing.gguf")
    assert "not a GGUF file" in refusal(b"PK\x03\x04")
    assert "cut short" in refusal((DEMO / "model-q8_0.gguf").read_bytes()[:50_000])
    assert "incomplete" in refusal((DEMO / "model-q8_0.gguf").read_bytes()[:2_000_000])
    assert "unknown pre-tokenizer type: 'nonsense'" in refusal(byte_level(pre="nonsense"))
    twice = byte_level(special=("<|end|>", "a"))
    assert "the token 'a' is there twice" in refusal(twice)
    assert "holds no vocabulary" in refusal(Spec("gpt2", []))
    assert "lacks tokens of single bytes" in refusal(Spec("llama", ["<unk>", "<s>", "</s>", *BYTE_TOKENS[1:]]))
    words = Spec("bert", ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "hello"])
    assert "it names no token for [CLS]" in refusal(words)
