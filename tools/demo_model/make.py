"""Everything in one command: data, tokenizer, training, GGUF and the table.

python -m tools.demo_model --out build/demo_model
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

if __package__ in (None, ""):  # started as a file: python tools/demo_model/make.py
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.demo_model.evaluate import evaluate
from tools.demo_model.export_gguf import export
from tools.demo_model.train import SEED, TOTAL_TOKENS, train

FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
)
LIMIT = 24_000_000


def install(source: Path, target: Path) -> None:
    """Copy a finished model to where the package finds it, with its Q8_0 file beside it."""
    target.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(source / name, target / name)
        (target / name).chmod(0o644)
    export(source, target / "model-q8_0.gguf", "Q8_0")
    size = sum(p.stat().st_size for p in target.iterdir() if p.is_file())
    if size > LIMIT:
        raise SystemExit(f"{target} holds {size} bytes, more than {LIMIT}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/demo_model"))
    parser.add_argument("--install", type=Path, help="folder that gets the finished files")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--tokens", type=int, default=TOTAL_TOKENS, help="without the polish")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    parser.add_argument("--count", type=int, default=100, help="evaluation cases for each row and language")
    args = parser.parse_args()
    began = time.time()
    final = train(args.out, args.seed, args.tokens, args.threads, args.resume, save_every=1_000_000)
    print(f"trained in {(time.time() - began) / 60:.0f} minutes", flush=True)
    for kind in ("F16", "Q8_0"):
        export(final, args.out / f"demo-{kind.lower()}.gguf", kind)
    if args.install:
        install(final, args.install)
    print(evaluate(final, args.count, seed=1, batch=50, wrong=0))


if __name__ == "__main__":
    main()
