"""Which share of prompts real vLLM servers find in their caches, behind llmserve and behind vllm-router.

    python -m venv .venv-router && .venv-router/bin/pip install vllm-router
    python scripts/lab residency --vllm-python .venv-vllm/bin/python --router .venv-router/bin/vllm-router \\
        --output docs/results/residency.json
    python scripts/lab residency --report --output docs/results/residency.json

The script starts vLLM servers on the CPU (the demo model, float32, prefix caching, KV events):

    shared  two servers, conversations of 8 turns over 20 shared prefixes. Each turn sends all turns before it. The two
            caches together hold all prefixes once and the conversations, but not the prefixes twice
    long    one server, Poisson arrivals of chats, of which 2 % are prompts of the whole context, each another one: they
            take most of the engine's time. The first tenth of the requests is not counted, in which an llmserve that
            has just started learns the number of slots

In each round all arrangements get the same load, one after the other, and each round begins with another arrangement.
A salt at the beginning of its prefixes keeps a pass from the blocks of the passes before. Each server in front starts
anew for each pass, and has learnt nothing. llmserve has no flag but the engines, and what the name of an arrangement
says: the places of their KV events, or the number of their slots.

The numbers of a row are medians over the rounds; ratios are taken round by round. Hits are by vLLM's own word, in the
usage of each answer.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from kit import client
from kit.arguments import parser_of
from kit.progress import log
from kit.results import day_and_machine, in_turn, read_parts, rounded, write_json
from kit.rows import Row, medians, ratio, select
from kit.studies import add_report, measure_or_report
from kit.tables import cells, show

from questions.residency.arrangements import (
    BARE,
    BLOCK_TOKENS,
    DIRECT,
    EVENTS,
    NAMES,
    POLICIES,
    TOLD,
    Engine,
    engines,
    reached,
)
from questions.residency.conversations import Conversation, Shape, Told, Words, ask, conversations, converse
from questions.vllm.engines import kept_off_the_first_core, move_engine_to_the_first_core
from questions.vllm.loads import poisson_arrivals_s

PARTS = ("shared", "long")
ARRANGEMENTS = {"shared": (EVENTS, BARE, *POLICIES, DIRECT), "long": (DIRECT, BARE, TOLD)}
LONG_SHARE = 0.02
CONTEXT_TOKENS = 16_384  # in the part long; the cache has room for four such prompts
LONG_CHARS = 56_000  # some 15,200 tokens
SLOTS, CACHE_BLOCKS = 8, 800
CAPACITY_CHATS = 100  # requests that the capacity is measured with
CASE = ("arrangement", "round")
ANSWER_S_MAX = 600.0
COLUMNS = {
    "arrangement": ("arrangement", ""),
    "hit rate": ("hit_rate", ".3f"),
    "first token mean (s)": ("first_s_mean", ".3f"),
    "p50": ("first_s_p50", ".3f"),
    "p99": ("first_s_p99", ".3f"),
    "latency mean (s)": ("latency_s_mean", ".3f"),
    "tokens/s": ("tokens_per_s", ",.0f"),
}
RATIOS = {
    "shared": ("hit_rate", "first_s_mean", "first_s_p99", "tokens_per_s"),
    "long": ("first_s_mean", "first_s_p99", "long_first_s_mean", "tokens_per_s"),
}


def figures(answers: Sequence[Told], seconds: float) -> dict[str, float]:
    """The numbers of a pass. Times are those of the chats; prompts of the whole context have their own."""
    chats, long = [one for one in answers if not one.long], [one for one in answers if one.long]
    first_s = [one.first_s for one in chats]
    found = {
        "hit_rate": sum(one.cached_tokens for one in answers) / sum(one.prompt_tokens for one in answers),
        "prompt_tokens_mean": float(np.mean([one.prompt_tokens for one in answers])),
        "first_s_mean": float(np.mean(first_s)),
        **{f"first_s_p{q}": float(np.percentile(first_s, q)) for q in (50, 95, 99)},
        "latency_s_mean": float(np.mean([one.latency_s for one in chats])),
        "tokens_per_s": sum(one.tokens for one in answers) / seconds,
    }
    return found | ({"long_first_s_mean": float(np.mean([one.first_s for one in long]))} if long else {})


async def shared_pass(urls: Sequence[str], load: Sequence[Conversation]) -> dict[str, float]:
    async with client.session_of(ANSWER_S_MAX, connections_kept=False) as session:
        begun_s = time.perf_counter()
        answers = await client.at_their_times(
            [one.begins_s for one in load],
            lambda index, due_s: converse(session, urls[index % len(urls)], load[index]),
        )
        return figures([answer for own in answers for answer in own], time.perf_counter() - begun_s)


async def long_pass(url: str, texts: Sequence[str], at_s: Sequence[float]) -> dict[str, float]:
    """The chats, and the prompts of the whole context among them: those longer than any chat."""
    async with client.session_of(ANSWER_S_MAX, connections_kept=False) as session:

        async def asked(index: int, due_s: float) -> Told:
            is_long = len(texts[index]) >= LONG_CHARS
            messages = [{"role": "user", "content": texts[index]}]
            answer = await ask(session, url, messages, 16 if is_long else None, due_s)
            return replace(answer, long=is_long)

        begun_s = time.perf_counter()
        answers = await client.at_their_times(at_s, asked)
        seconds = time.perf_counter() - begun_s
        whole = sum(one.tokens for one in answers) / seconds
        return {**figures(answers[len(answers) // 10 :], seconds), "tokens_per_s": whole}


# ---- parts --------------------------------------------------------------------------------------------------------


async def shared(args: argparse.Namespace, write: Callable[[Sequence[Row]], None]) -> list[Row]:
    begin_per_s, answer_tokens = args.begin_per_s, args.answer_tokens
    shape = Shape(
        args.conversations, prefix_chars=args.prefix_chars, begin_per_s=begin_per_s, answer_tokens=answer_tokens
    )
    rows: list[Row] = []
    async with engines(args.vllm_python, 2, SLOTS, args.cache_blocks) as servers:
        for one in servers:  # the first answers of a fresh server are slow
            await shared_pass([one.url], conversations(replace(shape, conversations=4), np.random.default_rng(1), "0"))
        for number in range(args.rounds):
            for arrangement in in_turn(chosen(args, "shared"), number):
                salt = f"{number}{ARRANGEMENTS['shared'].index(arrangement)}"
                load = conversations(shape, np.random.default_rng([args.seed, number]), salt)
                async with reached(arrangement, servers, args.router) as urls:
                    rows.append(
                        Row({"arrangement": NAMES[arrangement], "round": number}, await shared_pass(urls, load))
                    )
                told(rows[-1], args.rounds)
                write(rows)
    return rows


async def long(args: argparse.Namespace, write: Callable[[Sequence[Row]], None]) -> list[Row]:
    rows: list[Row] = []
    first_core = min(os.sched_getaffinity(0))
    with kept_off_the_first_core(True):
        blocks = 4 * CONTEXT_TOKENS // BLOCK_TOKENS
        async with engines(args.vllm_python, 1, SLOTS, blocks, CONTEXT_TOKENS) as (server,):
            move_engine_to_the_first_core(server.server, first_core)
            rate_per_s = args.load * await capacity_per_s(server, CAPACITY_CHATS)
            for number in range(args.rounds):
                at_s = poisson_arrivals_s(args.chats, rate_per_s, np.random.default_rng([args.seed, number]))
                for arrangement in in_turn(chosen(args, "long"), number):
                    salt = 10 * number + ARRANGEMENTS["long"].index(arrangement)
                    texts = mixed(args.chats, np.random.default_rng([args.seed, number]), str(salt))
                    async with reached(arrangement, [server], args.router, slots=SLOTS) as (url,):
                        found = await long_pass(url, texts, at_s.tolist())
                    rows.append(Row({"arrangement": NAMES[arrangement], "round": number}, found))
                    told(rows[-1], args.rounds)
                    write(rows)
    return rows


def mixed(count: int, rng: np.random.Generator, salt: str) -> list[str]:
    """Prompts of the demo model, LONG_SHARE of them as long as the context, at random places after the first tenth."""
    words = Words(rng)
    texts = [words.prompt() for _ in range(count)]
    for place in rng.choice(np.arange(count // 10, count), round(LONG_SHARE * count), replace=False):
        texts[int(place)] = f"{salt} {place} {words.of(LONG_CHARS)}"
    return texts


async def capacity_per_s(server: Engine, count: int) -> float:
    """Requests a second of the mixture, with as many clients as slots."""
    texts, free = mixed(count, np.random.default_rng(0), "0"), asyncio.Semaphore(SLOTS)
    async with client.session_of(ANSWER_S_MAX, connections_kept=False) as session:

        async def one(text: str) -> None:
            async with free:
                long = len(text) >= LONG_CHARS
                await ask(session, server.url, [{"role": "user", "content": text}], 16 if long else None, 0.0)

        begun_s = time.perf_counter()
        await asyncio.gather(*[one(text) for text in texts])
        rate_per_s = count / (time.perf_counter() - begun_s)
    log(f"long: capacity {rate_per_s:.1f} requests/s")
    return rate_per_s


def chosen(args: argparse.Namespace, part: str) -> list[str]:
    return [name for name in ARRANGEMENTS[part] if name in (args.arrangements or ARRANGEMENTS[part])]


def told(row: Row, rounds: int) -> None:
    text = ", ".join(f"{name} {value:.3f}" for name, value in row.numbers.items())
    log(f"round {row['round'] + 1}/{rounds}: {row['arrangement']}: {text}")


# ---- results ------------------------------------------------------------------------------------------------------


def rows_of(part: str, passes: Sequence[Row]) -> list[Row]:
    """A row for each arrangement: medians over the rounds, and ratios to each other arrangement."""
    found = []
    for row in medians(passes, "round"):
        own = select(passes, arrangement=row["arrangement"])
        ratios = {}
        for other in {one["arrangement"]: None for one in passes if one["arrangement"] != row["arrangement"]}:
            theirs = {one["round"]: one for one in select(passes, arrangement=other)}
            both = [one for one in own if one["round"] in theirs]
            if both:
                ratios[other] = {name: ratio(both, theirs.values(), name, "round") for name in RATIOS[part]}
        found.append(replace(row, ratios=ratios))
    return found


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    results = read_parts(args.output)
    measures = {"shared": shared, "long": long}
    for part in args.parts:
        names = {
            "shared": ("conversations", "prefix_chars", "begin_per_s", "answer_tokens", "cache_blocks"),
            "long": ("chats", "load"),
        }[part]
        setting = {**day_and_machine(), **{name: getattr(args, name) for name in (*names, "seed")}}

        def write(passes: Sequence[Row], part: str = part, setting: Mapping[str, Any] = setting) -> None:
            shown = [row.record for row in rows_of(part, passes)]
            rounds = 1 + max(row["round"] for row in passes)
            results[part] = rounded(
                {**setting, "rounds": rounds, "rows": shown, "passes": [row.record for row in passes]}
            )
            write_json(args.output, results)

        await measures[part](args, write)
    return results


def print_report(results: Mapping[str, Any]) -> None:
    for part in PARTS:
        if part not in results:
            continue
        rows = [Row.of_record(record, ("arrangement",)) for record in results[part]["rows"]]
        show(f"{part}: {results[part]['rounds']} rounds", list(COLUMNS), cells(rows, COLUMNS))
        ours = [row for row in rows if row["arrangement"] in (NAMES[EVENTS], NAMES[BARE], NAMES[TOLD])]
        lines = [
            [row["arrangement"], other, *[f"{ratios[name]:.2f}" for name in RATIOS[part]]]
            for row in ours
            for other, ratios in row.ratios.items()
        ]
        show(None, ("arrangement", "to", *RATIOS[part]), lines, left=("to",))


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--vllm-python", help="interpreter of an environment with vLLM in it")
    add("--router", help="the executable vllm-router, for the part shared")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(default: all)")
    add("--arrangements", nargs="+", choices=NAMES, help="(default: those of the part)")
    add("--rounds", type=int, default=3, help="(%(default)s)")
    add("--conversations", type=int, default=30, help="of a pass of the part shared (%(default)s)")
    add("--prefix-chars", type=int, default=8_000, help="length of the shared prefixes (%(default)s)")
    add("--begin-per-s", type=float, default=0.7, help="conversations that begin in a second (%(default)s)")
    add("--answer-tokens", type=int, default=16, help="of each turn's answer (%(default)s)")
    add("--chats", type=int, default=300, help="requests of a pass of the part long (%(default)s)")
    add("--load", type=float, default=0.7, help="of the capacity, in the part long (%(default)s)")
    add(
        "--cache-blocks",
        type=int,
        default=CACHE_BLOCKS,
        help="of 32 tokens, of a server of the part shared (%(default)s)",
    )
    add("--seed", type=int, default=2030, help="draws texts, arrivals and pauses")
    add_report(parser, "write the results as JSON; other parts stay")
    args = parser.parse_args()
    if not args.report and "shared" in args.parts and set(POLICIES) & set(chosen(args, "shared")) and not args.router:
        parser.error("--router is needed for vllm-router; --arrangements leaves it out")
    measure_or_report(parser, args, measure, print_report, "vllm_python")
