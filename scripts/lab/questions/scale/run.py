"""What an event and a request cost with relay workers, in processor time, beside vllm-router and nginx.

    python scripts/lab scale --router .venv-router/bin/vllm-router

All front-ends stand before the same engine of load.c, whose events carry the time of their sending; its clients are of
load.c, too. The front-ends take turns within each round. Each part is kept in docs/results/scale.json when it has
ended, and docs/results/scale.md is written anew from all parts that are there:

events    streams below what one process can carry
overload  streams above it
short     short streams that begin all the time: the time to the first event
whole     answers that are not streamed: equal prompts, prompts of 200 drawn words, bodies of 200 KB

vllm-router is measured where --router names it, nginx where it is installed (. scripts/environment-debian
nginx=nginx-light). `--parts` without a part measures nothing and writes the page.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import product
from pathlib import Path

from kit.arguments import exit_on, parser_of, positive, whole
from kit.keys import KEY
from kit.progress import log
from kit.results import day_and_machine, in_turn, read_parts, rounded, write_text
from kit.rows import Row

from questions.scale.load import (
    SHORT_EVERY_US,
    Load,
    NoCompiler,
    Processes,
    all_of,
    built,
    engines,
    measured,
    until_answered,
    until_quiet,
)
from questions.scale.page import OUTPUT, PAGE, page, save
from questions.scale.sides import NGINX, ROUTER, Side, nginx, of_llmserve, serving

LASTING = 1_000_000  # tokens of a stream that outlives its run
BEGIN_PER_S = 471.0  # no divisor of the events' rates: else many streams would have their events at the same moment
PARTS: Mapping[str, Sequence[Load]] = {
    "events": (
        Load("100 streams x 50/s", "streams", 100, BEGIN_PER_S, LASTING, 20_000),
        Load("1,000 streams x 20/s", "streams", 1_000, BEGIN_PER_S, LASTING, 50_000),
    ),
    "overload": (
        Load("1,000 streams x 50/s", "streams", 1_000, BEGIN_PER_S, LASTING, 20_000),
        Load("4,000 streams x 20/s", "streams", 4_000, BEGIN_PER_S, LASTING, 50_000),
    ),
    "short": tuple([Load(f"{rate}/s", "short", rate_per_s=rate, every_us=SHORT_EVERY_US) for rate in (100, 500, 900)]),
    "whole": (
        Load("equal prompts", "whole", 32),
        Load("200 drawn words", "whole", 32, words=200),
        Load("200 KB", "whole", 32, chars=200_000),
    ),
}
KEYED = {"events": (1, 2), "overload": (), "short": (), "whole": (1, 2)}  # workers of llmserve with keys and limits


def sides_of(part: str, workers: Sequence[int], router: str | None) -> list[Side]:
    sides = of_llmserve(workers)
    sides += of_llmserve([count for count in KEYED[part] if count in workers], keys=True)
    sides += [Side(ROUTER)] if router is not None else []
    return sides + ([Side(NGINX)] if nginx() is not None else [])


async def measure(part: str, loads: Sequence[Load], args: argparse.Namespace) -> list[Row]:
    """One row for each side, load and round. Where a side did not carry a load, there are no numbers."""
    rows = []
    async with AsyncExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llmserve-scale-")))
        program = built(home)
        behind = await stack.enter_async_context(engines(program, args.engines))
        served: dict[Side, tuple[int, Processes]] = {}
        for number, side in enumerate(sides_of(part, args.workers, args.router)):
            (folder := home / str(number)).mkdir()
            urls = [engine.url for engine in behind]
            server, processes = await stack.enter_async_context(serving(side, urls, folder, args.router))
            await until_answered(server.url, KEY)
            served[side] = server.port, {**processes, "load": [one for engine in behind for one in all_of(engine)]}
        for number, load in product(range(args.rounds), loads):
            for side in in_turn(list(served), number):
                port, processes = served[side]
                numbers = await _tried(load, program, port, processes, args)
                rows.append(Row({"load": load.name, "side": side.label, "round": number}, numbers))
                log(f"{part}, round {number + 1}/{args.rounds}: {load.name}: {side.label}: {_shown(numbers)}")
    return rows


async def _tried(
    load: Load, program: Path, port: int, processes: Processes, args: argparse.Namespace
) -> Mapping[str, float]:
    await until_quiet(processes)
    try:
        return await measured(load, program, port, processes, key=KEY, clients=args.clients, seconds=args.seconds)
    except RuntimeError as error:
        log(str(error))
        return {}


def _shown(numbers: Mapping[str, float]) -> str:
    names = ("cpu_us", "cpu_relays_us", "cpu_scheduler_us", "cores", "cores_load", "events_per_s", "requests_per_s")
    names += ("delay_ms_p50", "delay_ms_p99", "first_ms_p50", "first_ms_p99", "failed", "late")
    return ", ".join(f"{name} {numbers[name]:,.5g}" for name in names if name in numbers)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS), metavar="PART")
    parser.add_argument("--rounds", type=whole(1), default=3)
    parser.add_argument("--seconds", type=positive, default=5.0, help="that each load is measured for")
    parser.add_argument("--workers", type=whole(1), nargs="+", default=[1, 2, 4], help="of llmserve; 1: one process")
    parser.add_argument("--times", type=whole(1), default=1, help="the streams and their rate, times this number")
    parser.add_argument("--engines", type=whole(1), default=1, help="processes of the engine")
    parser.add_argument("--clients", type=whole(1), default=1, help="processes of clients")
    parser.add_argument("--router", help="the executable vllm-router")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="FILE", help="all parts, as JSON")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE")
    args = parser.parse_args()
    command = "python scripts/lab scale " + shlex.join(sys.argv[1:])
    with exit_on(NoCompiler, OSError):
        for name in args.parts:
            loads = [load.times(args.times) for load in PARTS[name]]
            rows = asyncio.run(measure(name, loads, args))
            part = {"command": command, **day_and_machine(), "rows": rounded([row.record for row in rows])}
            save(name, part, args.output, args.page)
        write_text(args.page, page(read_parts(args.output)))


if __name__ == "__main__":
    main()
