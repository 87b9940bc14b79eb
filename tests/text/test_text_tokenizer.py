from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.core.errors import InvalidRequestError, ModelLoadError
from weft.text import Tokenizer

DEMO = Path(weft.__file__).parent / "assets" / "demo"
Kinds = dict[str, Tokenizer]


def copy(folder: Path, to: Path, **files: Any) -> Path:
    """A copy of a checkpoint folder with further JSON files; `tokenizer_config="…"` writes that text as it is."""
    shutil.copytree(folder, to)
    for name, value in files.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (to / f"{name}.json").write_text(text, encoding="utf-8")
    return to


def test_demo_model() -> None:
    tokenizer = Tokenizer.load(DEMO)
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (4096, None, (2, 0))
    assert tokenizer.special_ids == {0, 1, 2}
    ids = tokenizer.encode_chat([{"role": "user", "content": "你好！ hello 😀"}])
    assert ids[0] == 1
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\n你好！ hello 😀<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids) == "user\n你好！ hello 😀\nassistant\n"


@pytest.mark.parametrize("kind", ["byte_level", "llama", "unigram", "wordpiece", "word_end"])
def test_encodes_and_decodes_as_transformers_does(
    kind: str, folders: dict[str, Path], tokenizers_by_kind: Kinds
) -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(folders[kind], clean_up_tokenization_spaces=False)
    tokenizer = tokenizers_by_kind[kind]
    for text in ("hello world", " the fox ", "你好 hello", "", "  \n", "don't <think> stop"):
        for special in (True, False):
            ids = oracle.encode(text, add_special_tokens=special)
            assert tokenizer.encode(text, add_special_tokens=special) == ids
            assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
            assert tokenizer.decode(ids, skip_special_tokens=False) == oracle.decode(ids)
    assert tokenizer.special_ids >= set(oracle.all_special_ids)
    assert tokenizer.vocab_size == len(oracle)


def test_bos_is_added_once(tokenizers_by_kind: Kinds) -> None:
    for kind, bos in (("byte_level", "<|bos|>"), ("llama", "<s>")):
        tokenizer = tokenizers_by_kind[kind]
        plain = tokenizer.encode("hello")
        assert plain[0] == tokenizer.bos_token_id
        assert tokenizer.encode(f"{bos}hello") == plain
        assert tokenizer.encode(f"{bos}hello", add_special_tokens=False) == plain
        assert tokenizer.encode("hello", add_special_tokens=False) == plain[1:]
        assert tokenizer.encode("") == plain[:1] == tokenizer.encode(bos)
        # Only what the tokenizer would add is dropped; a second one that the user wrote stays.
        assert tokenizer.encode(f"{bos}{bos}hello") == [plain[0], *plain]


def test_suffixes_are_added_once_too(tokenizers_by_kind: Kinds) -> None:
    unigram, wordpiece = tokenizers_by_kind["unigram"], tokenizers_by_kind["wordpiece"]
    assert unigram.encode("hello</s>") == unigram.encode("hello")
    assert unigram.encode("hello")[-1] == unigram.eos_token_ids[0]
    assert wordpiece.encode("[CLS]hello[SEP]") == wordpiece.encode("hello")
    assert wordpiece.encode("") == [1, 2]


def test_batches_equal_single_texts(tokenizers_by_kind: Kinds) -> None:
    texts = ["hello", "", "你好，世界", "<s> twice", "</s>"]
    for tokenizer in tokenizers_by_kind.values():
        for special in (True, False):
            batch = tokenizer.encode_batch(texts, add_special_tokens=special)
            assert batch == [tokenizer.encode(text, add_special_tokens=special) for text in texts]
    assert tokenizer.encode_batch([]) == []


def test_tokenizing_leaves_other_threads_running() -> None:
    tokenizer = Tokenizer.load(DEMO)
    done = threading.Event()
    worker = threading.Thread(target=lambda: (tokenizer.encode("hello 你好 world " * 20_000), done.set()))
    begin = last = time.perf_counter()
    longest_pause = 0.0
    worker.start()
    while not done.is_set():
        now = time.perf_counter()
        longest_pause, last = max(longest_pause, now - last), now
    worker.join()
    assert longest_pause < 0.5 * (last - begin)  # Nearly all of it if the interpreter's lock were held.


def test_lone_surrogates_are_the_users_error(tokenizers_by_kind: Kinds) -> None:
    with pytest.raises(InvalidRequestError, match="U\\+D83D at character 2") as caught:
        tokenizers_by_kind["llama"].encode_batch(["fine", "ab\ud83d"])
    assert caught.value.http_status == 400


def test_truncation_and_padding_settings_are_ignored(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copy(folders["llama"], tmp_path / "model")
    spec = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    spec["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    spec["padding"] = {
        "strategy": {"Fixed": 32}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<unk>",
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    text = "hello world, the quick brown fox"
    assert Tokenizer.load(folder).encode(text) == Tokenizer.load(folders["llama"]).encode(text)


def test_ids_that_do_not_exist_give_nothing(tokenizers_by_kind: Kinds) -> None:
    for tokenizer in tokenizers_by_kind.values():
        ids = tokenizer.encode("the fox", add_special_tokens=False)
        strange = [-1, *ids, tokenizer.vocab_size, 10**9]
        assert tokenizer.decode(strange) == tokenizer.decode(ids)
        stream = tokenizer.detokenizer(prompt_ids=[-5, 10**9])
        assert stream.push(strange) + stream.flush() == tokenizer.decode(ids)
        assert tokenizer.token_bytes(-1) == tokenizer.token_bytes(10**9) == b""


def test_single_tokens(tokenizers_by_kind: Kinds) -> None:
    byte_level, llama = tokenizers_by_kind["byte_level"], tokenizers_by_kind["llama"]
    ids = byte_level.encode("😀 你", add_special_tokens=False)
    assert b"".join(map(byte_level.token_bytes, ids)).decode() == "😀 你"
    assert byte_level.token_text(ids[0]) == "�" or byte_level.token_text(ids[0]) == "😀"
    ids = llama.encode("hello 𠮷", add_special_tokens=False)
    assert b"".join(map(llama.token_bytes, ids)).decode() == " hello 𠮷"
    assert llama.token_bytes(3 + 0xE4) == b"\xe4"
    assert (llama.token_text(3 + 0xE4), llama.token_text(1)) == ("�", "<s>")
    wordpiece = tokenizers_by_kind["wordpiece"]
    texts = [wordpiece.token_text(i) for i in wordpiece.encode("the fox", add_special_tokens=False)]
    assert "".join(texts) == " the fox"


def test_end_and_begin_ids(folders: dict[str, Path], tmp_path: Path) -> None:
    base = folders["llama"]
    assert Tokenizer.load(base).eos_token_ids == (2,)
    both = copy(base, tmp_path / "a", generation_config={"eos_token_id": [7, 2]}, config={"eos_token_id": 9})
    assert Tokenizer.load(both).eos_token_ids == (2, 7)
    nested = copy(base, tmp_path / "b", config={"text_config": {"eos_token_id": 9}, "bos_token_id": 5})
    assert Tokenizer.load(nested).eos_token_ids == (2, 9)
    assert Tokenizer.load(nested).bos_token_id == 1
    bare = copy(base, tmp_path / "c", config={"bos_token_id": 5, "eos_token_id": None}, tokenizer_config={})
    assert (Tokenizer.load(bare).eos_token_ids, Tokenizer.load(bare).bos_token_id) == ((), 5)
    old = copy(base, tmp_path / "d", tokenizer_config={}, special_tokens_map={"eos_token": {"content": "</s>"}})
    assert Tokenizer.load(old).eos_token_ids == (2,)


def test_a_special_token_that_only_the_settings_name(folders: dict[str, Path], tmp_path: Path) -> None:
    plain = Tokenizer.load(folders["byte_level"])
    texts = {i: plain.token_text(i) for i in range(plain.vocab_size) if i not in plain.special_ids}
    one, two = [i for i, text in texts.items() if text.isascii() and text.isalpha()][-2:]
    config: dict[str, Any] = {"eos_token": plain.token_text(one), "pad_token": "<nowhere>"}
    config["additional_special_tokens"] = [plain.token_text(two)]
    tokenizer = Tokenizer.load(copy(folders["byte_level"], tmp_path / "m", tokenizer_config=config))
    assert tokenizer.vocab_size == plain.vocab_size
    assert tokenizer.eos_token_ids == (one,)
    assert tokenizer.special_ids == plain.special_ids | {one, two}
    text = plain.token_text(one) + plain.token_text(two)
    assert tokenizer.encode(text, add_special_tokens=False) == [one, two]
    assert tokenizer.decode([one, two]) == ""


def test_where_templates_come_from(folders: dict[str, Path], tmp_path: Path) -> None:
    def rendered(folder: Path, override: str | None = None) -> str:
        chat = Tokenizer.load(folder, chat_template=override).chat
        assert chat is not None
        return chat.render([{"role": "user", "content": "hi"}])

    named = [{"name": "default", "template": "listed"}, {"name": "tool_use", "template": "tools"}]
    folder = copy(folders["llama"], tmp_path / "m", chat_template={"chat_template": "oldest"})
    assert rendered(folder) == "oldest"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert rendered(folder) == "listed"
    (folder / "chat_template.jinja").write_text("file")
    assert rendered(folder) == "file"
    assert rendered(folder, "{{ 'given' }}") == "given"
    (tmp_path / "other.jinja").write_text("other")
    assert rendered(folder, str(tmp_path / "other.jinja")) == "other"
    with pytest.raises(ModelLoadError, match="nothing.jinja"):
        rendered(folder, str(tmp_path / "nothing.jinja"))
    with pytest.raises(ModelLoadError, match="line 1"):
        rendered(folder, "{% if %}")


def test_missing_and_broken_files_say_what_to_do(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere: not a folder"):
        Tokenizer.load(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: missing"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match=r"has tokenizer\.model but no tokenizer\.json.*save_pretrained"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"not a usable tokenizer\.json"):
        Tokenizer.load(tmp_path)
    for name, text in (("config", "{\n,"), ("tokenizer_config", "[]"), ("generation_config", "\ufeff")):
        with pytest.raises(ModelLoadError, match=f"{name}.json"):
            Tokenizer.load(copy(folders["llama"], tmp_path / name, **{name: text}))
    folder = copy(folders["llama"], tmp_path / "latin")
    (folder / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ModelLoadError, match="latin/config.json"):
        Tokenizer.load(folder)


def test_imports_no_heavy_library() -> None:
    code = "import sys, weft.text; print([m for m in ('torch', 'transformers', 'pydantic', 'zmq') if m in sys.modules])"
    source = str(Path(weft.__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": source}
    )
    assert result.stdout.strip() == "[]"
