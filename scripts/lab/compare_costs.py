#!/usr/bin/env python
"""What two checkouts cost, in turns: a hop, without and with a key and its limits, a stream's event, a step of the
scheduler, a simulated request.

    git worktree add ../before COMMIT
    python scripts/lab/compare_costs.py ../before
    python scripts/lab/compare_costs.py ../before --rounds 8 --output runs/costs.json

Processor time, user and system: of the server's processes for a hop and an event, of one process for a step and for the
simulator. The checkouts take turns within each round, and every second round begins with the other one, so that a busy
machine slows both alike. The table has medians over rounds, and the median of the rounds' ratios. Both checkouts run in
the environment of this interpreter.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
from kit import ROOT, client
from kit.arguments import add_results, parser_of
from kit.progress import log
from kit.results import machine, write_json
from kit.servers import Server, fake_engine, module, running
from kit.tables import show
from questions.performance.frontend import BODY, STREAM_TOKENS, STREAMS, load_with_aiohttp, stream_events_per_s

CONNECTIONS = 32
TOKEN_S = 0.004  # of each of the streams, so that hardly two events of one are read together
KEY = "key-of-the-comparison"
KEY_FILE = f"""
[keys.one]
key = "{KEY}"
requests_per_minute = 100_000_000
tokens_per_minute = 10_000_000_000
tokens_waiting = 100_000_000
concurrent = 10_000
"""
HEADERS = {"authorization": f"Bearer {KEY}"}
REPEATS = 3  # of all streams
QUANTITIES = {  # name : (unit, digits)
    "hop": ("us", 1),
    "hop with a key": ("us", 1),
    "event of a stream": ("us", 2),
    "step of the scheduler": ("us", 1),
    "simulated request": ("us", 1),
}


def environment_of(checkout: Path) -> dict[str, str]:
    paths = [str(checkout), str(checkout / "scripts"), str(checkout / "scripts/lab")]
    return {"PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1"}


def cpu_s(server: Server) -> float:
    """Processor time of a server and all its processes so far."""
    top = psutil.Process(server.process.pid)
    times = [process.cpu_times() for process in (top, *top.children(recursive=True))]
    return sum(time.user + time.system for time in times)


async def hop_us(server: Server, seconds: float) -> float:
    before_s = cpu_s(server)
    rate_per_s, _, _ = await load_with_aiohttp(server.url, CONNECTIONS, seconds, HEADERS)
    return 1e6 * (cpu_s(server) - before_s) / (rate_per_s * seconds)


async def event_us(server: Server) -> float:
    before_s = cpu_s(server)
    for _ in range(REPEATS):
        await stream_events_per_s(server.url)
    return 1e6 * (cpu_s(server) - before_s) / (REPEATS * STREAMS * STREAM_TOKENS)


def simulated_us(checkout: Path, requests: int) -> float:
    command = [sys.executable, "-m", "llmserve", "simulate", "--requests", str(requests), "--order", "boost", "--json"]
    return 1e6 * _child_cpu_s(checkout, command) / requests


def step_us(checkout: Path, folder: Path) -> float:
    """The median step of 12 engines and 3,000 queued requests, in the checkout's own benchmark."""
    output = folder / "steps.json"
    old = checkout / "scripts/lab/benchmark_scheduler.py"  # where it stood once
    script = [str(old)] if old.is_file() else [str(checkout / "scripts/lab"), "performance.scheduler"]
    words = ["--rounds", "1", "--steps", "4000", "--requests", "200", "--output", str(output)]
    _child_cpu_s(checkout, [sys.executable, *script, *words])
    steps = json.loads(output.read_text(encoding="utf-8"))["steps"]
    return float(next(step["step_us_p50"] for step in steps if step["case"] == "12 engines, 1 models"))


def _child_cpu_s(checkout: Path, command: list[str]) -> float:
    """Processor time of a command that runs in a checkout. Raises RuntimeError with the end of its output."""
    before = os.times()
    done = subprocess.run(
        command, cwd=checkout, env={**os.environ, **environment_of(checkout)}, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


async def measure(checkouts: Mapping[str, Path], rounds: int, seconds: float, requests: int) -> dict[str, list[float]]:
    """Values over rounds, by "CHECKOUT: QUANTITY"."""
    values: dict[str, list[float]] = {f"{name}: {quantity}": [] for name in checkouts for quantity in QUANTITIES}
    async with AsyncExitStack() as stack:

        async def serving(name: str, checkout: Path, engine_url: str, *more: str) -> Server:
            flags = ("--engine", engine_url, "--predictor", "none", "--log-level", "error", *more)
            command = module("llmserve", "serve", *flags)
            place = running(name, command, ready="/ready", environment=environment_of(checkout))
            server = await stack.enter_async_context(place)
            async with client.session_of() as session:
                assert (await client.ask(session, server.url, BODY, HEADERS)).answer
            return server

        engines = {}
        for kind, step_s in (("whole", 0.0), ("streams", TOKEN_S)):
            flags = ("--step-s", str(step_s), "--slots", str(STREAMS))
            engines[kind] = (await stack.enter_async_context(fake_engine("fake", *flags))).url
        hops = {name: await serving(name, checkout, engines["whole"]) for name, checkout in checkouts.items()}
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        keys = folder / "keys.toml"
        keys.write_text(KEY_FILE, encoding="utf-8")
        keys.chmod(0o600)
        keyed = {
            name: await serving(name, checkout, engines["whole"], "--api-key-file", str(keys))
            for name, checkout in checkouts.items()
        }
        streams = {name: await serving(name, checkout, engines["streams"]) for name, checkout in checkouts.items()}
        for number in range(rounds):
            for name, checkout in list(checkouts.items())[:: 1 if number % 2 == 0 else -1]:
                values[f"{name}: hop"].append(await hop_us(hops[name], seconds))
                values[f"{name}: hop with a key"].append(await hop_us(keyed[name], seconds))
                values[f"{name}: event of a stream"].append(await event_us(streams[name]))
                values[f"{name}: simulated request"].append(await asyncio.to_thread(simulated_us, checkout, requests))
                values[f"{name}: step of the scheduler"].append(await asyncio.to_thread(step_us, checkout, folder))
                log(f"round {number + 1}/{rounds}: {name}")
    return values


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("before", type=Path, help="the other checkout", metavar="CHECKOUT")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of each load")
    parser.add_argument("--requests", type=int, default=20_000, help="of each simulation")
    add_results(parser)
    args = parser.parse_args()
    checkouts = {"before": args.before.resolve(), "now": ROOT}
    values = asyncio.run(measure(checkouts, args.rounds, args.seconds, args.requests))
    lines = []
    for quantity, (unit, digits) in QUANTITIES.items():
        before, now = values[f"before: {quantity}"], values[f"now: {quantity}"]
        ratio = statistics.median(b / a for a, b in zip(before, now, strict=True))
        medians = [f"{statistics.median(side):.{digits}f}" for side in (before, now)]
        lines.append([f"{quantity}, {unit}", *medians, f"{ratio:.3f}"])
    show(f"Processor time, {args.rounds} rounds in turns", ["", "before", "now", "ratio"], lines)
    write_json(args.output, {**machine(), "rounds": args.rounds, "values": values}, indent=2)


if __name__ == "__main__":
    main()
