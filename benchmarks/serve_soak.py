"""Mixed load on a running server for a long time: is anything lost, does memory grow?

    palm-ds serve runs/joint --port 8080 --quiet &
    python benchmarks/serve_soak.py http://127.0.0.1:8080 --pid $! --minutes 30

Good clients send predictions of every task, embeddings and masked words, and check each answer
against the first for the same text. Next to them: requests that are wrong, clients that send a byte
at a time, and connections cut in the middle of a request or before its answer. A line every minute;
at the end the counts and the slope of the memory. Exit code 1 if a good request was lost.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import sys
import threading
import time
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import psutil

TEXT = "the tower is 330 metres tall and is in a city of light by an old river"
BAD: tuple[tuple[str, Any], ...] = (
    ("/predict/nothing", {"inputs": ["x"]}),
    ("/embed", {"texts": []}),
    ("/embed", {"texts": [""]}),
    ("/embed", {"texts": ["x" * 1_000_000]}),
    ("/embed", {"text": ["x"]}),
    ("/nowhere", {}),
    ("/v1/embeddings", {"input": [[10**9]]}),
    ("/fill-mask", {"texts": ["no mask here"]}),
)


class Load:
    """The threads of the load and what they count."""

    def __init__(self, url: str, until: float) -> None:
        self.url, self.until = url, until
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.seconds: list[float] = []
        self.lock = threading.Lock()
        self.first: dict[str, Any] = {}
        self.requests = self.good_requests()

    def note(self, what: str) -> None:
        with self.lock:
            self.counts[what] += 1

    def good_requests(self) -> list[tuple[str, dict[str, Any]]]:
        """Good requests to choose from, fixed, so that answers can be compared."""
        rng, words = random.Random(1), TEXT.split()
        info = httpx.get(self.url + "/info", timeout=60).json()
        found: list[tuple[str, dict[str, Any]]] = []
        for number in range(40):
            texts = [" ".join(rng.choices(words, k=rng.randint(2, 60))) for _ in range(3)]
            found.append(("/embed", {"texts": texts[: 1 + number % 3]}))
            for model in info["models"]:
                for task in model["tasks"]:
                    row: Any = {
                        "reading": {"question": texts[0][:40], "context": texts[1]},
                        "matching": texts[:2],
                        "ranking": texts[:2],
                        "tagging": texts[0].split(),
                    }.get(task["kind"], texts[0])
                    path = f"/predict/{task['name']}"
                    found.append((path, {"inputs": [row], "model": model["name"]}))
                if model["fill_mask"]:
                    found.append(("/fill-mask", {"texts": [texts[0][:60] + " [MASK]"]}))
        return found

    def good(self, seed: int) -> None:
        rng = random.Random(seed)
        with httpx.Client(base_url=self.url, timeout=60) as client:
            while time.monotonic() < self.until:
                path, body = rng.choice(self.requests)
                started = time.monotonic()
                try:
                    answer = client.post(path, json=body)
                except httpx.TransportError as error:
                    self.note("lost")
                    self.wrong.append(repr(error))
                    continue
                if answer.status_code == 429:
                    self.note("429")
                    time.sleep(float(answer.headers["retry-after"]))
                    continue
                self._check(path, body, answer)
                with self.lock:
                    self.seconds.append(time.monotonic() - started)
                time.sleep(rng.random() * 0.05)

    def _check(self, path: str, body: dict[str, Any], answer: httpx.Response) -> None:
        if answer.status_code != 200:
            self.note("lost")
            self.wrong.append(f"{path}: {answer.status_code} {answer.text[:200]}")
            return
        self.note("answered")
        key = path + json.dumps(body)
        with self.lock:
            wanted = self.first.setdefault(key, answer.json())
        if not same(answer.json(), wanted):
            self.note("different")

    def bad(self, seed: int) -> None:
        rng = random.Random(seed)
        with httpx.Client(base_url=self.url, timeout=60) as client:
            while time.monotonic() < self.until:
                path, body = rng.choice(BAD)
                answer = client.post(path, json=body)
                good = 400 <= answer.status_code < 500 and "error" in answer.json()
                self.note("refused" if good else "refused badly")
                time.sleep(rng.random() * 0.1)

    def rude(self, seed: int) -> None:
        """Slow senders and cut connections."""
        rng = random.Random(seed)
        host, port = urlsplit(self.url).hostname, urlsplit(self.url).port
        body = json.dumps({"texts": [TEXT]}).encode()
        head = f"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        whole = head.encode() + b"Content-Type: application/json\r\n\r\n" + body
        while time.monotonic() < self.until:
            with socket.create_connection((host, port or 80)) as connection:
                kind = rng.choice(("slow", "cut", "unheard"))
                if kind == "cut":
                    connection.sendall(whole[: rng.randint(1, len(whole) - 1)])
                elif kind == "unheard":
                    connection.sendall(whole)
                else:
                    for at in range(0, rng.randint(1, len(whole)), 8):
                        connection.sendall(whole[at : at + 8])
                        time.sleep(0.02)
            self.note(kind)
            time.sleep(rng.random() * 0.1)


def same(found: Any, wanted: Any) -> bool:
    """Equal, numbers to rounding."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[k], wanted[k]) for k in wanted)
    if isinstance(wanted, list):
        if len(found) != len(wanted):
            return False
        return all(same(a, b) for a, b in zip(found, wanted, strict=True))
    if isinstance(wanted, float):
        return abs(found - wanted) < 1e-4
    return found == wanted


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("--pid", type=int, required=True, help="of the server, for its memory")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=12)
    args = parser.parse_args()
    load = Load(args.url, time.monotonic() + 60 * args.minutes)
    kinds = [load.good] * args.clients + [load.bad] * 2 + [load.rude] * 3
    threads = [
        threading.Thread(target=run, args=(seed,), daemon=True) for seed, run in enumerate(kinds)
    ]
    for thread in threads:
        thread.start()
    memory = watch(load, psutil.Process(args.pid))
    for thread in threads:
        thread.join(90)
    times = np.array(load.seconds) * 1000
    print(dict(load.counts))
    print(f"p50 {np.percentile(times, 50):.0f} ms, p99 {np.percentile(times, 99):.0f} ms")
    later = memory[len(memory) // 3 :]
    slope = np.polyfit(np.arange(len(later)) / 60, np.array(later), 1)[0] if len(later) > 2 else 0.0
    print(
        f"memory {memory[0]:.0f} MB at first, {memory[-1]:.0f} MB at last; {slope:+.2f} MB a minute"
    )
    for line in load.wrong[:5]:
        print(line)
    lost = load.counts["lost"] + load.counts["different"] + load.counts["refused badly"]
    return int(lost > 0 or any(thread.is_alive() for thread in threads))


def watch(load: Load, server: psutil.Process) -> list[float]:
    """Megabytes of the server, each second; a line every minute."""
    memory: list[float] = []
    while time.monotonic() < load.until:
        memory.append(server.memory_info().rss / 2**20)
        if len(memory) % 60 == 1:
            files = server.num_fds()
            print(f"{memory[-1]:.0f} MB, {files} files, {dict(load.counts)}", flush=True)
        time.sleep(1)
    return memory


if __name__ == "__main__":
    sys.exit(main())
