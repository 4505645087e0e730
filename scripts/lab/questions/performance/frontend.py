"""What the front-end costs: llmserve beside a bare FastAPI + aiohttp pass-through, in front of the same fast upstream.

    python scripts/lab performance.frontend --router .venv-router/bin/vllm-router --output docs/results/frontend.json

Upstream, pass-through and llmserve are separate processes on loopback. A load generator drives them in turn, round
after round: requests per second at 32 connections, latency at one connection, and forwarded stream events per second.
The results are medians over rounds. For streams the upstream writes one event per millisecond to each of 64 clients, so
that no server can forward many events at once. vllm-router (Rust) is measured beside them where it is installed. The
load generator is wrk where it is installed, because wrk needs the least processor time, otherwise aiohttp.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from kit import client
from kit.arguments import add_results, parser_of
from kit.progress import log
from kit.results import machine, write_json
from kit.rows import Row, medians
from kit.servers import fake_engine, front_end, running
from kit.tables import cells, show

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


@asynccontextmanager
async def servers(step_s: float, router: str | None = None) -> AsyncIterator[dict[str, str]]:
    """Base URLs by name, of servers that have answered once.

    step_s : the upstream's time for a token.  router : the executable vllm-router; None: without it
    """
    async with (
        AsyncExitStack() as stack,
        fake_engine("fake", "--step-s", str(step_s), "--slots", str(STREAMS)) as upstream,
    ):

        def bare(port: int) -> list[str]:
            return [sys.executable, "-c", BARE, upstream.url, str(port)]

        front_flags = ("--engine", upstream.url, "--predictor", "none", "--log-level", "error")
        front_ends = front_end("front-end", *front_flags)
        async with running("pass-through", bare, ready="/ready") as passing, front_ends as front:
            urls = {"upstream itself": upstream.url, "bare pass-through": passing.url, "llmserve": front.url}
            if router is not None:
                words = [router, "--worker-urls", upstream.url, "--host", "127.0.0.1", "--policy", "round_robin"]
                routing = running("vllm-router", lambda port: [*words, "--port", str(port)], ready="/health")
                urls["vllm-router"] = (await stack.enter_async_context(routing)).url
            async with client.session_of() as session:
                for url in urls.values():
                    assert (await client.ask(session, url, BODY)).answer
            yield urls


async def load(url: str, connections: int, seconds: float) -> tuple[float, float, float]:
    """Requests per second, median and p99 latency (ms) of requests that do not stream."""
    if shutil.which("wrk"):
        return await asyncio.to_thread(load_with_wrk, url, connections, seconds)
    return await load_with_aiohttp(url, connections, seconds)


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


async def load_with_aiohttp(
    url: str, connections: int, seconds: float, headers: Mapping[str, str] | None = None
) -> tuple[float, float, float]:
    times_ms: list[float] = []
    data = json.dumps(BODY).encode()
    async with client.session_of() as session:
        until_s = time.perf_counter() + seconds

        async def keep_asking() -> None:
            while (began_s := time.perf_counter()) < until_s:
                async with session.post(f"{url}/v1/chat/completions", data=data, headers=headers) as response:
                    await response.read()
                    assert response.status == 200
                times_ms.append((time.perf_counter() - began_s) * 1e3)

        await asyncio.gather(*(keep_asking() for _ in range(connections)))
    quantiles = statistics.quantiles(times_ms, n=100)
    return len(times_ms) / seconds, quantiles[49], quantiles[98]


async def stream_events_per_s(url: str) -> float:
    """Server-sent events per second of all streams together. The reader counts events without parsing them."""
    body = {**BODY, "stream": True, "max_tokens": STREAM_TOKENS}
    events = 0

    async with client.session_of() as session:

        def count(chunk: bytes) -> None:
            nonlocal events
            events += chunk.count(b"data:")

        began_s = time.perf_counter()
        await asyncio.gather(*(client.ask(session, url, body, on_chunk=count) for _ in range(STREAMS)))
        return events / (time.perf_counter() - began_s)


async def measure(rounds: int, seconds: float, router: str | None) -> list[Row]:
    """One row for each server, with medians over rounds."""
    loads, streams = [], []
    async with servers(0.0, router) as urls:
        for number, (name, url) in itertools.product(range(rounds), urls.items()):
            rate_per_s, _, busy_p99_ms = await load(url, 32, seconds)
            _, p50_ms, p99_ms = await load(url, 1, seconds)
            numbers = {"requests_per_s_at_32": rate_per_s, "latency_ms_p99_at_32": busy_p99_ms}
            numbers |= {"latency_ms_p50_at_1": p50_ms, "latency_ms_p99_at_1": p99_ms}
            loads.append(Row({"server": name, "round": number}, numbers))
            log(f"round {number + 1}/{rounds}: {name}: {rate_per_s:,.0f} requests/s")
    async with servers(0.001, router) as urls:
        for number, (name, url) in itertools.product(range(rounds), urls.items()):
            events_per_s = await stream_events_per_s(url)
            streams.append(Row({"server": name, "round": number}, {"stream_events_per_s": events_per_s}))
            log(f"round {number + 1}/{rounds}: {name}: {events_per_s:,.0f} events/s")
    pairs = zip(medians(loads, "round"), medians(streams, "round"), strict=True)
    return [Row(load_.case, {**load_.numbers, **stream.numbers}) for load_, stream in pairs]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of each load")
    parser.add_argument("--router", help="the executable vllm-router")
    add_results(parser)
    args = parser.parse_args()
    rows = asyncio.run(measure(args.rounds, args.seconds, args.router))
    columns = {
        "": ("server", ""),
        "requests/s, 32 conn.": ("requests_per_s_at_32", ",.0f"),
        "p50 ms, 1 conn.": ("latency_ms_p50_at_1", ".2f"),
        "p99 ms, 1 conn.": ("latency_ms_p99_at_1", ".2f"),
        "stream events/s": ("stream_events_per_s", ",.0f"),
    }
    show("In front of a trivially fast upstream, one process, predictor off", list(columns), cells(rows, columns))
    setting = {**machine(), "load": "wrk" if shutil.which("wrk") else "aiohttp", "rounds": args.rounds}
    write_json(args.output, {**setting, "medians": {row["server"]: row.numbers for row in rows}}, indent=2)
