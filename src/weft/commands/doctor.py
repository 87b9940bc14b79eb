"""`weft doctor`: what this machine can run, what is missing, and how to get it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from pathlib import Path

from weft.backends.base import Geometry
from weft.backends.checkpoint import Checkpoint
from weft.backends.llama_cpp.gguf import is_gguf, read_metadata, shards
from weft.backends.llama_cpp.library import HOW_TO_GET, is_installed, load_library
from weft.backends.llama_cpp.probe import amx_works
from weft.backends.registry import create_backend, model_folder
from weft.config.settings import Settings
from weft.core.errors import WeftError
from weft.engine.sizing import available_bytes, resolve_context, resolve_kv_slots, resolve_limits

_OPTIONAL = {
    "torch": ("the torch engine (serves checkpoints)", "pip install 'weft[torch]'"),
    "transformers": ("architectures beyond the native families", "pip install 'weft[torch]'"),
}


def report(settings: Settings, *, check_model: bool) -> bool:
    """Prints the report; True when a model can be served here."""
    print(f"weft {importlib.metadata.version('weft')}, Python {sys.version.split()[0]}, {platform.platform()}")
    print(f"processors: {os.cpu_count()}, instructions: {_instructions()}")
    print(f"memory: {available_bytes() / 2**30:.1f} GiB free")
    print(f"C++ compiler: {shutil.which('g++') or shutil.which('clang++') or 'none'}")
    fine = True
    for package, (purpose, how) in _OPTIONAL.items():
        try:
            print(f"{package} {importlib.metadata.version(package)}: {purpose}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{package} is missing: {purpose}. To get it: {how}")
            fine = fine and package != "torch"
    if fine:
        print(f"GPU: {_gpu()}")
    fine = _report_llama_cpp() or fine
    if check_model:
        fine = _report_model(settings) and fine
    return fine


def _report_llama_cpp() -> bool:
    """Whether GGUF files can be served, and how llama.cpp was built."""
    if not is_installed():
        print(f"llama-cpp-python is missing: the llama.cpp engine (serves GGUF files). To get it: {HOW_TO_GET}")
        print("  built for this processor: CMAKE_ARGS=-DGGML_NATIVE=ON; for NVIDIA GPUs: CMAKE_ARGS=-DGGML_CUDA=ON")
        return False
    try:
        library = load_library()
    except WeftError as error:
        print(error)
        return False
    facts = library.llama_print_system_info().decode().strip().strip("|").replace(" = 1", "").replace(" |", ",")
    print(f"llama-cpp-python {library.__version__}: the llama.cpp engine (serves GGUF files), {facts}")
    print(f"  GPU offload: {'yes' if library.llama_supports_gpu_offload() else 'no, built for the CPU'}")
    if not amx_works():
        print("  it crashes where it uses AMX, and is run without; a build by GCC 13 or newer is faster")
    return True


def _report_model(settings: Settings) -> bool:
    path: Path = model_folder(settings)
    try:
        architecture, size = _model_facts(path)
        print(f"{path}: {architecture}, {size / 2**20:.0f} MiB of weights")
        if size > available_bytes():
            print("it does not fit: its weights are larger than the free memory")
            return False
        backend = create_backend(settings)
        try:
            _report_room(settings, backend.load())
        finally:
            backend.close()
    except WeftError as error:
        print(f"it cannot be served: {error}")
        return False
    return True


def _model_facts(path: Path) -> tuple[str, int]:
    """Architecture, and bytes of weights. Raises ModelLoadError."""
    if is_gguf(path):
        files = shards(path)
        return str(read_metadata(files[0]).get("general.architecture")), sum(file.stat().st_size for file in files)
    checkpoint = Checkpoint.open(path)
    return checkpoint.architecture, checkpoint.total_bytes


def _report_room(settings: Settings, geometry: Geometry) -> None:
    limits = resolve_limits(settings, geometry)
    context = resolve_context(settings, geometry)
    slots = resolve_kv_slots(settings, geometry, limits, context)
    print(f"it fits: {geometry.description}, context {context} tokens")
    print(
        f"KV: {geometry.kv_bytes_per_token} bytes a token, room for {slots} tokens"
        f" ({slots * geometry.kv_bytes_per_token / 2**20:.0f} MiB, {slots / context:.1f} full contexts)"
    )


def _instructions() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            flags = next((line for line in file if line.startswith("flags")), "").split()
    except OSError:
        return "unknown"
    known = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
    return ", ".join(flag for flag in known if flag in flags) or "none of AVX2 and its successors"


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none that PyTorch can use; the CPU serves"
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
