"""The scheduler's limits, all resolved: no `auto` left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Policy = Literal["fcfs", "lpm", "dfs-weight", "lof", "random"]


@dataclass(frozen=True, slots=True)
class Limits:
    """How much at once, how long, and in which order.

    Attributes:
        max_queue_size: QUEUED requests; one more is refused with 429.
        max_concurrent_requests: the running set, PENDING and PROCESSING.
        max_batch_size: PROCESSING requests, at most the running set.
        max_prefill_tokens: prompt tokens in one step.
        chunked_prefill_size: prompt tokens of one request in one step, and of all requests in a step in which others
            decode; None: prompts are never cut.
        mixed: decode rows ride along with prompt tokens; otherwise a step is either, in turn while both wait.
        policy: order of the waiting, see `waiting.py`.
        priority: requests' own priority comes before the policy; lower first.
        request_timeout_s: from entering the running set; None: no limit.
        queue_timeout_s: from arrival to entering the running set.
        max_input_tokens, max_output_tokens: limits of one request, on top of context and cache.
        cleanup_interval_s: how often `expire` looks whether the cache is above its threshold.
        session_ttl_s: how long a session keeps its KV when its request does not say.
        max_decode_stall_s: a step in which others decode takes no more prompt tokens than it can compute in this time,
            as far as the speed is known; None: only chunks bound it.
    """

    max_queue_size: int = 256
    max_concurrent_requests: int = 64
    max_batch_size: int = 64
    max_prefill_tokens: int = 1024
    chunked_prefill_size: int | None = 512
    mixed: bool = True
    policy: Policy = "lpm"
    priority: bool = False
    request_timeout_s: float | None = 60.0
    queue_timeout_s: float | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    cleanup_interval_s: float = 1.0
    session_ttl_s: float = 600.0
    max_decode_stall_s: float | None = None
