"""Summary, tables and picture: right, readable by machines, the same for the same run."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from tests.sim.rig import run
from weft.commands.simulate import outcome_of
from weft.core.request import RequestState
from weft.sim.measure import Record
from weft.sim.options import Slo
from weft.sim.picture import Panel, Series, draw, run_panels
from weft.sim.summary import summary, tables


def _lines(text: str) -> dict[str, str]:
    return {line.split()[0]: line.partition(" ")[2].strip() for line in text.splitlines()}


def test_summary_is_stable_and_adds_up() -> None:
    first, again = run(4, 150, "all"), run(4, 150, "all")
    text = summary(outcome_of(first))
    assert text == summary(outcome_of(again))
    lines = _lines(text)
    assert lines["digest"] == first.driver.digest()
    assert lines["run"].startswith("seed 4, 150 requests, faults cancel=0.15,timeout=0.1,")
    counts = [int(part.split()[0]) for part in lines["endings"].split(", ") if part[0].isdigit()]
    assert sum(counts) == 150
    generated = int(lines["tokens"].split(", ")[-1].split()[0])
    assert generated == first.driver.scheduler.meters.generation_tokens


def test_a_run_in_which_nothing_is_served_has_a_summary() -> None:
    refused = run(1, 5, "cancel=1")
    assert _lines(summary(outcome_of(refused)))["run"].startswith("seed 1, 5 requests")
    assert tables(outcome_of(refused)).splitlines()[0].startswith("requests")


def test_tables_group_all_requests() -> None:
    simulation = run(4, 150, "cancel")
    rows = {line[:20].strip(): line[20:].split() for line in tables(outcome_of(simulation)).splitlines()}
    count = {name: int(cells[0]) for name, cells in rows.items() if name != "requests"}
    assert count["all"] == 150 == count["completed"] + count["cancelled"]
    assert count["all"] == count["nothing cached"] + count["something cached"]
    assert count["all"] == sum(n for name, n in count.items() if name.startswith("prompt"))


@pytest.mark.parametrize(
    ("state", "ttft_s", "itl_s", "good"),
    [
        (RequestState.COMPLETED, 1.0, 0.1, True),
        (RequestState.COMPLETED, 0.5, None, True),
        (RequestState.COMPLETED, 1.01, 0.1, False),
        (RequestState.COMPLETED, 0.5, 0.11, False),
        (RequestState.TIMEOUT, 0.5, 0.05, False),
        (RequestState.TIMEOUT, None, None, False),
    ],
)
def test_goodput_counts_good_answers(
    state: RequestState, ttft_s: float | None, itl_s: float | None, good: bool
) -> None:
    record = Record(1, state, None, 10, 0, 5, ttft_s, itl_s, 2.0, 0)
    assert record.meets(Slo(ttft=1.0, itl=0.1)) is good


def _texts(svg: str) -> list[str]:
    return [e.text or "" for e in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_the_picture_is_well_formed_labelled_and_the_same() -> None:
    samples = run(4, 200, "all").measure.samples()
    svg = draw("a <title> & more", "under it", samples["time_s"], run_panels(samples))
    assert svg == draw("a <title> & more", "under it", samples["time_s"], run_panels(samples))
    texts = _texts(svg)
    assert {"a <title> & more", "virtual time, seconds", "requests", "rows a step", "queued", "active"} <= set(texts)
    assert "nan" not in svg


def test_the_picture_of_nothing() -> None:
    empty = np.zeros(0)
    assert "rows" in _texts(draw("t", "s", empty, [Panel("p", "u", (Series("rows", "#000000", empty),))]))


def test_a_curve_is_where_its_values_are() -> None:
    """Two values at the ends of the time: the axis reaches from 0 to a round number above the highest."""
    times, values = np.array([0.0, 10.0]), np.array([0.0, 4.0])
    svg = draw("t", "s", times, [Panel("p", "u", (Series("rows", "#123456", values),))])
    root = ElementTree.fromstring(svg)
    (curve,) = [e for e in root.iter("{http://www.w3.org/2000/svg}path") if e.get("stroke") == "#123456"]
    (x0, y0), (x1, y1) = [tuple(map(float, p.split())) for p in curve.get("d", "")[1:].split("L")]
    assert x0 < x1 and y0 - y1 == 150.0  # all of the panel's height: 4 is a round number
    assert "4" in _texts(svg) and "10" in _texts(svg)
