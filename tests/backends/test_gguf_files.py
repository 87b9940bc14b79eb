"""Reading GGUF headers without a library: values, shards, and how each fault is named."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.backends.llama_cpp.gguf import SHORT_ARRAY, LongArray, is_gguf, read_metadata, shards
from weft.core.errors import ModelLoadError

DEMO = Path(weft.__file__).parent / "assets" / "demo" / "model-q8_0.gguf"
UINT32, STRING, ARRAY = 4, 8, 9


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, items: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + items


def header(*pairs: bytes, version: int = 3, count: int | None = None) -> bytes:
    """A file without tensors; `count` is what it claims about its pairs."""
    return b"GGUF" + struct.pack("<IQQ", version, 0, len(pairs) if count is None else count) + b"".join(pairs)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        read_metadata(path)
    assert str(path) in caught.value.message
    return caught.value.message.removeprefix(f"{path}: ")


def test_the_bundled_model() -> None:
    facts = read_metadata(DEMO)
    assert facts["general.architecture"] == "qwen3" and facts["qwen3.context_length"] == 2048
    assert facts["tokenizer.ggml.add_bos_token"] is False
    assert facts["tokenizer.ggml.tokens"] == LongArray("string", 4096)
    assert facts["tokenizer.ggml.token_type"] == LongArray("int32", 4096)
    assert facts["tokenizer.chat_template"] == DEMO.with_name("chat_template.jinja").read_text(encoding="utf-8")
    named = read_metadata(DEMO, long_arrays=["tokenizer.ggml.tokens"])["tokenizer.ggml.tokens"]
    assert len(named) == 4096 and named[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.mark.parametrize("version", [2, 3])
def test_every_type_of_value(tmp_path: Path, version: int) -> None:
    scalars: dict[int, tuple[str, Any]] = {
        0: ("B", 255), 1: ("b", -128), 2: ("H", 65535), 3: ("h", -2), 4: ("I", 2**32 - 1), 5: ("i", -3), 6: ("f", 0.5),
        7: ("?", True), 10: ("Q", 2**64 - 1), 11: ("q", -(2**63)), 12: ("d", 0.1),
    }  # fmt: skip
    pairs = [pair(f"s{kind}", kind, struct.pack(f"<{form}", value)) for kind, (form, value) in scalars.items()]
    pairs += [
        pair(f"a{kind}", ARRAY, array(kind, 2, struct.pack(f"<2{form}", value, value)))
        for kind, (form, value) in scalars.items()
    ]
    pairs.append(pair("text", STRING, text("zwölf\0 你")))
    pairs.append(pair("broken text", STRING, text(b"a\xff")))
    pairs.append(pair("texts", ARRAY, array(STRING, 3, text("") + text(b"\xfe") + text("b"))))
    pairs.append(pair("none", ARRAY, array(UINT32, 0, b"")))
    facts = read_metadata(write(tmp_path / "x.gguf", header(*pairs, version=version)))
    for kind, (_, value) in scalars.items():
        assert facts[f"s{kind}"] == value and facts[f"a{kind}"] == [value, value]
    assert facts["text"] == "zwölf\0 你" and facts["broken text"] == "a\ufffd"
    assert facts["texts"] == ["", "\udcfe", "b"] and facts["none"] == []


def test_long_arrays_are_passed_over(tmp_path: Path) -> None:
    count = 100_000
    words = b"".join(text(f"word {i % 1000}") for i in range(count))
    pairs = (
        pair("words", ARRAY, array(STRING, count, words)),
        pair("numbers", ARRAY, array(UINT32, count, bytes(4 * count))),
        pair("short", ARRAY, array(UINT32, SHORT_ARRAY, bytes(4 * SHORT_ARRAY))),
        pair("last", UINT32, struct.pack("<I", 7)),
    )
    file = write(tmp_path / "x.gguf", header(*pairs))
    tracemalloc.start()
    facts = read_metadata(file)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()
    assert facts["words"] == LongArray("string", count) and facts["numbers"] == LongArray("uint32", count)
    assert facts["short"] == [0] * SHORT_ARRAY and facts["last"] == 7
    assert read_metadata(file, long_arrays={"words"})["words"][-1] == "word 999"


def test_a_header_cut_anywhere_is_refused(tmp_path: Path) -> None:
    data = header(
        pair("general.architecture", STRING, text("llama")),
        pair("tokenizer.ggml.tokens", ARRAY, array(STRING, 2, text("ab") + text("c"))),
        pair("numbers", ARRAY, array(UINT32, 3, bytes(12))),
        pair("n", UINT32, bytes(4)),
    )
    file = tmp_path / "x.gguf"
    for length in range(len(data)):
        message = refusal(write(file, data[:length]))
        assert "not a GGUF file" in message if length < 4 else "cut short" in message or "broken" in message
    assert read_metadata(write(file, data))["n"] == 0


def test_lengths_that_lie_cost_nothing(tmp_path: Path) -> None:
    huge = struct.pack("<Q", 2**63)
    cases = {
        "pairs": header(count=2**61),
        "key": header(huge, bytes(64)),
        "string": header(pair("k", STRING, huge), bytes(64)),
        "numbers": header(pair("k", ARRAY, array(UINT32, 2**62, bytes(64)))),
        "strings": header(pair("k", ARRAY, array(STRING, 2**40, bytes(64)))),
        "a string of them": header(pair("k", ARRAY, array(STRING, 2, text("a") + huge + bytes(64)))),
        "longer than the file": header(pair("k", STRING, struct.pack("<Q", 1000) + bytes(999))),
    }
    tracemalloc.start()
    for name, data in cases.items():
        assert "broken" in refusal(write(tmp_path / "x.gguf", data)), name
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_what_it_is_not(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    assert "cannot be read: No such file" in refusal(file)
    assert "cannot be read: Is a directory" in refusal(tmp_path)
    assert "not a GGUF file (it begins with b'', not b'GGUF')" in refusal(write(file, b""))
    assert "not a GGUF file (it begins with b'PK\\x03\\x04'" in refusal(write(file, b"PK\x03\x04" + bytes(100)))
    assert "version 1 is not supported" in refusal(write(file, header(version=1)))
    assert "version 4 is not supported" in refusal(write(file, header(version=4)))
    assert "big-endian" in refusal(write(file, b"GGUF" + struct.pack(">IQQ", 3, 0, 0)))
    assert "unknown type 13" in refusal(write(file, header(pair("k", 13, bytes(20)))))
    assert "array of the unknown type 9" in refusal(write(file, header(pair("k", ARRAY, array(ARRAY, 1, bytes(20))))))
    twice = pair("k", UINT32, bytes(4))
    assert "key 'k' is there twice" in refusal(write(file, header(twice, twice)))
    assert "empty key" in refusal(write(file, header(pair("", UINT32, bytes(4)))))


def test_is_gguf(tmp_path: Path) -> None:
    assert is_gguf(DEMO) and not is_gguf(DEMO.parent)
    assert is_gguf(tmp_path / "missing.gguf") and not is_gguf(tmp_path / "missing")
    assert is_gguf(write(tmp_path / "blob", header())) and not is_gguf(write(tmp_path / "other", b"GGU"))
    (tmp_path / "folder.gguf").mkdir()
    assert not is_gguf(tmp_path / "folder.gguf")


def test_shards(tmp_path: Path) -> None:
    def part(number: int, count: int) -> bytes:
        no, of = (pair(f"split.{name}", 2, struct.pack("<H", v)) for name, v in (("no", number), ("count", count)))
        return header(no, of)

    files = [write(tmp_path / f"m-{n:05}-of-00003.gguf", part(n - 1, 3)) for n in (1, 2, 3)]
    for file in files:
        assert shards(file) == files
    assert shards(DEMO) == [DEMO] == shards(DEMO, {"split.count": 1})
    files[1].unlink()
    with pytest.raises(ModelLoadError, match=r"m-00002-of-00003\.gguf: missing.* has 3 files"):
        shards(files[0])
    files[1].write_bytes(b"<html>")
    with pytest.raises(ModelLoadError, match=r"m-00002-of-00003\.gguf: not a GGUF file"):
        shards(files[2])
    with pytest.raises(ModelLoadError, match=r"renamed\.gguf: it is one of 3 files.*-00001-of-00003\.gguf"):
        shards(Path(shutil.copy(files[0], tmp_path / "renamed.gguf")))


def test_needs_no_library() -> None:
    code = "import sys, weft.backends.llama_cpp.gguf as g; print(any('llama_cpp' == m for m in sys.modules))"
    source = str(Path(weft.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": source}
    )
    assert done.stdout.strip() == "False"
