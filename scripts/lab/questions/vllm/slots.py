"""The slots that llmserve learns before the real vLLM, from its metrics and from its answers alone.

    python scripts/lab vllm.slots --vllm-python .venv-vllm/bin/python --output docs/results/vllm-slots.json
    python scripts/lab vllm.slots --report --output docs/results/vllm-slots.json

vLLM serves the demo model with each of several --max-num-seqs. Before each, `llmserve serve --engine URL`, without
another flag, answers 20 requests that come at once, and then 180 others; how many slots does it count after each? One
server reads vLLM's metrics (it is told), and one is told nothing. Answers come as streams, or as a whole.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import product
from typing import Any

from kit.arguments import numbers, parser_of, whole
from kit.client import get_text
from kit.progress import log
from kit.results import day_and_machine, read_parts, write_json
from kit.rows import Row, select
from kit.servers import front_end, vllm
from kit.studies import add_report, measure_or_report
from kit.tables import markdown
from make import demo_corpus

from questions.llama.run import slots_after
from questions.vllm.passes import all_at_once, send, session_of

COUNTED_AFTER = (20, 200)
ANSWERS = ("streams", "whole")
CASE = ("slots", "answers", "round")
WARM_UP_REQUESTS = 32


async def counted(url: str, prompts: Sequence[str], *, told: bool, answers: str) -> list[float]:
    """The slots that a new server counts after each number of COUNTED_AFTER."""
    async with front_end("slots", "--engine", url, "--log-level", "warning", told=told) as front:
        begins = (0, *COUNTED_AFTER)
        return [
            await slots_after(front.url, prompts[begin:end], whole=answers == "whole")
            for begin, end in zip(begins, COUNTED_AFTER, strict=False)
        ]


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    prompts = [e.prompt for e in demo_corpus.examples(COUNTED_AFTER[-1], seed=args.seed, held_out=True)]
    rows, version = [], ""
    for slots in args.slots:
        async with vllm(args.vllm_python, f"vLLM, {slots} slots", slots) as engine:
            async with session_of() as session:
                version = json.loads(await get_text(session, f"{engine.url}/version"))["version"]
            warm_up = prompts[:WARM_UP_REQUESTS]  # the first answers of a fresh server are slow
            await send([engine.url] * len(warm_up), all_at_once(warm_up))
            for number, answers in product(range(args.rounds), ANSWERS):
                counts: dict[str, float] = {}
                for name, told in (("told", True), ("untold", False)):
                    found = await counted(engine.url, prompts, told=told, answers=answers)
                    counts |= {f"{name}_{after}": count for after, count in zip(COUNTED_AFTER, found, strict=True)}
                rows.append(Row(dict(zip(CASE, (slots, answers, number), strict=True)), counts))
                log(f"{slots} slots, {answers}, {number + 1}/{args.rounds}: {counts}")
    setting = {**day_and_machine(), "vllm": version, "rounds": args.rounds, "seed": args.seed}
    earlier = [Row.of_record(record, CASE) for record in read_parts(args.output).get("rows", ())]
    rows += [row for row in earlier if row["slots"] not in args.slots]
    results = {**setting, "rows": [row.record for row in sorted(rows, key=lambda row: row["slots"])]}
    write_json(args.output, results)
    return results


def print_report(results: dict[str, Any]) -> None:
    """The counts of the rounds, one beside the other."""
    rows = [Row.of_record(record, CASE) for record in results["rows"]]
    names = [f"{name}_{after}" for name in ("told", "untold") for after in COUNTED_AFTER]
    head = ["max-num-seqs", "answers", "metrics read: after 20", "after 200", "told nothing: after 20", "after 200"]
    lines = []
    for slots, answers in dict.fromkeys((row["slots"], row["answers"]) for row in rows):
        own = select(rows, slots=slots, answers=answers)
        lines.append([str(slots), answers, *(", ".join(f"{row[name]:.0f}" for row in own) for name in names)])
    print(markdown(head, lines))


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--vllm-python", help="interpreter of an environment with vLLM in it")
    add("--slots", type=numbers, default=(4, 8, 16), help="numbers of slots (default: 4,8,16)")
    add("--rounds", type=whole(1), default=3)
    add("--seed", type=int, default=2031, help="draws the prompts")
    add_report(parser, "write the results as JSON; other numbers of slots stay")
    measure_or_report(parser, parser.parse_args(), measure, print_report, "vllm_python")
