"""Requests a second of `palm-ds serve` and of transformers' pipeline behind FastAPI, in turns.

    python benchmarks/serve.py models/minilm texts.txt --clients 1 16 128 --seconds 8

Both are servers of the same FastAPI and uvicorn, one process each, with the same threads and the
same model, and answer the same requests: one text, its mean vector (as JSON). The other server is
what the pages of FastAPI and transformers lead to: a function without `async` (which FastAPI runs
in its threads) that calls `pipeline("feature-extraction")`. A client sends its next request when
the last one was answered. Reported are requests a second, the 50th and 99th percentile of the time
to an answer, and the ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np

OTHER = """
import sys, torch, uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from transformers import pipeline

torch.set_num_threads(int(sys.argv[3]))
pipe = pipeline("feature-extraction", model=sys.argv[1], device="cpu")
app = FastAPI()


class Body(BaseModel):
    texts: list[str]


@app.get("/health")
def health():
    return {}


@app.post("/embed")
def embed(body: Body):
    with torch.inference_mode():
        found = pipe(body.texts, return_tensors=True, truncation=True)
    return {"embeddings": [each[0].mean(0).tolist() for each in found]}


uvicorn.run(app, port=int(sys.argv[2]), log_level="error")
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path, help="a text on each line")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--port", type=int, default=18200)
    args = parser.parse_args()
    texts = [line for line in args.texts.read_text("utf-8").splitlines() if line.strip()]
    model, threads = str(args.model), str(args.threads)
    own = [sys.executable, "-m", "palm_ds.cli.serve", model, "--port", str(args.port), "--quiet"]
    other = [sys.executable, "-c", OTHER, model, str(args.port + 1), threads]
    with (
        started([*own, "--threads", threads, "--no-normalize"], args.port) as first,
        started(other, args.port + 1) as second,
    ):
        check_same(first, second, texts)
        for clients, _ in itertools.product(args.clients, range(args.rounds)):
            rates = [
                show(name, asyncio.run(load(url, texts, clients, args.seconds)), args.seconds)
                for name, url in (("palm-ds serve", first), ("pipeline", second))
            ]
            print(f"{clients:4} clients: {rates[0] / rates[1]:.2f} times\n", flush=True)


@contextmanager
def started(command: list[str], port: int, folder: Path | None = None) -> Iterator[str]:
    """The URL of a server of its own process, of the version in a folder."""
    url = f"http://127.0.0.1:{port}"
    threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with subprocess.Popen(command, env={**os.environ, **threads}, cwd=folder) as process:
        try:
            while not healthy(url):
                assert process.poll() is None, f"{command[:3]} ended"
                time.sleep(0.3)
            yield url
        finally:
            process.terminate()


def healthy(url: str) -> bool:
    try:
        return httpx.get(url + "/health", timeout=2).is_success
    except httpx.TransportError:
        return False


def check_same(first: str, second: str, texts: list[str]) -> None:
    """Both answer with the same vectors."""
    body = {"texts": texts[:4]}
    answers = [httpx.post(url + "/embed", json=body, timeout=60).json() for url in (first, second)]
    own, other = (np.array(answer["embeddings"]) for answer in answers)
    print(f"largest difference of a number: {np.abs(own - other).max():.1e}\n")


async def load(url: str, texts: list[str], clients: int, seconds: float) -> list[float]:
    """Seconds to each answer, while `clients` send one request after the other, each over its own
    connection. The requests are written by hand: httpx itself would be the limit at 128 clients."""
    times: list[float] = []
    until = time.monotonic() + seconds
    port = int(url.rpartition(":")[2])

    async def ask(first: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for number in itertools.count(first, clients):
            started = time.monotonic()
            if started > until:
                break
            writer.write(request_of(texts[number % len(texts)]))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            await reader.readexactly(int(head.lower().split(b"content-length:")[1].split()[0]))
            if (now := time.monotonic()) <= until:
                times.append(now - started)
        writer.close()

    await asyncio.gather(*(ask(number) for number in range(clients)))
    return times


def request_of(text: str) -> bytes:
    """A request as it is sent."""
    body = json.dumps({"texts": [text]}).encode()
    head = f"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + body


def show(name: str, times: list[float], seconds: float) -> float:
    """Print a line; returns requests a second."""
    rate = len(times) / seconds
    half, most = (1000 * np.percentile(times, q) for q in (50, 99))
    print(f"     {name:14} {rate:7.1f} requests/s, p50 {half:6.0f} ms, p99 {most:6.0f} ms")
    return rate


if __name__ == "__main__":
    main()
