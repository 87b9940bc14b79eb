"""Deltas on their way to a client: those that wait together are joined, and those with too much in them are cut.

Invariant: joined or cut, the deltas of an id say the same in the same order; exactly the last has the `end`.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.ipc.messages import TextDelta, TextLogprob

ENTRIES_AT_ONCE = 2048
"""So many log probabilities share a delta: packing and unpacking more in one go would hold up other streams."""


def num_entries(delta: TextDelta) -> int:
    """Log probabilities in it, those of the likeliest tokens counted; about, because all tokens have as many."""
    total = 0
    for entries in (delta.logprobs, delta.prompt_logprobs):
        if entries:
            last = entries[-1]
            total += len(entries) * (1 if last is None else 1 + len(last.top))
    return total


def merge(deltas: Sequence[TextDelta]) -> list[TextDelta]:
    """The deltas of each id joined to one, in the order of their first ones.

    What belongs to the prompt stays apart, before the rest of its id; an error, behind it.
    """
    if len(deltas) == 1:
        return list(deltas)
    groups: dict[tuple[int, int], list[TextDelta]] = {}
    for i, delta in enumerate(deltas):
        kind = -1  # what can be joined
        if delta.prompt_text is not None or (delta.end is not None and delta.end.state != "completed"):
            kind = i
        groups.setdefault((delta.request_id, kind), []).append(delta)
    return [group[0] if len(group) == 1 else _joined(group) for group in groups.values()]


def _joined(group: list[TextDelta]) -> TextDelta:
    logprobs = [entry for delta in group for entry in delta.logprobs or ()]
    return TextDelta(
        group[0].request_id,
        "".join([delta.text for delta in group]),
        token_ids=[token for delta in group for token in delta.token_ids],
        logprobs=logprobs if any(delta.logprobs is not None for delta in group) else None,
        embedding=group[-1].embedding,
        resumed_bytes=group[0].resumed_bytes,
        end=group[-1].end,
    )


def first_part(deltas: list[TextDelta]) -> tuple[list[TextDelta], list[TextDelta]]:
    """As many of the deltas as may be handled in one go, and the rest."""
    entries = 0
    for i, delta in enumerate(deltas):
        if delta.logprobs is None and delta.prompt_logprobs is None:
            continue
        entries += num_entries(delta)
        if entries >= ENTRIES_AT_ONCE:
            return deltas[: i + 1], deltas[i + 1 :]
    return deltas, []


def split(delta: TextDelta) -> list[TextDelta]:
    """The same in several deltas, where it holds many log probabilities. An echoed prompt's text comes in parts.

    The first of them goes with the entry of the first token, which has no log probability.
    """
    if num_entries(delta) <= ENTRIES_AT_ONCE:
        return [delta]
    parts: list[TextDelta] = []
    if delta.prompt_logprobs is not None:
        parts += _prompt_parts(delta.request_id, delta.prompt_text or "", delta.prompt_logprobs)
    text, token_ids, resumed = (
        delta.text,
        delta.token_ids,
        delta.resumed_bytes,
    )  # go first, what is told of tokens after
    *slices, last = _slices(delta.logprobs) if delta.logprobs else [None]
    for entries in slices:
        part = TextDelta(delta.request_id, text, token_ids=token_ids, logprobs=entries, resumed_bytes=resumed)
        parts.append(part)
        text, token_ids, resumed = "", [], b""
    end = TextDelta(delta.request_id, text, token_ids=token_ids, logprobs=last, end=delta.end, resumed_bytes=resumed)
    return [*parts, end]


def _prompt_parts(request_id: int, text: str, entries: list[TextLogprob | None]) -> list[TextDelta]:
    known = [entry for entry in entries if entry is not None]
    rest = b"".join(entry.token_bytes for entry in known).decode("utf-8", "replace")
    first = text.removesuffix(rest) if text.endswith(rest) else ""
    parts = [TextDelta(request_id, prompt_text=first, prompt_logprobs=[None])]
    for i, part in enumerate(_slices(known)):
        parts.append(TextDelta(request_id, prompt_text="" if i else text[len(first) :], prompt_logprobs=[*part]))
    return parts


def _slices(entries: list[TextLogprob]) -> list[list[TextLogprob]]:
    if not entries:
        return []
    size = max(1, ENTRIES_AT_ONCE // (1 + len(entries[-1].top)))
    return [entries[i : i + size] for i in range(0, len(entries), size)]
