"""How long one short text waits during a request of 128 long ones, of two versions in turns.

    python benchmarks/serve_fairness.py models/minilm texts.txt --before ../an_earlier_checkout

One client sends requests of many long texts without a pause, another a short text every now and
then. Reported are the 50th and 99th percentile of the time to the answer of a short text, alone and
during the long ones, and the long texts a second. Without `--before` there is one version.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from pathlib import Path

import httpx
import numpy as np
from serve import started

SHORT = "a fine film"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path, help="words for the long texts")
    parser.add_argument("--before", type=Path, help="the checkout of another version")
    parser.add_argument("--long", type=int, default=128, help="long texts of a request")
    parser.add_argument("--words", type=int, default=150, help="words of a long text")
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--port", type=int, default=18300)
    args = parser.parse_args()
    words = args.texts.read_text("utf-8").split()
    starts = range(0, args.long * args.words, args.words)
    texts = [" ".join(words[at % len(words) :][: args.words]) for at in starts]
    versions = {"before": args.before, "after": Path(__file__).resolve().parent.parent}
    for _ in range(args.rounds):
        for name, folder in versions.items():
            if folder:
                command = [sys.executable, "-m", "palm_ds.cli.serve", str(args.model.resolve())]
                command += ["--threads", str(args.threads), "--port", str(args.port), "--quiet"]
                with started(command, args.port, folder) as url:
                    measure(name, url, texts, args.seconds)


def measure(name: str, url: str, texts: list[str], seconds: float) -> None:
    """Print a line for one server."""
    with httpx.Client(base_url=url, timeout=120) as client:
        client.post("/embed", json={"texts": texts}).raise_for_status()  # what adapts has adapted
        alone = waits(client, seconds / 4)
        stopped, done = threading.Event(), [0]
        sending = threading.Thread(target=send_long, args=(url, texts, stopped, done))
        sending.start()
        time.sleep(0.5)
        began = time.monotonic()
        beside = waits(client, seconds)
        stopped.set()
        sending.join()
    rate = done[0] / (time.monotonic() - began)
    print(
        f"{name:7} short text: alone {alone}, during long ones {beside}; {rate:6.1f} long texts/s",
        flush=True,
    )


def waits(client: httpx.Client, seconds: float) -> str:
    """The times to an answer of a short text, as text."""
    times: list[float] = []
    until = time.monotonic() + seconds
    while (began := time.monotonic()) < until:
        client.post("/embed", json={"texts": [SHORT]}).raise_for_status()
        times.append(1000 * (time.monotonic() - began))
        time.sleep(0.05)
    return f"p50 {np.percentile(times, 50):.0f}, p99 {np.percentile(times, 99):.0f} ms"


def send_long(url: str, texts: list[str], stopped: threading.Event, done: list[int]) -> None:
    """Requests of long texts, one after the other."""
    body = json.dumps({"texts": texts})
    with httpx.Client(base_url=url, timeout=120) as client:
        while not stopped.is_set():
            headers = {"Content-Type": "application/json"}
            client.post("/embed", content=body, headers=headers).raise_for_status()
            done[0] += len(texts)


if __name__ == "__main__":
    main()
