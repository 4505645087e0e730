"""What becomes of requests when engines die or stop, when thousands of clients come at once, and of memory in an hour.

    python scripts/lab performance.robustness --output docs/results/robustness.json --figure docs/results/soak.png

killed       two engines, 500 requests; one engine is killed after 250 answers
stopped      the same; one engine is stopped (SIGSTOP) after 250 answers, and goes on 8 s later
connections  5,000 clients at once before one slow engine, with a queue of 100
soak         30 requests/s for an hour: whole answers, streams, clients that leave, bodies that are no JSON

The engines are timed ones, on loopback. Each part replaces its section of the output.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from kit import client
from kit.arguments import add_results, parser_of
from kit.figures import BLUE, ORANGE, new_figure, save
from kit.progress import log
from kit.results import day_and_machine, read_parts, write_json
from kit.servers import Server, fake_engine, flags_of, front_end

REQUESTS, AFTER = 500, 250
STOPPED_S = 8.0
CLIENTS, QUEUE = 5_000, 100
RATE_PER_S = 30.0
SAMPLE_S = 5.0
SETTLED_S = 600.0  # after which memory should stay flat
MIB = float(1 << 20)


def process_of(server: Server) -> psutil.Process:
    """The process that listens on the server's port."""
    for child in (psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)):
        if any(one.status == "LISTEN" and one.laddr.port == server.port for one in child.net_connections("tcp")):
            return child
    raise RuntimeError(f"nothing listens on port {server.port}")


def question(number: int, **more: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": f"question {number}"}], **more}


async def fault(sign: signal.Signals) -> dict[str, Any]:
    """REQUESTS from 32 clients, with a signal to one of two engines after half of the answers."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(fake_engine("fake", "--step-s", "0.005")) for _ in range(2)]
        flags = flags_of("engine", [engine.url for engine in engines])
        front = await stack.enter_async_context(
            front_end("robustness", *flags, "--slots", "8", "--engine-idle-s", "20", "--log-level", "error")
        )
        session = await stack.enter_async_context(client.session_of())
        victim, statuses = process_of(engines[0]), Counter[int]()
        numbers = iter(range(REQUESTS))
        latencies_s = []

        async def keep_asking() -> None:
            for number in numbers:
                began_s = time.perf_counter()
                reply = await client.ask(session, front.url, question(number, max_tokens=20))
                latencies_s.append(time.perf_counter() - began_s)
                statuses[reply.status] += 1
                if statuses.total() == AFTER:
                    victim.send_signal(sign)
                    if sign == signal.SIGSTOP:
                        asyncio.get_running_loop().call_later(STOPPED_S, victim.resume)

        await asyncio.gather(*[keep_asking() for _ in range(32)])
        return {"statuses": dict(statuses), "answers": statuses.total(), "longest_s": max(latencies_s)}


async def many_clients() -> dict[str, Any]:
    """CLIENTS at once: statuses, and the most memory that the server took."""
    async with fake_engine("fake", "--step-s", "0.02") as engine:
        flags = ("--engine", engine.url, "--slots", "8", "--queue-requests-max", str(QUEUE), "--log-level", "error")
        async with front_end("robustness", *flags) as front, client.session_of() as session:
            server = process_of(front)
            before = server.memory_info().rss
            asking = asyncio.gather(
                *[client.ask(session, front.url, question(number, max_tokens=30)) for number in range(CLIENTS)]
            )
            most = before
            while not asking.done():
                most = max(most, server.memory_info().rss)
                await asyncio.sleep(0.05)
            statuses = Counter(reply.status for reply in asking.result())
            return {
                "clients": CLIENTS,
                "queue": QUEUE,
                "statuses": dict(statuses),
                "rss_before_mib": before / MIB,
                "rss_most_mib": most / MIB,
            }


async def soak(minutes: float) -> dict[str, Any]:
    """RATE_PER_S for some minutes: statuses, and the server's memory, files and connections over time."""
    rng = random.Random(5)
    samples: list[dict[str, float]] = []
    statuses = Counter[str]()
    async with fake_engine("fake", "--step-s", "0.002", "--slots", "16") as engine:
        flags = ("--engine", engine.url, "--slots", "16", "--log-level", "error")
        async with front_end("robustness", *flags) as front, client.session_of(30.0) as session:
            server, began_s, asked = process_of(front), time.perf_counter(), 0
            running: set[asyncio.Task[None]] = set()
            while (now_s := time.perf_counter() - began_s) < 60 * minutes:
                if now_s >= SAMPLE_S * len(samples):
                    samples.append(
                        {"s": now_s, "rss_mib": server.memory_info().rss / MIB, "files": float(server.num_fds())}
                    )
                    if len(samples) % 60 == 1:
                        log(
                            f"{now_s / 60:.0f} of {minutes:.0f} min: {samples[-1]['rss_mib']:.1f} MiB, {dict(statuses)}"
                        )
                task = asyncio.create_task(visit(session, front.url, asked, rng, statuses))
                running.add(task)
                task.add_done_callback(running.discard)
                asked += 1
                await asyncio.sleep(max(0.0, asked / RATE_PER_S - (time.perf_counter() - began_s)))
            await asyncio.gather(*running)
    settled = [sample["rss_mib"] for sample in samples if sample["s"] >= min(SETTLED_S, 30 * minutes)]
    half = len(settled) // 2
    return {
        "minutes": minutes,
        "requests": asked,
        "outcomes": dict(statuses),
        "growth_after_settling_mib": statistics.median(settled[half:]) - statistics.median(settled[:half]),
        "samples": samples,
    }


async def visit(
    session: aiohttp.ClientSession, url: str, number: int, rng: random.Random, statuses: Counter[str]
) -> None:
    """One request of a kind drawn at random."""
    kind, words = rng.random(), " ".join(str(rng.randrange(5_000)) for _ in range(rng.randrange(1, 60)))
    body = question(number, max_tokens=rng.randrange(1, 60), stream=kind < 0.4)
    body["messages"][0]["content"] = words
    try:
        if kind > 0.95:
            async with session.post(f"{url}/v1/chat/completions", data=os.urandom(200)) as response:
                statuses[f"no JSON: {response.status}"] += 1
            return
        leaves = kind < 0.1 or 0.4 < kind < 0.45
        timeout = aiohttp.ClientTimeout(total=rng.uniform(0.001, 0.1) if leaves else 30.0)
        async with session.post(f"{url}/v1/chat/completions", json=body, timeout=timeout) as response:
            await response.read()
            statuses[str(response.status)] += 1
    except TimeoutError:
        statuses["left"] += 1
    except aiohttp.ClientError as error:
        statuses[type(error).__name__] += 1


def draw(result: dict[str, Any], path: Path) -> None:
    figure, axes = new_figure(1, 1, width=7, height=3)
    axis, minutes = axes[0, 0], [sample["s"] / 60 for sample in result["samples"]]
    axis.plot(minutes, [sample["rss_mib"] for sample in result["samples"]], color=BLUE, label="memory, MiB")
    axis.plot(minutes, [sample["files"] for sample in result["samples"]], color=ORANGE, label="open files")
    axis.set(xlabel="minutes", ylim=(0, None), title=f"{result['requests']:,} requests at {RATE_PER_S:g} a second")
    axis.legend()
    save(figure, path)


PARTS = {
    "killed": lambda minutes: fault(signal.SIGKILL),
    "stopped": lambda minutes: fault(signal.SIGSTOP),
    "connections": lambda minutes: many_clients(),
    "soak": soak,
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=60.0, help="of the soak")
    add_results(parser, "--figure")
    args = parser.parse_args()
    result = read_parts(args.output)
    for part in args.parts:
        log(f"{part} ...")
        result[part] = {**day_and_machine(), **asyncio.run(PARTS[part](args.minutes))}
        log(json.dumps({name: value for name, value in result[part].items() if name != "samples"}))
        write_json(args.output, result)
    if args.figure is not None and "soak" in args.parts:
        draw(result["soak"], args.figure)
