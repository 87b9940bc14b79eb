"""Backends by name, loaded on first use, so that a missing dependency costs nothing until it is asked for."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from weft.backends.base import Backend
from weft.backends.checkpoint import Checkpoint
from weft.backends.llama_cpp.gguf import first_file, is_gguf
from weft.config.settings import Settings
from weft.core.errors import SettingsError
from weft.media.images import check_installed
from weft.text.placeholders import Placeholder, Placeholders

if TYPE_CHECKING:
    from weft.text.tokenizer import BaseTokenizer

EMBEDDING_ENGINES = frozenset({"llama_cpp", "fake"})
"""Backends, by name, that serve embedding models too."""
BUNDLED_MODEL = Path(__file__).parent.parent / "assets" / "demo"


def model_folder(settings: Settings) -> Path:
    """The checkpoint to serve; the bundled demo model where none is named."""
    return Path(settings.model.path) if settings.model.path is not None else BUNDLED_MODEL


def backend_name(settings: Settings) -> str:
    """The backend that `auto` stands for. Raises SettingsError where none can run here."""
    name = settings.backend.name
    if name == "auto":
        name = "llama_cpp" if is_gguf(model_folder(settings)) else "torch"
    if name == "torch" and importlib.util.find_spec("torch") is None:
        raise SettingsError("backend.name: 'torch' needs PyTorch, which is not installed (pip install 'weft[torch]')")
    return name


def create_backend(settings: Settings) -> Backend:
    """A backend that has not loaded anything yet. Raises SettingsError, naming the extra where one is missing."""
    backend = _create(settings)
    if settings.model.lora and "lora" not in backend.features:
        raise SettingsError(
            f"model.lora: the {backend.name} engine has no LoRA adapters (the llama_cpp engine has, for GGUF models)"
        )
    for name, file in settings.model.lora.items():
        if not Path(file).is_file():
            raise SettingsError(f"model.lora {name!r}: there is no file {file}")
    return backend


def _create(settings: Settings) -> Backend:
    name = backend_name(settings)
    if name != "llama_cpp" and settings.kv_cache.kv_type != "auto":
        raise SettingsError(
            f"kv_cache.kv_type: {settings.kv_cache.kv_type!r} is for the llama_cpp engine; {name} has auto only"
        )
    if name == "fake":
        return _create_fake(settings)
    if name == "llama_cpp":
        return _create_llama_cpp_embedder(settings) if is_embedder(settings) else _create_llama_cpp(settings)
    from weft.backends.torch.backend import TorchBackend

    torch = settings.backend.torch
    return TorchBackend(
        model_folder(settings),
        dtype=settings.model.dtype,
        device=torch.device,
        threads=None if torch.threads == "auto" else torch.threads,
        attention=torch.attention,
    )


def _create_fake(settings: Settings) -> Backend:
    from weft.backends.fake.backend import FakeBackend

    # The text process reads the tokenizer of this folder, so the fake must not choose tokens that it cannot show.
    checkpoint = Checkpoint.open(model_folder(settings))
    fake = settings.backend.fake
    if "image" in fake.modalities:
        check_installed()
    return FakeBackend(
        vocab_size=min(fake.vocab, int(checkpoint.text.get("vocab_size", fake.vocab))),
        max_context_tokens=checkpoint.max_context_tokens,
        eos_token_ids=checkpoint.eos_token_ids,
        tokens_per_s=fake.tokens_per_s,
        embeddings=fake.embeddings,
        faults=fake.faults,
        modalities=fake.modalities,
    )


def media_placeholders(settings: Settings) -> Placeholders:
    """What stands in prompts for the media that the engine takes."""
    if backend_name(settings) != "fake":
        return {}
    from weft.backends.fake.backend import MEDIA_TOKENS

    return {kind: Placeholder(f"<|{kind}|>", 0, lambda _: MEDIA_TOKENS) for kind in settings.backend.fake.modalities}


def _create_llama_cpp(settings: Settings) -> Backend:
    from weft.backends.llama_cpp.backend import RUNNING_SET, LlamaCppBackend, LlamaCppOptions
    from weft.backends.llama_cpp.library import MAX_SEQUENCES

    llama, http, kv = settings.backend.llama_cpp, settings.http, settings.kv_cache
    if kv.page_size != 1:
        raise SettingsError(f"kv_cache.page_size {kv.page_size}: the llama_cpp engine has pages of one token")
    running = http.max_concurrent_requests if http.max_concurrent_requests != "auto" else RUNNING_SET
    rows = settings.scheduler.max_batch_size
    sequences = min(255, max(32, 4 * running)) if llama.n_seq_max == "auto" else llama.n_seq_max
    host = sequences < MAX_SEQUENCES and kv.retain == "prefix" if kv.host_memory_mb == "auto" else kv.host_memory_mb > 0
    options = LlamaCppOptions(
        num_sequences=sequences,
        batch_tokens=llama.n_batch,
        batch_rows=running if rows == "auto" else rows,
        threads=None if llama.n_threads == "auto" else llama.n_threads,
        gpu_layers=None if llama.n_gpu_layers == "auto" else llama.n_gpu_layers,
        flash_attention=None if llama.flash_attn == "auto" else llama.flash_attn,
        kv_type="f16" if kv.kv_type == "auto" else kv.kv_type,
        host_pieces=host,
    )
    adapters = {name: Path(file) for name, file in settings.model.lora.items()}
    return LlamaCppBackend(model_folder(settings), options, adapters)


def _create_llama_cpp_embedder(settings: Settings) -> Backend:
    from weft.backends.llama_cpp.embedding_backend import RUNNING_SET, EmbeddingOptions, LlamaCppEmbeddingBackend

    llama, context = settings.backend.llama_cpp, settings.model.max_context_tokens
    if settings.kv_cache.kv_type != "auto":
        text = f"kv_cache.kv_type: {settings.kv_cache.kv_type!r}: an embedding model keeps no KV (allowed: auto)"
        raise SettingsError(text)
    rows, running = settings.scheduler.max_batch_size, settings.http.max_concurrent_requests
    if rows == "auto":
        rows = RUNNING_SET if running == "auto" else running
    options = EmbeddingOptions(
        num_sequences=min(256, rows) if llama.n_seq_max == "auto" else llama.n_seq_max,
        batch_tokens=llama.n_batch,
        threads=None if llama.n_threads == "auto" else llama.n_threads,
        gpu_layers=None if llama.n_gpu_layers == "auto" else llama.n_gpu_layers,
        flash_attention=None if llama.flash_attn == "auto" else llama.flash_attn,
        max_input_tokens=None if context == "auto" else context,
    )
    return LlamaCppEmbeddingBackend(model_folder(settings), options)


def is_embedder(settings: Settings) -> bool:
    """Whether the model that is served makes vectors and no text. Raises ModelLoadError."""
    name = backend_name(settings)
    if name == "fake":
        return settings.backend.fake.embeddings is not None
    if name != "llama_cpp":
        return False
    from weft.backends.llama_cpp.embedder import is_embedding_model

    return is_embedding_model(first_file(model_folder(settings))[1])


def load_tokenizer(settings: Settings) -> BaseTokenizer:
    """The tokenizer of the model that is served. Raises ModelLoadError."""
    path, template = model_folder(settings), settings.model.chat_template
    if is_gguf(path):
        from weft.backends.llama_cpp.tokenizer import GgufTokenizer

        return GgufTokenizer.load(path, chat_template=template)
    from weft.text.tokenizer import Tokenizer

    return Tokenizer.load(path, chat_template=template)


def context_tokens(settings: Settings) -> int:
    """Longest sequence of the model that is served, before `model.max_context_tokens`. Raises ModelLoadError."""
    path = model_folder(settings)
    if is_gguf(path):
        _, facts = first_file(path)
        return int(facts.get(f"{facts.get('general.architecture')}.context_length", 0))
    return Checkpoint.open(path).max_context_tokens
