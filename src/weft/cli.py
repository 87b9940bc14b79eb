"""The `weft` command. Nothing heavy is imported before a command that needs it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

F = TypeVar("F", bound=Callable[..., Any])

app = typer.Typer(
    name="weft",
    help="Serve large language models on your own hardware.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[str | None, typer.Argument(help="Checkpoint folder or GGUF file; the bundled demo model without it.")]
Config = Annotated[Path | None, typer.Option("--config", help="YAML file with settings.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting; may be repeated.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
Lora = Annotated[
    list[str] | None,
    typer.Option("--lora", metavar="NAME=FILE", help="A LoRA adapter (GGUF) and its name; may be repeated."),
]
Adapter = Annotated[str | None, typer.Option(help="The LoRA adapter that answers, by its name.")]
BackendName = Annotated[str | None, typer.Option("--backend", help="auto, torch or fake.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
MaxTokens = Annotated[int | None, typer.Option(help="Most new tokens of one answer.")]
Seed = Annotated[int | None, typer.Option(help="Fixes the answer.")]


def reports_errors(command: F) -> F:
    """Ends a command with one line and the promised code: 2 for settings and checkpoints, 1 for all else."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        from weft.core.errors import ModelLoadError, SettingsError, WeftError

        try:
            return command(*args, **kwargs)
        except WeftError as error:
            print(f"weft: error: {error}", file=sys.stderr)
            raise typer.Exit(2 if isinstance(error, SettingsError | ModelLoadError) else 1) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None

    return wrapped  # type: ignore[return-value]


def _resolve(config: Path | None, sets: list[str] | None, flags: dict[str, Any]) -> Any:
    import os

    from weft.config.resolve import resolve

    return resolve(file=config, env=os.environ, flags=flags, sets=sets or [])


def _adapters(given: list[str] | None) -> dict[str, str] | None:
    """The setting that `--lora NAME=FILE` stands for. Raises SettingsError."""
    from weft.core.errors import SettingsError

    adapters: dict[str, str] = {}
    for item in given or ():
        name, _, file = item.partition("=")
        if not name or not file:
            raise SettingsError(f"--lora {item}: must be NAME=FILE", param="model.lora")
        if name in adapters:
            raise SettingsError(f"--lora {item}: the name {name!r} is given twice", param="model.lora")
        adapters[name] = file
    return adapters or None


def _offline_settings(
    model: str | None,
    dtype: str | None,
    backend: str | None,
    sets: list[str] | None,
    lora: list[str] | None,
    adapter: str | None,
) -> Any:
    from weft.core.errors import SettingsError

    flags = {"model.path": model, "model.dtype": dtype, "backend.name": backend, "model.lora": _adapters(lora)}
    # Without a server nobody waits on a connection, so nothing times out unless it is asked for.
    settings = _resolve(None, ["http.request_timeout_s=null", *(sets or [])], flags).settings
    names = settings.model.lora
    if (names or adapter is not None) and adapter not in names:
        what = "no adapter is chosen" if adapter is None else f"there is no {adapter!r}"
        raise SettingsError(f"--adapter: {what} (allowed: {', '.join(names) or 'none, without --lora'})")
    return settings


@app.command()
@reports_errors
def serve(
    model: Model = None,
    config: Config = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes any free one.")] = None,
    backend: BackendName = None,
    served_name: Annotated[str | None, typer.Option(help="The model's name in the API.")] = None,
    dtype: Dtype = None,
    lora: Lora = None,
    api_key: Annotated[list[str] | None, typer.Option(help="A key that clients must send; may be repeated.")] = None,
    restart: Annotated[
        bool | None, typer.Option("--restart", help="Start a dead engine again instead of ending.", show_default=False)
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Write arrivals and decisions to this file, for `weft simulate FILE`.")
    ] = None,
    sets: Sets = None,
) -> None:
    """Serve a checkpoint over HTTP, in OpenAI's form."""
    flags = {
        "model.path": model,
        "model.served_name": served_name,
        "model.dtype": dtype,
        "model.lora": _adapters(lora),
        "http.host": host,
        "http.port": port,
        "http.api_keys": api_key or None,
        "backend.name": backend,
        "engine.restart": restart,
        "engine.record": None if record is None else str(record),
    }
    settings = _resolve(config, sets, flags).settings
    from weft.launch.supervisor import serve as run

    raise typer.Exit(run(settings))


@app.command()
@reports_errors
def gateway(
    model: Annotated[
        str | None, typer.Argument(help="With --spawn: checkpoint folder or GGUF file; the demo model without it.")
    ] = None,
    worker: Annotated[
        list[str] | None, typer.Option("--worker", metavar="URL", help="A worker's address; may be repeated.")
    ] = None,
    spawn: Annotated[int, typer.Option(min=0, max=256, help="Start so many workers on this machine.")] = 0,
    config: Config = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on, 8100 without it; 0 takes any free one.")] = None,
    backend: BackendName = None,
    served_name: Annotated[str | None, typer.Option(help="The model's name in the API.")] = None,
    dtype: Dtype = None,
    lora: Lora = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="A key that clients must send, and that workers are sent.")
    ] = None,
    sets: Sets = None,
) -> None:
    """Serve several workers as one: each conversation goes to the worker that holds its cache."""
    import msgspec

    from weft.gateway.admin import check_url

    flags = {
        "model.path": model,
        "model.served_name": served_name,
        "model.dtype": dtype,
        "model.lora": _adapters(lora),
        "http.host": host,
        "http.port": port,
        "http.api_keys": api_key or None,
        "backend.name": backend,
    }
    if not worker and not spawn:
        raise typer.BadParameter("give --worker URL, or --spawn N, or both")
    if model is not None and not spawn:
        raise typer.BadParameter("MODEL is for the workers of --spawn; others have their own")
    resolved = _resolve(config, sets, flags)
    settings = resolved.settings
    if resolved.sources["http.port"] == "default":
        settings = msgspec.structs.replace(settings, http=msgspec.structs.replace(settings.http, port=8100))
    urls = [check_url(url) for url in worker or ()]
    from weft.launch.gateway import gateway as run

    raise typer.Exit(run(settings, urls, spawn))


@app.command()
@reports_errors
def generate(
    model: Model = None,
    prompt: Annotated[str | None, typer.Option(help="One prompt; its completion goes to stdout.")] = None,
    file: Annotated[Path | None, typer.Option(help="JSON lines, each with `prompt` or `messages`.")] = None,
    output: Annotated[Path | None, typer.Option(help="Where the answers go, as JSON lines.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send --prompt as a user's message.")] = False,
    temperature: Temperature = 0.0,
    max_tokens: MaxTokens = 256,
    seed: Seed = None,
    dtype: Dtype = None,
    backend: BackendName = None,
    lora: Lora = None,
    adapter: Adapter = None,
    sets: Sets = None,
) -> None:
    """Complete one prompt, or a file of them, without a server. A half-written output is resumed."""
    from weft.commands.generate import generate_file, generate_one
    from weft.core.sampling import SamplingParams

    params = SamplingParams(temperature=temperature, max_new_tokens=max_tokens, seed=seed)
    settings = _offline_settings(model, dtype, backend, sets, lora, adapter)
    if (prompt is None) == (file is None):
        raise typer.BadParameter("give either --prompt or --file")
    if prompt is not None:
        generate_one(settings, prompt, params, chat=chat, adapter=adapter)
        return
    if file is None or output is None:
        raise typer.BadParameter("--file needs --output")
    generate_file(settings, file, output, params, adapter=adapter)


@app.command()
@reports_errors
def chat(
    model: Annotated[str | None, typer.Argument(help="Checkpoint folder, GGUF file, or http://… of a server.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Temperature = 0.7,
    max_tokens: MaxTokens = 512,
    seed: Seed = None,
    api_key: Annotated[str | None, typer.Option(help="For a server that asks for one.")] = None,
    dtype: Dtype = None,
    backend: BackendName = None,
    lora: Lora = None,
    adapter: Adapter = None,
    sets: Sets = None,
) -> None:
    """Talk in the terminal; the history is kept, answers stream."""
    from weft.commands.chat import LocalTalker, ServerTalker, Talker, run_chat
    from weft.core.sampling import SamplingParams

    params = SamplingParams(temperature=temperature, max_new_tokens=max_tokens, seed=seed)
    talker: Talker
    if model is not None and model.startswith(("http://", "https://")):
        if lora:
            raise typer.BadParameter("--lora is for a model that is loaded here; a server has its own")
        talker = ServerTalker(model, params, api_key, adapter)
    else:
        talker = LocalTalker(_offline_settings(model, dtype, backend, sets, lora, adapter), params, adapter)
    run_chat(talker, system)


@app.command()
@reports_errors
def config(
    config: Config = None,
    sets: Sets = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only what differs from the default.")] = False,
) -> None:
    """Show the resolved settings, and where each came from."""
    from weft.config.describe import describe

    rows = [r for r in describe(_resolve(config, sets, {})) if not changed or r.source != "default"]
    width = max((len(row.key) for row in rows), default=0)
    value_width = min(32, max((len(row.value) for row in rows), default=0))
    for row in rows:
        print(f"{row.key:<{width}}  {row.value:<{value_width}}  {row.source}")


@app.command()
@reports_errors
def doctor(
    model: Annotated[str | None, typer.Option("--model", help="Also say whether this checkpoint fits.")] = None,
    config: Config = None,
    sets: Sets = None,
) -> None:
    """Say what this machine can run, what is missing and how to get it."""
    from weft.commands.doctor import report

    settings = _resolve(config, sets, {"model.path": model}).settings
    raise typer.Exit(0 if report(settings, check_model=model is not None) else 1)


@app.command()
@reports_errors
def simulate(
    trace: Annotated[Path | None, typer.Argument(help="A trace of `weft serve --record`, to be replayed.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Decides everything; 0 without it.")] = None,
    requests: Annotated[int | None, typer.Option(help="How many; 1000 without it.")] = None,
    seeds: Annotated[str | None, typer.Option(metavar="A..B", help="Many seeds, one run each.")] = None,
    runs: Annotated[int | None, typer.Option(help="So many seeds from --seed on, one run each.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes for many seeds; all processors without it.")] = None,
    faults: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="all, none, or some of cancel, timeout, crash, bad-row, slow-reader, tiny-pool, clock, flush; "
            "each may have a share, as in cancel=0.3.",
        ),
    ] = None,
    vary: Annotated[bool, typer.Option("--vary", help="Limits, sizes and policies come from the seed too.")] = False,
    check: Annotated[str | None, typer.Option(help="Prove all invariants after every step, or every event.")] = None,
    workload: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Who comes, as in rate=20,arrivals=bursty.")
    ] = None,
    cost: Annotated[
        list[str] | None, typer.Option(metavar="NAME=SECONDS", help="gpu, cpu, or how long parts of a step take.")
    ] = None,
    slo: Annotated[list[str] | None, typer.Option(metavar="NAME=SECONDS", help="For goodput: ttft=1,itl=0.1.")] = None,
    config: Config = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting of scheduler, kv_cache or a limit of http."),
    ] = None,
    record: Annotated[Path | None, typer.Option(help="Also write a trace of the run.")] = None,
    report: Annotated[Path | None, typer.Option(help="Print tables too, and draw the run into this SVG file.")] = None,
) -> None:
    """Run the real scheduler and cache on a virtual clock, with faults; or replay a trace."""
    from weft.commands.simulate import Asked
    from weft.commands.simulate import simulate as run

    asked = Asked(
        trace=trace,
        seed=seed,
        requests=requests,
        seeds=seeds,
        runs=runs,
        jobs=jobs,
        faults=faults,
        vary=vary,
        check=check,
        workload=tuple(workload or ()),
        cost=tuple(cost or ()),
        slo=tuple(slo or ()),
        config=config,
        sets=tuple(sets or ()),
        record=record,
        report=report,
    )
    raise typer.Exit(run(asked))


def _version(value: bool) -> None:
    if value:
        from weft import __version__

        print(f"weft {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the `weft` script."""
    app()


if __name__ == "__main__":
    main()
