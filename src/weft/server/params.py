"""From the parameters of a body to `SamplingParams`, with errors in the words of the body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.core.errors import InvalidRequestError
from weft.core.sampling import SamplingParams
from weft.server.schemas import OpenAIRequest, Sampling

_SAME_NAMES = tuple(Sampling.model_fields)


def sampling_params(body: Sampling, *, names: Mapping[str, str], **others: Any) -> SamplingParams:
    """The body's sampling parameters and `others`; None anywhere means the default of `SamplingParams`.

    `names` maps a name in an error to what the body calls it. Raises InvalidRequestError.
    """
    given = {name: getattr(body, name) for name in _SAME_NAMES} | others
    try:
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})
    except InvalidRequestError as error:
        own = error.param or ""
        name = names.get(own, own)
        raise InvalidRequestError(name + error.message.removeprefix(own), param=name, code=error.code) from None


def check_stream_options(body: OpenAIRequest) -> bool:
    """Whether a stream ends with a chunk for `usage`. Raises InvalidRequestError."""
    if body.stream_options is None:
        return False
    if not body.stream:
        raise InvalidRequestError("stream_options: only allowed when stream is true", param="stream_options")
    return bool(body.stream_options.include_usage)
