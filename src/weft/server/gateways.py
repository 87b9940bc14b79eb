"""What a gateway in front of this worker adds to a request: its own id for it, a seed, and an answer that has begun.

A gateway can take a stream to another worker when this one dies. For that it is told the token ids of every event, in a
comment line before its data, and later gives them back as `weft_resume`. An event and its ids arrive together or not at
all, so that ids and text agree wherever the stream was cut.
"""

from __future__ import annotations

import re

from fastapi import Request

from weft.core.errors import InvalidRequestError
from weft.core.sampling import SamplingParams
from weft.server.schemas import Resume
from weft.web.edge import SHOWN_ID

HEADER = "X-Weft-Gateway"

_FORM = re.compile(r"id=([0-9]{1,18})(?:, ?seed=([0-9]{1,20}))?(?:, ?route=([!-+\--~]{1,100}))?")
_SEED, _ROUTE = "weft.gateway_seed", "weft.gateway_route"
"""Keys of the gateway's seed, and of why it chose this worker, in the ASGI scope."""


def note_gateway(request: Request) -> None:
    """Takes the header, if there is one, into the request's scope. Raises InvalidRequestError where it is malformed."""
    given = request.headers.getlist(HEADER)
    if not given:
        return
    match = _FORM.fullmatch(given[0]) if len(given) == 1 else None
    if match is None or int(match[2] or 0) >= 2**64:
        allowed = "'id=17', 'id=17, seed=123' or 'id=17, seed=123, route=w1:prefix', once"
        raise InvalidRequestError(f"{HEADER}: {', '.join(given)!r} is not allowed (allowed: {allowed})", param=HEADER)
    request.scope[SHOWN_ID] = int(match[1])
    if match[2] is not None:
        request.scope[_SEED] = int(match[2])
    request.scope[_ROUTE] = match[3]


def shown_id(request: Request) -> int | None:
    """The id that a gateway has given the request; None: it comes from none."""
    number: int | None = request.scope.get(SHOWN_ID)
    return number


def route_of(request: Request) -> str | None:
    """Which worker a gateway has chosen, and why, in its words; None: it comes from none."""
    route: str | None = request.scope.get(_ROUTE)
    return route


def with_gateways_seed(request: Request, params: SamplingParams) -> SamplingParams:
    """The parameters, with the gateway's seed where the body has none."""
    seed = request.scope.get(_SEED)
    return params if seed is None or params.seed is not None else params.with_seed(seed)


def check_resume(resume: Resume, params: SamplingParams, *, stream: bool, answers: int, echo: bool) -> None:
    """Raises InvalidRequestError where an answer cannot go on. What depends on its text or the context comes later."""
    allowed = {"with stream": stream, "for one prompt and n 1": answers == 1, "without echo": not echo}
    for when, holds in allowed.items():
        if not holds:
            raise InvalidRequestError(f"weft_resume: only allowed {when}", param="weft_resume")
    count, most = len(resume.token_ids), params.max_new_tokens
    if most is not None and count > most:
        raise InvalidRequestError(
            f"weft_resume: it has {count} tokens, but only {most} may be generated", param="weft_resume"
        )


def tokens_line(ids: list[int]) -> bytes:
    """The comment that tells token ids, to stand before an event's data; written for every token, so it is cheap."""
    if len(ids) == 1:
        return b": tokens %d\n" % ids[0]
    return b": tokens %b\n" % ",".join(map(str, ids)).encode()
