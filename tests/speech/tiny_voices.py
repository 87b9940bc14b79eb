"""Piper voices of a few hundred bytes: an ONNX file written by hand, and its settings.

The network has the inputs and the output of a real one. It makes, for each id that it gets, `HOP` samples times the
length scale, all of the value 0.1 + 0.1 × the speaker's id, and of the first of them 1, so that nothing scales them.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

HOP = 100
_FLOAT, _INT64 = 1, 7


def write_voice(path: Path, *, speakers: int = 1, model: bytes | None = None, **settings: Any) -> Path:
    """The .onnx at `path`, and its .onnx.json with changes."""
    path.write_bytes(_model(speakers) if model is None else model)
    ids = {sign: [number] for number, sign in enumerate("_^$ abcdefghijklmnopqrstuvwxyzəˈɪ.,")}
    facts: dict[str, Any] = {
        "audio": {"sample_rate": 16_000},
        "espeak": {"voice": "en-us"},
        "phoneme_type": "text",
        "num_symbols": len(ids),
        "num_speakers": speakers,
        "speaker_id_map": {f"Speaker{number}": number for number in range(speakers)} if speakers > 1 else {},
        "inference": {"noise_scale": 0.5, "length_scale": 1.0, "noise_w": 0.5},
        "phoneme_id_map": ids,
    }
    Path(f"{path}.json").write_text(json.dumps(facts | settings))
    return path


def _model(speakers: int) -> bytes:
    """samples = ids * HOP * scales[1]; output = [1] + [0.1 + 0.1 * sid] * (samples - 1), as [1, 1, 1, samples]."""
    constants = {"hop": HOP, "one": 1}
    nodes = [
        _node("Cast", ["input_lengths"], ["ids"], to=_FLOAT),
        _node("Gather", ["scales", "one"], ["scale"], axis=0),
        _node("Cast", ["hop"], ["hop_f"], to=_FLOAT),
        _node("Mul", ["ids", "hop_f"], ["usual"]),
        _node("Mul", ["usual", "scale"], ["samples_f"]),
        _node("Cast", ["samples_f"], ["samples"], to=_INT64),
        _node("Sub", ["samples", "one"], ["rest"]),
        _node("Cast", ["sid" if speakers > 1 else "zero"], ["speaker"], to=_FLOAT),
        _node("Mul", ["speaker", "tenth"], ["louder"]),
        _node("Add", ["louder", "tenth"], ["value"]),
        _node("Expand", ["value", "rest"], ["tail"]),
        _node("Cast", ["one"], ["head"], to=_FLOAT),
        _node("Concat", ["head", "tail"], ["flat"], axis=0),
        _node("Reshape", ["flat", "shape"], ["output"]),
    ]
    graph = b"".join(_field(1, node) for node in nodes) + _field(2, b"voice")
    for name, value in constants.items():
        graph += _field(5, _tensor(name, _INT64, struct.pack("<q", value), 1))
    graph += _field(5, _tensor("zero", _INT64, struct.pack("<q", 0), 1))
    graph += _field(5, _tensor("tenth", _FLOAT, struct.pack("<f", 0.1), 1))
    graph += _field(5, _tensor("shape", _INT64, struct.pack("<4q", 1, 1, 1, -1), 4))
    graph += _field(11, _value("input", _INT64, 1, None)) + _field(11, _value("input_lengths", _INT64, 1))
    graph += _field(11, _value("scales", _FLOAT, 3))
    if speakers > 1:
        graph += _field(11, _value("sid", _INT64, 1))
    graph += _field(12, _value("output", _FLOAT, 1, 1, 1, None))
    return _field(1, 8) + _field(8, _field(1, b"") + _field(2, 13)) + _field(7, graph)


# ---- protocol buffers: the few of ONNX's messages that are needed ------------------------------------------------


def _field(number: int, value: int | bytes | str) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    result = bytearray()
    while value > 127:
        result.append(value & 127 | 128)
        value >>= 7
    return bytes((*result, value))


def _node(kind: str, inputs: list[str], outputs: list[str], **numbers: int) -> bytes:
    data = b"".join(_field(1, name) for name in inputs) + b"".join(_field(2, name) for name in outputs)
    data += _field(4, kind)
    for name, value in numbers.items():
        data += _field(5, _field(1, name) + _field(3, value) + _field(20, 2))  # an attribute of the type INT
    return data


def _tensor(name: str, kind: int, data: bytes, *dims: int) -> bytes:
    return b"".join(_field(1, dim) for dim in dims) + _field(2, kind) + _field(8, name) + _field(9, data)


def _value(name: str, kind: int, *dims: int | None) -> bytes:
    """An input or output; a length of None is free."""
    shape = b"".join(_field(1, _field(2, "n") if dim is None else _field(1, dim)) for dim in dims)
    return _field(1, name) + _field(2, _field(1, _field(1, kind) + _field(2, shape)))
