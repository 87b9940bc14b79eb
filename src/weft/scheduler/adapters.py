"""`AdapterTurns`: which LoRA adapter the next step belongs to.

An engine applies an adapter to a whole step, so a step has rows of one adapter only, and adapters take turns: the one
whose last step is longest ago goes first. So nobody waits for more steps than there are adapters with work, however
many requests another adapter has. Places in the batch go with the turns; who of an adapter's requests gets one is for
the waiting line to say, and room in the KV cache is given in the order of the whole line (`Scheduler._add_from`), so
that many small requests of one adapter cannot take it from a large one of another for ever.

The model without an adapter is adapter 0, one among the others. With no adapters there is nothing to decide.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from weft.core.plan import StepMode
from weft.core.request import Request

_NEVER: tuple[int, StepMode] = (-1, "decode")


class AdapterTurns:
    """See the module's docstring.

    Args:
        adapters: how many there are besides the model itself.
    """

    def __init__(self, adapters: int = 0) -> None:
        self._adapters = adapters
        self._last: dict[int, tuple[int, StepMode]] = {}  # of each adapter's last step: its number and mode

    def order(self, *having_work: Iterable[Request]) -> Iterable[int]:
        """Every adapter that one of these requests has, the one that has waited longest for a step first."""
        if not self._adapters:
            return (0,)
        adapters = dict.fromkeys(request.adapter for request in chain(*having_work))
        return sorted(adapters, key=lambda adapter: (self._last.get(adapter, _NEVER)[0], adapter))

    def of(self, requests: list[Request], adapter: int) -> list[Request]:
        """Those of these requests that an adapter's step can have."""
        return [request for request in requests if request.adapter == adapter] if self._adapters else requests

    def last_mode(self, adapter: int) -> StepMode:
        """Mode of an adapter's last step."""
        return self._last.get(adapter, _NEVER)[1]

    def note(self, adapter: int, step: int, mode: StepMode) -> None:
        """A step has been planned."""
        self._last[adapter] = (step, mode)
