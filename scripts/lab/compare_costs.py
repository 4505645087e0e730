#!/usr/bin/env python
"""What two checkouts cost, in turns: a hop, without and with a key and its limits, a stream's event, the scheduler's
steps for an arrival and for an end, a simulated request.

    git worktree add ../before COMMIT
    python scripts/lab/compare_costs.py ../before
    python scripts/lab/compare_costs.py ../before --rounds 8 --output runs/costs.json

Processor time, user and system: of the server's processes for a hop and an event, of one process for a step and for the
simulator. The checkouts take turns within each round, and every second round begins with the other one, so that a busy
machine slows both alike. The table has medians over rounds, and the median of the rounds' ratios. Both checkouts run in
the environment of this interpreter, and keep their compiled modules, as an installed package does.

Half of the scheduler's steps are arrivals, and half are ends, which differ: a median of all of them would be a cheap
end or a dear arrival, by chance. So each kind has its own median, and the mean of all also has the rare dear steps.
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
from kit.keys import KEY, KEY_FILE
from kit.progress import log
from kit.results import machine, write_json
from kit.servers import Server, fake_engine, module, running
from kit.tables import show
from questions.performance.frontend import BODY, STREAM_TOKENS, STREAMS, load_with_aiohttp, stream_events_per_s

CONNECTIONS = 32
TOKEN_S = 0.004  # of each of the streams, so that hardly two events of one are read together
HEADERS = {"authorization": f"Bearer {KEY}"}
REPEATS = 3  # of all streams
COMPILED = Path(tempfile.gettempdir()) / f"llmserve-compiled-{os.getuid()}"
STEPS = 4_000
STEP_OF = {"arrival": "RequestArrived", "end": "RequestEnded"}  # kind of a step : its event
STEPS_SCRIPT = """
import gc, json, statistics, sys, time
try:
    from questions.performance import scheduler as bench
except ModuleNotFoundError:
    import benchmark_scheduler as bench  # where it stood once

seed, steps = map(int, sys.argv[1:])
load = bench.Load(next(case for case in bench.cases(12) if case.name == "12 engines, 1 models"), seed)
gc.disable()
times_us = {}
for now_s, event in load.events(steps, 0.002):
    began_ns = time.thread_time_ns()
    actions = load.scheduler.handle(event, now_s)
    load.scheduler.wake_at_s
    times_us.setdefault(type(event).__name__, []).append((time.thread_time_ns() - began_ns) / 1e3)
    load.apply(actions)
medians = {kind: statistics.median(times) for kind, times in times_us.items()}
print(json.dumps({**medians, "mean": statistics.fmean(sum(times_us.values(), []))}))
"""  # of 12 engines and 3,000 waiting requests, as the checkout's own benchmark makes them
QUANTITIES = {  # name : (unit, digits)
    "hop": ("us", 1),
    "hop with a key": ("us", 1),
    "event of a stream": ("us", 2),
    "scheduler, arrival": ("us", 1),
    "scheduler, end": ("us", 1),
    "scheduler, mean step": ("us", 1),
    "simulated request": ("us", 1),
}


def environment_of(checkout: Path) -> dict[str, str]:
    paths = [str(checkout), str(checkout / "scripts"), str(checkout / "scripts/lab")]
    compiled = {"PYTHONPYCACHEPREFIX": str(COMPILED), "PYTHONDONTWRITEBYTECODE": ""}
    return {"PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1", **compiled}


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
    command = ["-m", "llmserve", "simulate", "--requests", str(requests), "--order", "boost", "--json"]
    before = os.times()
    _run(checkout, command)
    after = os.times()
    spent_s = after.children_user + after.children_system - before.children_user - before.children_system
    return 1e6 * spent_s / requests


def steps_us(checkout: Path, seed: int, steps: int = STEPS) -> dict[str, float]:
    """Microseconds of the scheduler's steps by quantity: medians of each kind, and the mean of all."""
    measured = json.loads(_run(checkout, ["-c", STEPS_SCRIPT, str(seed), str(steps)]))
    medians = {f"scheduler, {kind}": measured[event] for kind, event in STEP_OF.items()}
    return {**medians, "scheduler, mean step": measured["mean"]}


def _run(checkout: Path, words: list[str]) -> str:
    """Run Python in a checkout. Returns what it printed. Raises RuntimeError with the end of its complaint."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=checkout,
        env={**os.environ, **environment_of(checkout)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


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
                for quantity, value in (await asyncio.to_thread(steps_us, checkout, number)).items():
                    values[f"{name}: {quantity}"].append(value)
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
