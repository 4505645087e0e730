"""What the front-end costs: llmserve beside a bare FastAPI + aiohttp pass-through, in front of the same fast upstream.

    python scripts/lab/benchmark_frontend.py --output docs/results/frontend.json

Upstream, pass-through and llmserve are processes of their own; a load generator drives each in turn, round after
round: requests a second at 32 connections, latency at one connection, and forwarded stream chunks a second. Medians
of rounds. A stream's upstream writes one event every millisecond to each of 64 clients, so that events cannot be
forwarded many at a time. Everything stays on loopback. The load generator is wrk where it is installed (it takes
the least of the machine), otherwise aiohttp.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from llmserve.engines.engine_process import free_port

BODY = {"model": "fake", "messages": [{"role": "user", "content": "How long is a piece of string?"}]}
STREAMS, STREAM_TOKENS = 64, 400
BARE = """
import sys, aiohttp, fastapi, uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
app = FastAPI()
session = None
@app.post("/v1/chat/completions")
async def forward(request: Request):
    global session
    session = session or aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    data = await request.body()
    if b'"stream"' in data:
        async def chunks():
            async with session.post(sys.argv[1] + "/v1/chat/completions", data=data) as answer:
                async for chunk in answer.content.iter_any():
                    yield chunk
        return StreamingResponse(chunks(), media_type="text/event-stream")
    async with session.post(sys.argv[1] + "/v1/chat/completions", data=data) as answer:
        return Response(await answer.read(), answer.status, media_type=answer.content_type)
@app.get("/ready")
async def ready():
    return {}
uvicorn.run(app, port=int(sys.argv[2]), log_level="critical")
"""


@contextmanager
def running(*command: str) -> Iterator[None]:
    """A child process inside the block; ended with SIGTERM."""
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=20)


@contextmanager
def servers(step_s: float) -> Iterator[dict[str, str]]:
    """Base URLs by name, all ready. step_s: the upstream's time for a token; 0 answers at once."""
    upstream, bare, front = free_port(), free_port(), free_port()
    upstream_url = f"http://127.0.0.1:{upstream}"
    engine = ("-m", "llmserve.engines.fake", "--step-s", str(step_s), "--slots", str(STREAMS), "--port", str(upstream))
    serve = ("-m", "llmserve", "serve", "--engine", upstream_url, "--predictor", "none", "--log-level", "error")
    with (
        running(*engine),
        running("-c", BARE, upstream_url, str(bare)),
        running(*serve, "--port", str(front)),
    ):
        urls = {
            "upstream itself": upstream_url,
            "bare pass-through": f"http://127.0.0.1:{bare}",
            "llmserve": f"http://127.0.0.1:{front}",
        }
        for url in urls.values():
            asyncio.run(until_ready(url))
        yield urls


async def until_ready(url: str) -> None:
    """Until POST answers 200; raises TimeoutError after a minute."""
    async with asyncio.timeout(60), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.post(f"{url}/v1/chat/completions", json=BODY) as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)


def load(url: str, connections: int, seconds: float) -> tuple[float, float, float]:
    """(requests a second, median and p99 latency in ms) of non-streaming requests."""
    if shutil.which("wrk"):
        return load_with_wrk(url, connections, seconds)
    return asyncio.run(load_with_aiohttp(url, connections, seconds))


def load_with_wrk(url: str, connections: int, seconds: float) -> tuple[float, float, float]:
    script = (
        f"wrk.method = 'POST'\nwrk.headers['content-type'] = 'application/json'\nwrk.body = '{json.dumps(BODY)}'\n"
        "done = function(summary, latency)\n"
        "  io.write(string.format('RESULT %d %d %d %d %d\\n', summary.requests, summary.duration,\n"
        "    latency:percentile(50), latency:percentile(99), summary.errors.status))\nend\n"
    )
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as file:
        file.write(script)
        file.flush()
        command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds:.0f}s", "-s", file.name, f"{url}/v1/chat/completions"]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    requests, duration_us, p50_us, p99_us, errors = map(int, out.rpartition("RESULT ")[2].split())
    assert errors == 0, f"{errors} requests were not answered with success"
    return requests / duration_us * 1e6, p50_us / 1e3, p99_us / 1e3


async def load_with_aiohttp(url: str, connections: int, seconds: float) -> tuple[float, float, float]:
    times_ms: list[float] = []
    data = json.dumps(BODY).encode()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        until_s = time.perf_counter() + seconds

        async def client() -> None:
            while (began_s := time.perf_counter()) < until_s:
                async with session.post(f"{url}/v1/chat/completions", data=data) as response:
                    await response.read()
                    assert response.status == 200
                times_ms.append((time.perf_counter() - began_s) * 1e3)

        await asyncio.gather(*(client() for _ in range(connections)))
    quantiles = statistics.quantiles(times_ms, n=100)
    return len(times_ms) / seconds, quantiles[49], quantiles[98]


async def stream_events_per_s(url: str) -> float:
    """Server-sent events a second over all streams at once, counted by a reader that parses nothing."""
    body = {**BODY, "stream": True, "max_tokens": STREAM_TOKENS}
    events = 0

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one() -> None:
            nonlocal events
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                async for chunk in response.content.iter_any():
                    events += chunk.count(b"data:")

        began_s = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(STREAMS)))
        return events / (time.perf_counter() - began_s)


def measure(rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    samples: dict[str, dict[str, list[float]]] = {}

    def add(name: str, **values: float) -> None:
        for key, value in values.items():
            samples.setdefault(name, {}).setdefault(key, []).append(value)

    with servers(step_s=0.0) as urls:
        for number, (name, url) in itertools.product(range(rounds), urls.items()):
            rate_per_s, _, busy_p99_ms = load(url, 32, seconds)
            _, p50_ms, p99_ms = load(url, 1, seconds)
            add(name, requests_per_s_at_32=rate_per_s, latency_ms_p99_at_32=busy_p99_ms)
            add(name, latency_ms_p50_at_1=p50_ms, latency_ms_p99_at_1=p99_ms)
            print(f"round {number + 1}/{rounds}: {name}: {rate_per_s:,.0f} requests/s", file=sys.stderr)
    with servers(step_s=0.001) as urls:
        for number, (name, url) in itertools.product(range(rounds), urls.items()):
            add(name, stream_events_per_s=asyncio.run(stream_events_per_s(url)))
            print(
                f"round {number + 1}/{rounds}: {name}: {samples[name]['stream_events_per_s'][-1]:,.0f} events/s",
                file=sys.stderr,
            )
    return {name: {key: statistics.median(values) for key, values in row.items()} for name, row in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each load")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    args = parser.parse_args()
    results = measure(args.rounds, args.seconds)
    table = Table(title="In front of a trivially fast upstream, one process, predictor off", title_justify="left")
    table.add_column("")
    for column in ("requests/s, 32 conn.", "p50 ms, 1 conn.", "p99 ms, 1 conn.", "stream events/s"):
        table.add_column(column, justify="right")
    for name, row in results.items():
        table.add_row(
            name,
            f"{row['requests_per_s_at_32']:,.0f}",
            f"{row['latency_ms_p50_at_1']:.2f}",
            f"{row['latency_ms_p99_at_1']:.2f}",
            f"{row['stream_events_per_s']:,.0f}",
        )
    Console().print(table)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        generator = "wrk" if shutil.which("wrk") else "aiohttp"
        machine: dict[str, Any] = {"python": platform.python_version(), "cores": os.cpu_count(), "load": generator}
        args.output.write_text(json.dumps({**machine, "rounds": args.rounds, "medians": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
