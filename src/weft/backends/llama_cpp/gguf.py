"""Reads the header of GGUF files: what a model says about itself. Needs the standard library only.

The format is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md: four bytes "GGUF", the version, the
number of tensors and of key-value pairs, then the pairs; strings and arrays carry their length. The file is mapped, not
read: 300,000 strings are passed over in well under a second, and a length that lies costs nothing but an error.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from weft.core.errors import ModelLoadError

MAGIC = b"GGUF"
SHORT_ARRAY = 256
"""Arrays of up to so many elements are always read."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_TYPE_NAMES = {
    0: "uint8", 1: "int8", 2: "uint16", 3: "int16", 4: "uint32", 5: "int32", 6: "float32", 7: "bool", 8: "string",
    10: "uint64", 11: "int64", 12: "float64",
}  # fmt: skip
_MAX_STRING_BYTES = 1 << 26  # chat templates, the longest strings there are, have less than 2**20
_MAX_ELEMENTS = 1 << 26  # of an array; vocabularies and their merges have less than 2**20
_MIN_PAIR_BYTES = 14  # a key of one byte with its length, a type and a value
_LENGTH = struct.Struct("<Q")
_SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class LongArray:
    """Stands for an array that was passed over. `element_type` is GGUF's name of the type, such as "float32"."""

    element_type: str
    length: int


def is_gguf(path: Path) -> bool:
    """Whether the path is to be read as GGUF: by its content, or by its name, whatever it holds or if it is missing."""
    if path.is_dir():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_metadata(path: Path, *, long_arrays: Collection[str] = ()) -> dict[str, Any]:
    """The key-value pairs of the file's header.

    Values are numbers, bools, strings or lists of these. Arrays of more than `SHORT_ARRAY` elements are read only if
    `long_arrays` names them; for others there is a `LongArray`. Bytes of a string that are not UTF-8 become U+FFFD; in
    arrays, where tokens are told apart by them, they become lone surrogates ("surrogateescape").

    Errors: `ModelLoadError` naming the file: missing, not GGUF, a version or byte order not known, cut short, broken.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
            if magic != MAGIC:
                raise ModelLoadError(f"{path}: not a GGUF file (it begins with {magic!r}, not {MAGIC!r})")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data, long_arrays).read()
    except (OSError, ValueError) as error:  # ValueError: what cannot be mapped, such as a pipe
        raise ModelLoadError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def first_file(path: Path, *, long_arrays: Collection[str] = ()) -> tuple[Path, dict[str, Any]]:
    """The first file of the model that `path` is part of, and its metadata, which are the model's.

    `long_arrays`: see `read_metadata`. Errors: those of `shards`.
    """
    metadata = read_metadata(path, long_arrays=long_arrays)
    first = shards(path, metadata)[0]
    return first, metadata if first == path else read_metadata(first, long_arrays=long_arrays)


def shards(path: Path, metadata: Mapping[str, Any] | None = None) -> list[Path]:
    """The files of the model that `path`, any one of them, is part of, in order; `[path]` if it is the only one.

    `metadata` is that of `path`, if it was read already. Errors: `ModelLoadError` naming the first file that is missing
    or is no GGUF file, or if a part of a model is not named as such; those of `read_metadata`.
    """
    facts = read_metadata(path) if metadata is None else metadata
    count = facts.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return [path]
    name = _SHARD_NAME.fullmatch(path.name)
    if name is None or int(name["count"]) != count:
        raise ModelLoadError(
            f"{path}: it is one of {count} files of a model, which must be named …-00001-of-{count:05}.gguf and so on"
        )
    files = [path.with_name(f"{name['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    for file in files:
        if not file.is_file():
            raise ModelLoadError(f"{file}: missing; the model of {path.name} has {count} files, and all are needed")
        if not _has_magic(file):
            raise ModelLoadError(f"{file}: not a GGUF file; download it again")
    return files


def _has_magic(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror or error}") from error


class _Reader:
    """Walks through one file's header. Every length is checked against the file's size before it is believed."""

    def __init__(self, path: Path, data: mmap.mmap, long_arrays: Collection[str]) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._position = len(MAGIC)
        self._long_arrays = long_arrays

    def read(self) -> dict[str, Any]:
        version = self._scalar("I")
        if version & 0xFFFF == 0:
            self._fail("it is big-endian, which is not supported; convert it to little-endian")
        if version not in (2, 3):
            self._fail(f"GGUF version {version} is not supported (versions 2 and 3 are); convert the model anew")
        self._scalar("Q")  # number of tensors
        num_pairs = self._scalar("Q")
        if num_pairs * _MIN_PAIR_BYTES > self._size:
            self._fail(f"broken header: {num_pairs} key-value pairs in a file of {self._size} bytes")
        pairs: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            if not key or key in pairs:
                self._fail(f"broken header: {'empty key' if not key else f'key {key!r} is there twice'}")
            pairs[key] = self._value(key, self._scalar("I"))
        return pairs

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(key, self._scalar("I"), self._scalar("Q"))
        if kind not in _SCALARS:
            self._fail(f"broken header: {key!r} has the unknown type {kind}")
        return self._scalar(_SCALARS[kind])

    def _array(self, key: str, kind: int, count: int) -> list[Any] | LongArray:
        if kind not in _TYPE_NAMES:  # arrays of arrays among them, which llama.cpp refuses too
            self._fail(f"broken header: {key!r} is an array of the unknown type {kind}")
        item_bytes = _LENGTH.size if kind == _STRING else struct.calcsize(f"<{_SCALARS[kind]}")
        if count > _MAX_ELEMENTS or count * item_bytes > self._size - self._position:
            self._fail(f"cut short or broken: {key!r} claims to have {count} elements")
        wanted = count <= SHORT_ARRAY or key in self._long_arrays
        if kind == _STRING:
            texts = self._strings(key, count, keep=wanted)
            return texts if wanted else LongArray("string", count)
        begin = self._position
        self._position += count * item_bytes
        if not wanted:
            return LongArray(_TYPE_NAMES[kind], count)
        return list(struct.unpack_from(f"<{count}{_SCALARS[kind]}", self._data, begin))

    def _strings(self, key: str, count: int, *, keep: bool) -> list[str]:
        """Passes over the strings of an array; returns them only if they are to be kept."""
        data, position, size, length_at = self._data, self._position, self._size, _LENGTH.unpack_from
        texts: list[str] = []
        for _ in range(count):
            begin = position + 8
            if begin > size:
                self._fail_short()
            position = begin + length_at(data, position)[0]
            if position > size or position - begin > _MAX_STRING_BYTES:
                self._fail(f"cut short or broken: a string of {key!r} claims to have {position - begin} bytes")
            if keep:
                texts.append(data[begin:position].decode("utf-8", "surrogateescape"))
        self._position = position
        return texts

    def _string(self) -> str:
        length = self._scalar("Q")
        begin, end = self._position, self._position + length
        if length > _MAX_STRING_BYTES or end > self._size:
            self._fail(f"cut short or broken: a string claims to have {length} bytes")
        self._position = end
        return self._data[begin:end].decode("utf-8", "replace")

    def _scalar(self, form: str) -> Any:
        begin = self._position
        self._position += struct.calcsize(f"<{form}")
        if self._position > self._size:
            self._fail_short()
        return struct.unpack_from(f"<{form}", self._data, begin)[0]

    def _fail_short(self) -> NoReturn:
        self._fail(f"cut short: its header does not end within the file's {self._size} bytes; download it again")

    def _fail(self, message: str) -> NoReturn:
        raise ModelLoadError(f"{self._path}: {message}")
