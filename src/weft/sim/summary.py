"""Summary and tables of a run, as text that is the same for the same input."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from weft.core.request import RequestState
from weft.engine.trace import Header
from weft.scheduler.scheduler import Scheduler
from weft.sim.measure import Floats, Measure, Record, percentiles
from weft.sim.options import Slo

_LABEL = 12


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is left of a run.

    Attributes:
        title: what was run, in a few words.
        end_s: virtual time at the end. evicted_tokens: till then. digest: of all decisions.
        scheduler: as it was left, for its counters.
        extra: more lines for the summary, (label, text).
    """

    title: str
    header: Header
    measure: Measure
    scheduler: Scheduler
    slo: Slo
    end_s: float
    evicted_tokens: int
    digest: str
    extra: tuple[tuple[str, str], ...] = ()


def summary(outcome: Outcome) -> str:
    """A few lines for stdout."""
    measure, meters = outcome.measure, outcome.scheduler.meters
    records = measure.records
    seconds = max(outcome.end_s, 1e-9)
    good = sum(r.meets(outcome.slo) for r in records)
    prompt, cached = sum(r.input_tokens for r in records), sum(r.cached_tokens for r in records)
    generated = sum(r.output_tokens for r in records)
    modes = ", ".join(f"{count} {mode}" for mode, count in measure.modes.items())
    samples = measure.samples()
    rows = float(samples["rows"].mean()) if measure.steps else 0.0
    lines = [
        ("run", outcome.title),
        ("system", _system(outcome.header)),
        *outcome.extra,
        ("virtual", f"{seconds:.3f} s, {measure.steps} steps ({modes}), {rows:.1f} rows each"),
        ("endings", _endings(measure)),
        ("tokens", f"{prompt} prompt, {cached} of them cached ({_share(cached, prompt)}), {generated} generated"),
        ("ttft", _latency([r.ttft_s for r in records if r.ttft_s is not None])),
        ("itl", _latency(measure.gaps)),
        (
            "goodput",
            f"{good / seconds:.2f} of {len(records) / seconds:.2f} requests/s"
            f" within ttft {outcome.slo.ttft:g} s and itl {outcome.slo.itl:g} s ({_share(good, len(records))})",
        ),
        ("pressure", f"{meters.retractions} retractions, {outcome.evicted_tokens} tokens evicted"),
        ("digest", outcome.digest),
    ]
    return "\n".join(f"{label:<{_LABEL}}{text}" for label, text in lines)


def tables(outcome: Outcome) -> str:
    """Latencies, goodput and hit rate by kind of request."""
    slo = outcome.slo
    records = outcome.measure.records
    groups: list[tuple[str, Callable[[Record], bool]]] = [
        ("all", lambda r: True),
        ("prompt under 64", lambda r: r.input_tokens < 64),
        ("prompt 64 to 255", lambda r: 64 <= r.input_tokens < 256),
        ("prompt 256 to 1023", lambda r: 256 <= r.input_tokens < 1024),
        ("prompt from 1024", lambda r: r.input_tokens >= 1024),
        ("nothing cached", lambda r: r.cached_tokens == 0),
        ("something cached", lambda r: r.cached_tokens > 0),
        ("retracted", lambda r: r.retractions > 0),
        *((state.value, _in_state(state)) for state in RequestState if state.terminal),
    ]
    head = ("requests", "count", "ttft p50", "p90", "p99", "itl p50", "p90", "p99", "goodput", "hit rate")
    rows = [head]
    for name, member in groups:
        members = [r for r in records if member(r)]
        if members:
            rows.append((name, *_row(members, slo)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = []
    for name, *cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *padded]))
    return "\n".join(lines)


def _row(members: list[Record], slo: Slo) -> tuple[str, ...]:
    ttft = percentiles([r.ttft_s for r in members if r.ttft_s is not None])
    itl = percentiles([r.itl_s for r in members if r.itl_s is not None])
    good = sum(r.meets(slo) for r in members)
    prompt, cached = sum(r.input_tokens for r in members), sum(r.cached_tokens for r in members)
    dashes = ["-"] * 3
    return (
        str(len(members)),
        *([f"{v:.4f}" for v in ttft] if ttft else dashes),
        *([f"{v:.4f}" for v in itl] if itl else dashes),
        _share(good, len(members)),
        _share(cached, prompt),
    )


def _in_state(state: RequestState) -> Callable[[Record], bool]:
    return lambda record: record.state is state


def _system(header: Header) -> str:
    limits, cache = header.limits, header.cache
    chunk = "never cut" if limits.chunked_prefill_size is None else f"chunks of {limits.chunked_prefill_size}"
    return (
        f"{limits.policy}{', priority' if limits.priority else ''},"
        f" queue {limits.max_queue_size}, running {limits.max_concurrent_requests}, batch {limits.max_batch_size},"
        f" {limits.max_prefill_tokens} prompt tokens a step, {chunk}, {'mixed' if limits.mixed else 'in turn'},"
        f" {'overlapped' if header.depth > 1 else 'plain'}; KV {cache.capacity} tokens in pages of {cache.page_size},"
        f" {cache.eviction_policy} above {cache.eviction_threshold:g}, retain {cache.retain}"
    )


def _endings(measure: Measure) -> str:
    counts: dict[str, int] = {}
    for record in measure.records:
        name = record.state.value
        if record.state is RequestState.COMPLETED:
            name = f"{name} ({record.reason})"
        counts[name] = counts.get(name, 0) + 1
    refused = sum(measure.refused.values())
    if refused:
        reasons = ", ".join(f"{code} {n}" for code, n in sorted(measure.refused.items()))
        counts[f"refused ({reasons})"] = refused
    return ", ".join(f"{counts[name]} {name}" for name in sorted(counts)) or "none"


def _latency(values: Floats | Iterable[float]) -> str:
    found = percentiles(list(values))
    if found is None:
        return "-"
    return ", ".join(f"p{share} {value:.4f} s" for share, value in zip((50, 90, 99), found, strict=True))


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
