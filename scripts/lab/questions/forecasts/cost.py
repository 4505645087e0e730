"""What a call of POST /v1/forecast takes: the seconds that it takes more than the server's shortest answer.

    python scripts/lab forecasts.cost --output docs/results/forecast-cost.json

A server in front of a timed engine learns from some hundred answers. Then one client asks one thing at a time over one
connection, in turns: a forecast of a prompt that it has not asked for before, and OPTIONS of the same path, which the
server answers at once. Printed is the difference of the medians: reading the body, the stages of the admission, the
forecast and the answer. `--characters` is the length of the prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import statistics
import time
from pathlib import Path
from typing import Any

from kit import client
from kit.arguments import parser_of, whole
from kit.results import day_and_machine, rounded, write_json
from kit.servers import fake_engine, front_end
from make.demo_corpus import WORDS

PATH = "/v1/forecast"


def prompt(number: int, characters: int) -> str:
    words = [WORDS[(number * (place + 1) + place) % len(WORDS)] for place in range(characters)]
    return f"Request {number}: " + " ".join(words)[:characters]


def timed(connection: http.client.HTTPConnection, method: str, body: str | None) -> float:
    began_s = time.perf_counter()
    connection.request(method, PATH, body)
    response = connection.getresponse()
    response.read()
    assert response.status in (200, 204), response.status
    return time.perf_counter() - began_s


def ask(port: int, count: int, characters: int) -> dict[str, float]:
    """Median seconds of both questions, and how much longer a forecast takes."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    seconds: dict[str, list[float]] = {"OPTIONS": [], "POST": []}
    for number in range(count):
        body = json.dumps(client.body_of(prompt(10_000 + number, characters)))
        for method, own in seconds.items():
            own.append(timed(connection, method, body if method == "POST" else None))
    options_s, forecast_s = (statistics.median(own) for own in seconds.values())
    return {"options_s": options_s, "forecast_s": forecast_s, "own_s": forecast_s - options_s}


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    async with (
        fake_engine(client.MODEL, "--slots", "8", "--step-s", "0") as engine,
        front_end("llmserve", "--engine", engine.url, "--predictor", "none", "--log-level", "warning") as server,
    ):
        async with client.session_of() as session:
            for number in range(args.taught):
                await client.ask(session, server.url, client.body_of(prompt(number, args.characters), max_tokens=50))
        numbers = await asyncio.to_thread(ask, server.port, args.count, args.characters)
    results: dict[str, Any] = {**day_and_machine(), "count": args.count, "characters": args.characters, **numbers}
    if args.output:
        write_json(args.output, rounded(results))
    return results


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=whole(1), default=2000)
    parser.add_argument("--taught", type=whole(1), default=300, help="answers before the questions")
    parser.add_argument("--characters", type=whole(1), default=500)
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    results = asyncio.run(measure(parser.parse_args()))
    print(f"a forecast takes {1e3 * results['own_s']:.3f} ms, on one connection {1e3 * results['forecast_s']:.3f} ms")
