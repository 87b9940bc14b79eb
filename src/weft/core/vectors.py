"""Vectors of texts: length 1, and cut to fewer dimensions."""

from __future__ import annotations

import numpy as np

from weft.core.errors import EngineError, InvalidRequestError
from weft.core.plan import Float32s


def normalised(vector: Float32s) -> Float32s | EngineError:
    """The vector at length 1, computed in float64, where no square overflows; an error where it has no direction."""
    wide = vector.astype(np.float64)
    length = float(np.sqrt(wide @ wide))
    if not np.isfinite(length):
        return EngineError("the model's embedding of this input has values that are not finite numbers")
    if not length:
        return EngineError("the model's embedding of this input is zero")
    return (wide / length).astype(np.float32)


def truncated(vector: Float32s, dimensions: int) -> Float32s:
    """The first `dimensions` values of a vector float32 [d], brought to length 1 again (Matryoshka embeddings).

    Errors: `InvalidRequestError` if `dimensions` is not 1 to d; `EngineError` if these values are all zero.
    """
    check_dimensions(dimensions, len(vector))
    result = normalised(vector[:dimensions])
    if isinstance(result, EngineError):
        raise result
    return result


def check_dimensions(wanted: int, most: int) -> None:
    """Raises InvalidRequestError unless `wanted` is 1 to `most`."""
    if not 1 <= wanted <= most:
        message = f"dimensions: {wanted} is not allowed (this model's embeddings have 1 to {most})"
        raise InvalidRequestError(message, param="dimensions")
