"""Sessions: the headers that open or renew one, and the endpoints that show and end them.

A session is one conversation. Between its turns a lease keeps its KV from eviction; the engine owns the leases.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlette.datastructures import Headers

from weft.config.settings import KvCacheSettings
from weft.core.errors import InvalidRequestError
from weft.web.frames import SESSION_ID

ID_HEADER, TTL_HEADER = "X-Session-ID", "X-Session-TTL"
MAX_TTL_S = 86400.0

_TTL = re.compile(r"[0-9]{1,5}(\.[0-9]{1,6})?")


@dataclass(frozen=True, slots=True)
class Session:
    """What a request says about its session; without `ttl_s` the setting kv_cache.session_ttl_s holds."""

    id: str
    ttl_s: float | None


def session_of(headers: Headers, kv_cache: KvCacheSettings, *, answers: int) -> Session | None:
    """The session of a request for so many answers, if it has one. Raises InvalidRequestError naming the header."""
    ttl_s = _ttl(_single(headers, TTL_HEADER))
    session_id = _single(headers, ID_HEADER)
    if session_id is None:
        if ttl_s is not None:
            raise _refusal(TTL_HEADER, f"only allowed with {ID_HEADER}")
        return None
    if not SESSION_ID.fullmatch(session_id):
        raise _refusal(ID_HEADER, "1 to 256 visible ASCII characters are needed")
    if kv_cache.retain == "none":
        raise _refusal(ID_HEADER, "no KV outlives its request here: the setting kv_cache.retain is none")
    if answers > 1:
        raise _refusal(ID_HEADER, f"a session is one conversation, so it takes one answer at a time, not {answers}")
    return Session(session_id, ttl_s)


def _single(headers: Headers, name: str) -> str | None:
    values = headers.getlist(name)
    if len(values) > 1:
        raise _refusal(name, "given more than once")
    return values[0] if values else None


def _ttl(text: str | None) -> float | None:
    if text is None:
        return None
    ttl_s = float(text) if _TTL.fullmatch(text) else 0.0
    if not 0 < ttl_s <= MAX_TTL_S:
        raise _refusal(TTL_HEADER, f"{text[:20]!r} is not allowed (allowed: seconds, above 0 and up to {MAX_TTL_S:g})")
    return ttl_s


def _refusal(header: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{header}: {why}", param=header)
