"""How long the KV of a request is held after its client has gone: from the closed connection to free slots.

    python benchmarks/abort_latency.py [--backend torch] [--clients 16] [--rounds 5]

Starts a server of its own with the demo model, lets clients stream, and closes them one after another, half of them
while they decode and half during a long prompt. The numbers are the server's own (`weft_abort_latency_seconds`,
`weft_step_time_seconds`); at the end all KV must be free or cached.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
import time
import urllib.request


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def stream(host: str, port: int, prompt_tokens: int, max_tokens: int, salt: int) -> socket.socket:
    """A request whose answer nobody has read yet."""
    prompt = [10 + (salt * 7919 + k * 31 + k * k) % 1500 for k in range(prompt_tokens)]
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}).encode()
    connection = socket.create_connection((host, port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def histogram(metrics: str, name: str) -> tuple[float, float, list[tuple[float, float]]]:
    """(count, sum, [(upper bound, cumulated count)]) over all labels."""
    buckets: dict[float, float] = {}
    count = total = 0.0
    for line in metrics.splitlines():
        if line.startswith(f"{name}_bucket"):
            found = re.search(r'le="([^"]+)"', line)
            assert found is not None
            bound = float(found.group(1))
            buckets[bound] = buckets.get(bound, 0.0) + float(line.split()[-1])
        elif line.startswith(f"{name}_count"):
            count += float(line.split()[-1])
        elif line.startswith(f"{name}_sum"):
            total += float(line.split()[-1])
    return count, total, sorted(buckets.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    command = [sys.executable, "-m", "weft.cli", "serve", "--port", "0", "--backend", given.backend]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        found = re.search(r"http://([\d.]+):(\d+)", server.stdout.readline())
        assert found is not None, "the server did not start"
        host, port = found.group(1), int(found.group(2))
        url = f"http://{host}:{port}"
        for number in range(given.rounds):
            for prompt_tokens, salt in ((20, 0), (1500, 1000)):
                open_streams = [
                    stream(host, port, prompt_tokens, 400, salt + number * given.clients + k)
                    for k in range(given.clients)
                ]
                while not json.loads(get(f"{url}/stats"))["requests"]["processing"]:
                    pass
                for connection in open_streams:
                    time.sleep(0.02)
                    connection.close()
                while not json.loads(get(f"{url}/stats"))["engine"]["idle"]:
                    pass
        kv = json.loads(get(f"{url}/stats"))["kv"]
        assert kv["active"] == 0 and kv["free"] + kv["cached"] == kv["capacity"], kv
        metrics = get(f"{url}/metrics")
        for name in ("weft_abort_latency_seconds", "weft_step_time_seconds"):
            count, total, buckets = histogram(metrics, name)
            shown = [pair for pair, (_, below) in zip(buckets, [(0.0, 0.0), *buckets], strict=False) if below < count]
            within = ", ".join(f"≤{bound * 1e3:g} ms: {part / count:.0%}" for bound, part in shown if part)
            print(f"{name}: {count:.0f} measured, mean {total / count * 1e3:.2f} ms; {within}")
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
