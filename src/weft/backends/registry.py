"""Backends by name, loaded on first use, so that a missing dependency costs nothing until it is asked for."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from weft.backends.base import Backend
from weft.backends.checkpoint import Checkpoint
from weft.config.settings import Settings
from weft.core.errors import SettingsError

BUNDLED_MODEL = Path(__file__).parent.parent / "assets" / "demo"


def model_folder(settings: Settings) -> Path:
    """The checkpoint to serve; the bundled demo model where none is named."""
    return Path(settings.model.path) if settings.model.path is not None else BUNDLED_MODEL


def backend_name(settings: Settings) -> str:
    """The backend that `auto` stands for. Raises SettingsError where none can run here."""
    name = settings.backend.name
    if name == "auto":
        name = "torch"
    if name == "torch" and importlib.util.find_spec("torch") is None:
        raise SettingsError("backend.name: 'torch' needs PyTorch, which is not installed (pip install 'weft[torch]')")
    return name


def create_backend(settings: Settings) -> Backend:
    """A backend that has not loaded anything yet. Raises SettingsError, naming the extra where one is missing."""
    name = backend_name(settings)
    if name == "fake":
        return _create_fake(settings)
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
    return FakeBackend(
        vocab_size=min(fake.vocab, int(checkpoint.text.get("vocab_size", fake.vocab))),
        max_context_tokens=checkpoint.max_context_tokens,
        eos_token_ids=checkpoint.eos_token_ids,
        tokens_per_s=fake.tokens_per_s,
        faults=fake.faults,
    )
