"""A short request behind eight long ones, before an engine that runs one request at a time.

    python scripts/lab bursts --output docs/results/bursts.json
    python scripts/lab bursts --report --output docs/results/bursts.json

The timed engine has one slot. Eight long requests come at once, and as the first of them runs, a short one; the bounds
`max_tokens` say which is which. Five such bursts follow each other, each as soon as the last has ended. How long does
the short request take, in each of the bursts?

    direct   the engine itself, which serves requests in the order of their arrival
    fffs     llmserve with --order fffs, and no other flag
    bare     `llmserve serve --engine URL`, without another flag
    right    with --slots 1 --look-ahead 0

llmserve learns the slots of an engine that tells nothing of itself, and of one that shows at /metrics how many requests
run and wait in it. Answers come as streams, or as a whole. Within a round the arrangements take turns, each with a new
server. Numbers are medians of the rounds; ratios are taken round by round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import product
from typing import Any

from kit import client
from kit.arguments import parser_of, whole
from kit.progress import log
from kit.results import day_and_machine, in_turn, rounded, write_json
from kit.rows import Row, medians, ratio, select
from kit.servers import fake_engine, front_end
from kit.studies import add_report, measure_or_report
from kit.tables import markdown

from questions.vllm.passes import Question, send

LONG, LONG_TOKENS, SHORT_TOKENS = 8, 60, 6
STEP_S, SHORT_AT_S = 0.01, 0.1
BURSTS = 5
DIRECT, IN_ORDER, BARE, RIGHT = "directly", "llmserve, first come, first served", "llmserve", "llmserve, right flags"
FLAGS = {IN_ORDER: ("--order", "fffs"), BARE: (), RIGHT: ("--slots", "1", "--look-ahead", "0")}
ARRANGEMENTS = (DIRECT, *FLAGS)
TELLS = {"nothing": False, "its counts": True}
ANSWERS = ("streams", "whole")
CASE = ("engine tells", "answers", "arrangement", "round")
NUMBERS = [f"short_s_{burst}" for burst in range(1, BURSTS + 1)]


def question(number: int, tokens: int, at_s: float, answers: str) -> Question:
    streams = answers == "streams"
    more = {"stream": True, "stream_options": {"include_usage": True}} if streams else {}
    body = client.body_of(f"Number {number}: tell me of it", max_tokens=tokens, **more)
    return Question(json.dumps(body).encode(), {}, at_s, whole=not streams)


def burst(number: int, answers: str) -> list[Question]:
    """The long requests and the short one. number : of the burst, from 0"""
    first = number * (LONG + 1)
    long = [question(first + index, LONG_TOKENS, 0.0, answers) for index in range(LONG)]
    return [*long, question(first + LONG, SHORT_TOKENS, SHORT_AT_S, answers)]


@asynccontextmanager
async def reached(arrangement: str, engine: str, tells: str) -> AsyncIterator[str]:
    """The URL for the requests of an arrangement."""
    if arrangement == DIRECT:
        yield engine
        return
    flags = ("--engine", engine, "--log-level", "warning", *FLAGS[arrangement])
    async with front_end(arrangement, *flags, told=TELLS[tells]) as server:
        yield server.url


async def one_pass(arrangement: str, engine: str, tells: str, answers: str) -> dict[str, float]:
    """Seconds of the short request in each burst. Raises RuntimeError when a request fails."""
    seconds = {}
    async with reached(arrangement, engine, tells) as url:
        for number, name in enumerate(NUMBERS):
            outcomes = await send([url] * (LONG + 1), burst(number, answers))
            if failures := [outcome.failure for outcome in outcomes if outcome.failure]:
                raise RuntimeError(f"{arrangement} failed: {failures[0]}")
            seconds[name] = outcomes[-1].latency_s
    return seconds


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    passes = []
    cases = list(product(TELLS, ANSWERS))
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(fake_engine(client.MODEL, "--slots", "1", "--step-s", str(STEP_S)))
            for _ in cases
        ]
        for number in range(args.rounds):
            for arrangement in in_turn(ARRANGEMENTS, number):
                # The timed engines only wait, so the cases run side by side.
                found = await asyncio.gather(
                    *[
                        one_pass(arrangement, engine.url, tells, answers)
                        for engine, (tells, answers) in zip(engines, cases, strict=True)
                    ]
                )
                for (tells, answers), seconds in zip(cases, found, strict=True):
                    passes.append(Row(dict(zip(CASE, (tells, answers, arrangement, number), strict=True)), seconds))
                    shown = " ".join(f"{value:.2f}" for value in seconds.values())
                    log(f"{number + 1}/{args.rounds}: tells {tells}, {answers}: {arrangement}: {shown} s")
    setting = {**day_and_machine(), "rounds": args.rounds, "long": LONG, "long_tokens": LONG_TOKENS}
    setting |= {"short_tokens": SHORT_TOKENS, "short_at_s": SHORT_AT_S, "step_s": STEP_S}
    results: dict[str, Any] = rounded(
        {**setting, "rows": [row.record for row in rows_of(passes)], "passes": [row.record for row in passes]}
    )
    write_json(args.output, results)
    return results


def rows_of(passes: Sequence[Row]) -> list[Row]:
    """A row for each arrangement: medians over the rounds, with ratios to the right flags and to fffs."""
    found = []
    for row in medians(passes, "round"):
        same = {name: row[name] for name in CASE[:2]}
        own = select(passes, **same, arrangement=row["arrangement"])
        ratios = {
            label: {name: ratio(own, select(passes, **same, arrangement=base), name, "round") for name in NUMBERS}
            for label, base in (("right", RIGHT), ("fffs", IN_ORDER))
        }
        found.append(Row(row.case, row.numbers, ratios))
    return found


def print_report(results: dict[str, Any]) -> None:
    head = [*CASE[:-1], *(f"burst {number} (s)" for number in range(1, BURSTS + 1))]
    head += ["to right flags: burst 1", "bursts 2 to 5, the worst", "to fffs: burst 1"]
    lines = []
    for row in (Row.of_record(record, CASE[:-1]) for record in results["rows"]):
        right, in_order = row.ratios["right"], row.ratios["fffs"]
        ratios = (right[NUMBERS[0]], max(right[name] for name in NUMBERS[1:]), in_order[NUMBERS[0]])
        lines.append([*(row[name] for name in CASE[:-1]), *(f"{row[name]:.2f}" for name in NUMBERS)])
        lines[-1] += [f"{value:.2f}" for value in ratios]
    print(markdown(head, lines))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=whole(1), default=5)
    add_report(parser)
    measure_or_report(parser, parser.parse_args(), measure, print_report)
