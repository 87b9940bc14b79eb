"""GGUF embedding models: their vectors beside a BERT in numpy, alone and in company, and what does not work out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (pip install 'weft[llama-cpp]')")

from tests.backends.tiny_embedders import (
    CONTEXT,
    DIM,
    LETTERS,
    POISON,
    VOCABULARY,
    WORDS,
    TinyBert,
    write_bert,
    write_causal,
)
from weft.backends.llama_cpp.embedder import LlamaCppEmbedder, is_embedding_model
from weft.backends.llama_cpp.gguf import read_metadata
from weft.backends.llama_cpp.tokenizer import GgufTokenizer
from weft.backends.registry import BUNDLED_MODEL, create_backend, is_embedder
from weft.backends.steps import StepCancelled
from weft.config.resolve import resolve
from weft.core.errors import EngineError, InvalidRequestError, ModelLoadError, SettingsError
from weft.core.sampling import SamplingParams
from weft.engine.llm import LLM
from weft.engine.runner import run_step
from weft.ipc.messages import Submit

TOLERANCE = 2e-3  # llama.cpp looks GELU up in a table of float16
KV_TOLERANCE = 4e-3  # K and V in float16
COMPANY_TOLERANCE = 1e-3  # sums in another order, and the same table
TEXTS = [
    "the cat sat on the mat.",
    "hello",
    "dogs running? xyz",
    "The CAT, sat!  on\tthe\nmat",
    "[MASK] the cat [SEP] and [CLS]",
    "café naïve 你好 hello 😀",
    "dog's " * 30,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embedders")


@pytest.fixture(scope="module", params=["cls", "mean", "last"])
def bert(request: pytest.FixtureRequest, folder: Path) -> TinyBert:
    return write_bert(folder / f"bert-{request.param}.gguf", request.param)


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    things: list[Any] = []
    yield things
    for thing in things:
        thing.close()


def embedder(opened: list[Any], path: Path, **options: Any) -> LlamaCppEmbedder:
    opened.append(LlamaCppEmbedder(path, threads=1, **options))
    opened[-1].load()
    return opened[-1]  # type: ignore[no-any-return]


def llm(opened: list[Any], path: Path, *sets: str) -> LLM:
    settings = resolve(flags={"model.path": str(path)}, sets=["backend.llama_cpp.n_threads=1", *sets]).settings
    opened.append(LLM(settings=settings))
    return opened[-1]  # type: ignore[no-any-return]


def some_ids(length: int, seed: int = 0) -> np.ndarray:
    """Token ids of a text of letters."""
    first = VOCABULARY.index("a")
    return np.random.default_rng(seed).integers(first, first + len(LETTERS), size=length).astype(np.int32)


def good(vectors: list[Any]) -> np.ndarray:
    assert not [vector for vector in vectors if isinstance(vector, EngineError)]
    return np.array(vectors)


# ---- vectors -----------------------------------------------------------------------------------------------------


def test_vectors_are_those_of_the_formulas(bert: TinyBert, opened: list[Any]) -> None:
    model = llm(opened, bert.path)
    vectors = model.embed(TEXTS)
    for text, vector in zip(TEXTS, vectors, strict=True):
        assert vector.dtype == np.float32 and vector.shape == (DIM,)
        np.testing.assert_allclose(vector, bert.vector(model.tokenizer.encode(text)), atol=TOLERANCE)
    assert model.stats["engine"]["steps"] == 1 and model.stats["kv"]["active"] == 0
    others = [bert.vector(model.tokenizer.encode(text)) for text in TEXTS[1:]]
    assert min(np.abs(vectors[0] - other).max() for other in others) > 20 * TOLERANCE  # so it can really fail


@pytest.mark.parametrize(("batch", "sequences"), [(64, 5), (16, 64), (1, 1), (100, 7), (512, 256)])
def test_in_company_as_alone(bert: TinyBert, opened: list[Any], batch: int, sequences: int) -> None:
    model = embedder(opened, bert.path, batch_tokens=batch, max_sequences=sequences)
    texts = [some_ids(length, seed=length) for length in (1, 5, 30, 64, 2, 100, 7, CONTEXT, 3, 3, 3, 3, 3, 3)]
    together = good(model.embed(texts))
    for text, vector in zip(texts, together, strict=True):
        np.testing.assert_allclose(vector, good(model.embed([text]))[0], atol=COMPANY_TOLERANCE)
        np.testing.assert_allclose(vector, bert.vector(text.tolist()), atol=TOLERANCE)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_causal_models(pooling: str, folder: Path, opened: list[Any]) -> None:
    path = write_causal(folder / f"causal-{pooling}.gguf", pooling)
    whole, parts = (embedder(opened, path, batch_tokens=tokens) for tokens in (512, 32))
    texts = [some_ids(length, seed=length) + 1000 for length in (3, 20, 32, 33, 200, 500)]
    alone = good([whole.embed([text])[0] for text in texts])
    np.testing.assert_allclose(good(whole.embed(texts)), alone, atol=KV_TOLERANCE)
    np.testing.assert_allclose(good(parts.embed(texts)), alone, atol=KV_TOLERANCE)
    changed = texts[-1].copy()
    changed[0] = 7  # the first part of a text that is computed in several still counts
    assert np.abs(good(parts.embed([changed]))[0] - alone[-1]).max() > 5 * KV_TOLERANCE


def test_through_the_engine_a_causal_model(folder: Path, opened: list[Any]) -> None:
    model = llm(opened, write_causal(folder / "through.gguf", "last"), "backend.llama_cpp.n_batch=32")
    texts = ["Once upon a time", "there was a cat " * 20, "hello"]
    ids = [model.tokenizer.encode(text) for text in texts]
    assert len(ids[1]) > 32 and all(one[-1] == 0 for one in ids)
    np.testing.assert_array_equal(model.embed(texts), model.embed(ids))
    assert abs(float(np.linalg.norm(model.embed("hello", dimensions=5)[0])) - 1) < 1e-6


def test_fewer_dimensions(bert: TinyBert, opened: list[Any]) -> None:
    model = llm(opened, bert.path)
    (whole,), (cut,) = model.embed("hello"), model.embed(["hello"], dimensions=4)
    np.testing.assert_allclose(cut, whole[:4] / np.linalg.norm(whole[:4]), rtol=1e-6)
    for wrong in (0, DIM + 1):
        with pytest.raises(InvalidRequestError, match=f"dimensions: {wrong} is not allowed .*1 to {DIM}"):
            model.embed("hello", dimensions=wrong)


# ---- what does not work out --------------------------------------------------------------------------------------


def test_a_text_without_a_usable_vector_fails_alone(bert: TinyBert, opened: list[Any]) -> None:
    model = embedder(opened, bert.path)
    texts = [some_ids(5, seed) for seed in range(6)]
    expected = good(model.embed(texts))
    bad = some_ids(5)
    bad[2] = POISON
    mixed = model.embed([*texts[:2], bad, *texts[2:4], bad, *texts[4:]])
    assert [isinstance(vector, EngineError) for vector in mixed] == [i in (2, 5) for i in range(8)]
    np.testing.assert_allclose(
        good([v for i, v in enumerate(mixed) if i not in (2, 5)]), expected, atol=COMPANY_TOLERANCE
    )
    np.testing.assert_allclose(good(model.embed(texts)), expected, atol=COMPANY_TOLERANCE)


def test_through_the_engine_it_ends_alone_too(bert: TinyBert, opened: list[Any]) -> None:
    model = llm(opened, bert.path)
    core = model._core
    for request_id, text in enumerate(("hello", "the poison", "cat")):
        ids = np.array(model.tokenizer.encode(text), dtype=np.int32)
        core.submit(Submit(request_id, ids.tobytes(), SamplingParams(embed=True)))
    outputs = core.step()
    assert [output.end.state for output in outputs if output.end] == ["completed", "failed", "completed"]
    assert [output.embedding is None for output in outputs] == [False, True, False]
    with pytest.raises(EngineError, match="not finite"):
        model.embed(["hello", "the poison"])
    assert len(model.embed("hello")) == 1 and model.stats["engine"]["idle"]


def test_long_texts_and_too_long_ones(bert: TinyBert, opened: list[Any]) -> None:
    model = llm(opened, bert.path, "backend.llama_cpp.n_batch=16")
    longest = some_ids(CONTEXT).tolist()
    np.testing.assert_allclose(model.embed([longest])[0], bert.vector(longest), atol=TOLERANCE)
    with pytest.raises(InvalidRequestError, match=f"{CONTEXT + 1} tokens, but at most {CONTEXT} are allowed") as caught:
        model.embed([longest + [7]])
    assert caught.value.code == "context_length_exceeded"
    shorter = llm(opened, bert.path, "model.max_context_tokens=20")
    with pytest.raises(InvalidRequestError, match="21 tokens, but at most 20"):
        shorter.embed([longest[:21]])
    assert len(shorter.embed([longest[:20]])) == 1
    with pytest.raises(SettingsError, match="more than the model allows"):
        llm(opened, bert.path, "model.max_context_tokens=1000")


def test_a_step_that_is_broken_off(bert: TinyBert, opened: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = llm(opened, bert.path)
    core = model._core
    params = SamplingParams(embed=True)
    core.submit(Submit(1, some_ids(200).tobytes(), params))
    core.submit(Submit(2, some_ids(9).tobytes(), params))
    plan = core.begin()
    assert plan is not None and plan.num_rows == 2
    core.abort([1, 2])
    breaker = core.backend._embedder._breaker  # type: ignore[attr-defined]
    begin = breaker.begin

    def begin_and_cancel(step: int) -> bool:
        runs: bool = begin(step)
        core.backend.cancel(step)
        return runs

    monkeypatch.setattr(breaker, "begin", begin_and_cancel)
    landing = run_step(core.backend, plan)
    assert isinstance(landing.outcome, StepCancelled)
    core.land(landing)
    assert [output.end.state for output in core.take_outputs() if output.end] == ["cancelled", "cancelled"]
    monkeypatch.undo()
    np.testing.assert_allclose(model.embed([some_ids(9)])[0], bert.vector(some_ids(9).tolist()), atol=TOLERANCE)
    assert model.stats["engine"]["idle"] and model.stats["kv"]["active"] == 0


def test_an_embedding_model_generates_nothing(bert: TinyBert, opened: list[Any]) -> None:
    model = llm(opened, bert.path)
    with pytest.raises(InvalidRequestError, match="makes embeddings and generates no text"):
        model.generate("hello")
    (text,) = model.embed("hello")
    assert text.shape == (DIM,)
    talks = llm(opened, BUNDLED_MODEL / "model-q8_0.gguf", "kv_cache.max_items=512")
    with pytest.raises(InvalidRequestError, match="generates text and makes no embeddings"):
        talks.embed("hello")


# ---- files -------------------------------------------------------------------------------------------------------


def test_which_files_are_embedding_models(bert: TinyBert, folder: Path) -> None:
    assert is_embedding_model(read_metadata(bert.path))
    assert is_embedding_model(read_metadata(write_causal(folder / "named.gguf", "last")))
    unnamed = write_causal(folder / "unnamed.gguf", None)
    assert not is_embedding_model(read_metadata(unnamed))
    assert not is_embedder(resolve(flags={"model.path": str(unnamed)}).settings)
    assert is_embedding_model(read_metadata(write_bert(folder / "none.gguf", "none").path))
    with pytest.raises(ModelLoadError, match="names no pooling"):
        LlamaCppEmbedder(unnamed).load()


def test_an_encoder_that_names_no_pooling_takes_the_mean(folder: Path, opened: list[Any]) -> None:
    bert = write_bert(folder / "nothing-named.gguf", "none")
    bert.pooling = "mean"
    vector = good(embedder(opened, bert.path).embed([some_ids(20)]))[0]
    np.testing.assert_allclose(vector, bert.vector(some_ids(20).tolist()), atol=TOLERANCE)


def test_a_reranker_is_refused_before_its_weights_are_read(folder: Path) -> None:
    backend = create_backend(resolve(flags={"model.path": str(write_bert(folder / "r.gguf", "rank").path)}).settings)
    with pytest.raises(ModelLoadError, match=r"r\.gguf: a reranker"):
        backend.load()
    backend.close()


def test_settings_that_mean_nothing_are_refused(bert: TinyBert) -> None:
    settings = resolve(flags={"model.path": str(bert.path)}, sets=["kv_cache.kv_type=q8_0"]).settings
    with pytest.raises(SettingsError, match=r"kv_cache\.kv_type: 'q8_0': an embedding model keeps no KV"):
        create_backend(settings)


# ---- tokens ------------------------------------------------------------------------------------------------------


def llama_tokenize(model: LlamaCppEmbedder, text: str) -> list[int]:
    """llama.cpp's own ids, special tokens added and found."""
    library, data = model._library, text.encode()
    ids = (library.llama_token * (len(data) + 16))()
    vocabulary = library.llama_model_get_vocab(model._model)
    return list(ids[: library.llama_tokenize(vocabulary, data, len(data), ids, len(ids), True, True)])


def test_tokens_are_llama_cpps(folder: Path, opened: list[Any]) -> None:
    rng = np.random.default_rng(3)
    parts = [*WORDS, *"abcxyz,.! \n\t", "ing", "é", "你", "😀", "[SEP]", "[CLS]", "[MASK]", "##ing", "[sep]", "ﬁ"]
    texts = [*TEXTS, "", " ", *("".join(rng.choice(parts, size=12)) for _ in range(300))]
    for path in (write_bert(folder / "t.gguf").path, write_causal(folder / "t2.gguf", "last")):
        model, tokenizer = embedder(opened, path), GgufTokenizer.load(path)
        assert [tokenizer.encode(text) for text in texts] == [llama_tokenize(model, text) for text in texts]


def test_word_pieces_become_text_again(bert: TinyBert) -> None:
    tokenizer = GgufTokenizer.load(bert.path)
    ids = tokenizer.encode("dogs running")
    assert ids[0] == VOCABULARY.index("[CLS]") and ids[-1] == VOCABULARY.index("[SEP]")
    assert tokenizer.decode(ids) == "dogs running"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "[CLS] dogs running[SEP]"
    stream = tokenizer.detokenizer()
    assert "".join(map(stream.push_one, ids)) + stream.flush() == "dogs running"
