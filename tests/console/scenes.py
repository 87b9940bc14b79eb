"""What a busy server tells the live view: plausible, fixed numbers, all from a seed."""

from __future__ import annotations

import math
import random
from typing import Any

CAPACITY = 16_384
MODEL = {"object": "list", "data": [{"id": "weft-demo", "object": "model"}]}
SYSTEM_PROMPTS = (420, 310, 180)
NAMES = ("maria", "tomas", "li-wei", "amara", "jonas", "yuki", "priya", "oskar")


class Scene:
    """Answers the live view's questions. `moment` counts the answers of /stats: load rises and falls with it.

    `missing`: paths that answer 503.
    """

    def __init__(self) -> None:
        self.moment = 0
        self.missing: set[str] = set()
        self.cache = tree(random.Random(7))
        self.workers = [
            _worker("loom-1", 8001, 6, 31, 2, 214, 0),
            _worker("loom-2", 8002, 8, 27, 4, 187, 1),
            _worker("loom-3", 8003, 0, 0, 0, 96, 3, state="draining"),
        ]
        self.routes = routes(random.Random(3))
        self.tickets = [
            {"ticket_id": f"t-{40 + i}", "position": i, "waited_s": 5.5 - 1.4 * i, "estimated_wait_s": 2.0 * i}
            for i in (1, 2, 3)
        ]

    def answer(self, path: str) -> dict[str, Any]:
        """The JSON of this path, whichever worker is asked."""
        if path == "/workers":
            return {"workers": self.workers}
        if path == "/api/queue":
            return {"queue_length": len(self.tickets), "tickets": self.tickets}
        if path == "/api/routes":
            return {"routes": self.routes}
        if path.endswith("/v1/models"):
            return MODEL
        if path.endswith("/stats"):
            self.moment += 1
            return self._stats()
        if path.endswith("/v1/requests"):
            return {"requests": requests(random.Random(5))}
        if path.endswith("/v1/sessions"):
            return {"sessions": sessions(random.Random(2))}
        assert path.endswith("/v1/cache"), path
        return self.cache

    def _stats(self) -> dict[str, Any]:
        wave = math.sin(self.moment / 9) + 0.5 * math.sin(self.moment / 3.7)
        rows = max(1, round(5 + 2 * wave))
        waiting = max(0, round(3 * wave - 0.6))
        finished = {"completed": 1204 + self.moment, "timeout": 3, "failed": 0, "cancelled": 41, "rejected": 7}
        kv = {name: self.cache[name] for name in ("capacity", "free", "cached", "active")}
        return {
            "requests": {"queued": waiting, "pending": min(2, waiting), "processing": rows, "finished": finished},
            "kv": kv | {"host": 0, "evicted_total": 58_240, "bytes": 41_000_000},
            "sequence_ids": {"total": 8, "used": rows},
            "batch": {"rows": rows, "tokens": rows + (self.moment * 37 % 97 if self.moment % 5 < 2 else 0)},
            "engine": {
                "backend": "torch",
                "steps": 80_000 + 41 * self.moment,
                "last_step_s": 0.0061 + 0.0006 * rows,
                "idle": False,
            },
        }


def tree(rng: random.Random) -> dict[str, Any]:
    """A few system prompts, and below each the conversations that share it."""
    nodes: list[dict[str, Any]] = []

    def add(parent: int | None, tokens: int, held: str | None) -> int:
        depth = 1 if parent is None else nodes[parent]["depth"] + 1
        used = 0.2 if held == "request" else round(rng.uniform(2, 300), 1)
        node = {"id": len(nodes), "parent": parent, "tokens": tokens, "held": held, "depth": depth}
        nodes.append(node | {"last_used_s_ago": used})
        return len(nodes) - 1

    for prompt, share in zip(SYSTEM_PROMPTS, (14, 8, 5), strict=True):
        root = add(None, prompt, "request")
        for i in range(share):
            held = "request" if i < 2 else rng.choice(["session", "session", None])
            end = add(root, rng.randint(30, 160), held)
            for _ in range(rng.randint(0, 3)):
                end = add(end, rng.randint(20, 180), held)
                if rng.random() < 0.35:
                    add(nodes[end]["parent"], rng.randint(15, 90), None)
    total = sum(node["tokens"] for node in nodes)
    active = sum(node["tokens"] for node in nodes if node["held"] == "request") + 240
    cached = total - active + 240
    return {
        "capacity": CAPACITY,
        "free": CAPACITY - cached - active,
        "cached": cached,
        "active": active,
        "nodes": nodes,
        "truncated": 0,
    }


def requests(rng: random.Random) -> list[dict[str, Any]]:
    """Oldest first: some that have ended, some under way, some waiting."""
    told = []
    for number in range(26):
        age = 26.5 - number + rng.uniform(-0.3, 0.3)
        queued = round(rng.choice([0.01, 0.02, 0.4, 1.2]) * rng.random() * 2, 3)
        pending = round(rng.choice([0.01, 0.3]) * rng.random(), 3)
        processing = round(rng.uniform(0.8, 6.0), 3)
        record = {
            "id": 1211 + number,
            "priority": 0,
            "session_id": rng.choice([None, *(f"chat-{name}" for name in NAMES)]),
            "adapter": None,
            "prompt_tokens": rng.randint(440, 980),
            "output_tokens": round(processing * 38),
            "chunks": 1,
            "retractions": 0,
            "finish_reason": None,
            "error": None,
            "kv": {"tokens": 300, "bytes": 90_000},
        }
        cached = rng.choice([0, *SYSTEM_PROMPTS])
        reason = rng.choice(["diverged", "evicted"]) if cached else "never_seen"
        record |= {"cached_tokens": cached, "miss": {"reason": reason, "at_token": cached}}
        life = queued + pending + processing
        times = {"queued_s": queued, "pending_s": pending, "processing_s": processing}
        if life < age:
            state = rng.choice(["completed"] * 14 + ["cancelled", "timeout"])
            record |= {"state": state, "ended_s_ago": age - life, "age_s": life}
            record["finish_reason"] = "stop" if state == "completed" else None
        elif number < 24:
            times["processing_s"] = max(0.0, age - queued - pending)
            record |= {"state": "processing", "age_s": age, "output_tokens": round(times["processing_s"] * 38)}
        else:
            times = {"queued_s": age, "pending_s": 0.0, "processing_s": 0.0}
            record |= {"state": "queued", "age_s": age, "output_tokens": 0, "cached_tokens": 0, "miss": None}
        told.append(record | {"times": times})
    return told


def sessions(rng: random.Random) -> list[dict[str, Any]]:
    ages = sorted((round(rng.uniform(1, 280), 1) for _ in NAMES), reverse=True)
    return [
        {
            "id": f"chat-{name}",
            "tokens": rng.randint(300, 1400),
            "bytes": 100_000,
            "turns": rng.randint(1, 9),
            "expires_in_s": 600 - age,
            "last_used_s_ago": age,
        }
        for name, age in zip(NAMES, ages, strict=True)
    ]


def routes(rng: random.Random) -> list[dict[str, Any]]:
    """The newest first."""
    reasons = ("longest cached history", "longest cached history", "least loaded", "no cached history")
    return [
        {
            "time": 1_790_000_000 - 2.7 * i,
            "kind": rng.choice(["session", "chat"]),
            "worker": rng.choice(["loom-1", "loom-2"]),
            "reason": rng.choice(reasons),
            "cached_tokens": rng.choice([0, 420, 731, 1204]),
            "cost": round(rng.uniform(0.02, 0.6), 3),
        }
        for i in range(12)
    ]


def _worker(
    name: str, port: int, used: int, sessions: int, queued: int, hits: int, failures: int, state: str = "ready"
) -> dict[str, Any]:
    return {
        "name": name,
        "url": f"http://10.0.0.{port - 7990}:{port}",
        "state": state,
        "slots": {"used": used, "total": 8},
        "sessions": {"used": sessions, "total": 256},
        "queued": queued,
        "hits": hits,
        "failures": failures,
    }
