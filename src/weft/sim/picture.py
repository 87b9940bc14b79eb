"""A picture of a run as SVG: the queue, the batch and the KV cache over virtual time. No plotting library, no fonts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

import numpy as np

from weft.sim.measure import Floats

WIDTH = 960
_LEFT, _RIGHT, _TOP = 84, 24, 64
_PANEL, _GAP, _FOOT = 150, 58, 56
_BUCKETS = 400
_FONT = 'font-family="sans-serif"'


@dataclass(frozen=True, slots=True)
class Series:
    """One line or area. `how` joins the values that fall into one pixel: "mean", "max", "last" or "sum"."""

    name: str
    color: str
    values: Floats
    how: str = "mean"


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram. `stacked`: areas on top of each other instead of lines."""

    title: str
    unit: str
    series: tuple[Series, ...]
    stacked: bool = False


def run_panels(samples: dict[str, Floats]) -> list[Panel]:
    """The panels of a run, from `Measure.samples()`."""

    def series(name: str, color: str, field: str, how: str = "mean") -> Series:
        return Series(name, color, samples[field], how)

    return [
        Panel(
            "Waiting (most at a time)",
            "requests",
            (series("queued", "#c44e52", "queued", "max"), series("pending", "#dd8452", "pending", "max")),
        ),
        Panel("Batch (mean)", "rows a step", (series("rows", "#4c72b0", "rows"),)),
        Panel(
            "Tokens computed (mean)",
            "tokens a step",
            (series("prompt", "#8172b3", "prompt_tokens"), series("decode", "#55a868", "decode_tokens")),
            stacked=True,
        ),
        Panel(
            "KV cache",
            "tokens",
            (
                series("active", "#4c72b0", "kv_active", "last"),
                Series("leased", "#8172b3", samples["kv_leased"], "last"),
                Series("cached", "#9fc5e8", samples["kv_cached"] - samples["kv_leased"], "last"),
                series("free", "#e8e8e8", "kv_free", "last"),
            ),
            stacked=True,
        ),
    ]


def draw(title: str, subtitle: str, times_s: Floats, panels: Sequence[Panel]) -> str:
    """The whole picture; `times_s` belongs to the values of every series, ascending."""
    height = _TOP + len(panels) * (_PANEL + _GAP) - _GAP + _FOOT
    end = float(times_s[-1]) if len(times_s) else 1.0
    buckets = _Buckets(times_s, end or 1.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(_LEFT, 26, title, size=16, weight="bold"),
        _text(_LEFT, 44, subtitle, size=11, color="#555555"),
    ]
    for index, panel in enumerate(panels):
        top = _TOP + 14 + index * (_PANEL + _GAP)
        parts += _draw_panel(panel, top, buckets, last=index == len(panels) - 1)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


class _Buckets:
    """Joins values that fall into one stretch of time."""

    def __init__(self, times_s: Floats, end_s: float) -> None:
        self.end_s = end_s
        self.count = min(_BUCKETS, max(1, len(times_s)))
        places = np.minimum((times_s / end_s * self.count).astype(np.int64), self.count - 1)
        self._used, self._starts = np.unique(places, return_index=True)
        self._ends = np.append(self._starts[1:], len(times_s)) - 1
        self.middles_s = (self._used + 0.5) * end_s / self.count

    def join(self, values: Floats, how: str) -> Floats:
        if not len(values):
            return np.zeros(0)
        if how == "last":
            return values[self._ends]
        if how == "max":
            return np.maximum.reduceat(values, self._starts)
        sums = np.add.reduceat(values, self._starts)
        return sums if how == "sum" else sums / (self._ends - self._starts + 1)


def _draw_panel(panel: Panel, top: float, buckets: _Buckets, *, last: bool) -> list[str]:
    curves = [buckets.join(s.values, s.how) for s in panel.series]
    if panel.stacked:
        curves = list(np.cumsum(np.array(curves), axis=0)) if curves else []
    highest = max((float(curve.max()) for curve in curves if len(curve)), default=0.0)
    ticks = _ticks(highest or 1.0)
    scale = _PANEL / ticks[-1]
    width = WIDTH - _LEFT - _RIGHT
    xs = _LEFT + buckets.middles_s / buckets.end_s * width
    parts = [_text(_LEFT, top - 8, panel.title, size=12, weight="bold")]
    parts += _legend(panel, top - 8)
    for tick in ticks:
        y = top + _PANEL - tick * scale
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}" stroke="#dddddd" stroke-width="1"/>')
        parts.append(_text(_LEFT - 6, y + 4, _number(tick), anchor="end"))
    parts.append(_text(18, top + _PANEL / 2, panel.unit, anchor="middle", rotate=True))
    below = np.zeros(len(xs))
    for series, curve in zip(panel.series, curves, strict=True):
        line = _points(xs, top + _PANEL - curve * scale)
        if panel.stacked:
            back = _points(xs[::-1], (top + _PANEL - below * scale)[::-1])
            parts.append(f'<path d="M{line}L{back}Z" fill="{series.color}" stroke="none"/>' if line else "")
            below = curve
        else:
            parts.append(f'<path d="M{line}" fill="none" stroke="{series.color}" stroke-width="1.5"/>' if line else "")
    parts.append(f'<path d="M{_LEFT} {top}V{top + _PANEL}H{WIDTH - _RIGHT}" fill="none" stroke="#333333"/>')
    parts += _time_axis(top + _PANEL, buckets.end_s, named=last)
    return [part for part in parts if part]


def _time_axis(y: float, end_s: float, *, named: bool) -> list[str]:
    width = WIDTH - _LEFT - _RIGHT
    parts = []
    for tick in _ticks(end_s, most=10):
        if tick <= end_s * 1.0001:
            x = _LEFT + tick / end_s * width
            parts.append(f'<path d="M{x:.1f} {y}v4" stroke="#333333"/>')
            parts.append(_text(x, y + 16, _number(tick), anchor="middle"))
    if named:
        parts.append(_text(_LEFT + width / 2, y + 36, "virtual time, seconds", anchor="middle"))
    return parts


def _legend(panel: Panel, y: float) -> list[str]:
    parts, x = [], float(WIDTH - _RIGHT)
    for series in reversed(panel.series):
        x -= 7 * len(series.name) + 6
        parts.append(_text(x, y, series.name, size=11))
        parts.append(f'<rect x="{x - 14:.1f}" y="{y - 9:.1f}" width="10" height="10" fill="{series.color}"/>')
        x -= 24
    return parts


def _ticks(highest: float, most: int = 5) -> list[float]:
    """Round numbers from 0 to at least `highest`."""
    raw = highest / most
    power = 10.0 ** floor(log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999999)
    return [step * i for i in range(ceil(highest / step - 1e-9) + 1)]


def _points(xs: Floats, ys: Floats) -> str:
    return "L".join(f"{x:.1f} {y:.1f}" for x, y in zip(xs.tolist(), ys.tolist(), strict=True))


def _number(value: float) -> str:
    if value >= 10000 and value % 1000 == 0:
        return f"{value / 1000:g}k"
    return f"{value:g}"


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 10,
    anchor: str = "start",
    weight: str = "normal",
    color: str = "#222222",
    rotate: bool = False,
) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if rotate else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" {_FONT} font-size="{size}" font-weight="{weight}" fill="{color}"'
        f' text-anchor="{anchor}"{turn}>{escape(text)}</text>'
    )
