"""How many tokens of a prompt are expected in an engine's cache, beside those that the real vLLM tells.

    python scripts/lab residency.error --vllm-python .venv-vllm/bin/python --output docs/results/residency-error.json

One vLLM server on the CPU (the demo model, prefix caching, KV events) gets conversations that share prefixes, more than
its cache holds: through llmserve with KV events, and through llmserve without, in turn. llmserve writes a journal. A
fresh scheduler gets the journal's events again, and what its index expects at the start of each request is compared
with the hits that vLLM has told at the end.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from kit.arguments import parser_of
from kit.progress import log
from kit.results import day_and_machine, in_turn, rounded, write_json
from kit.rows import Row, medians
from kit.studies import run
from kit.tables import cells, show

from llmserve.live import journal
from llmserve.request import Request
from llmserve.scheduling.messages import RequestEnded
from questions.residency.arrangements import BARE, EVENTS, NAMES, engines, reached
from questions.residency.conversations import Shape, conversations
from questions.residency.run import SLOTS, shared_pass

NEAR_TOKENS = 128.0  # a block of a prompt
COLUMNS = {
    "arrangement": ("arrangement", ""),
    "answers": ("answers", ".0f"),
    "hit rate told": ("told", ".3f"),
    "expected": ("expected", ".3f"),
    "mean error, of the prompt": ("error", ".3f"),
    "within a block": ("near", ".3f"),
}


def errors(path: Path) -> dict[str, float]:
    """Of the answers in a journal that tell their hits: what was told and expected, each of all prompts' tokens; the
    mean difference, likewise; and the share of answers whose difference is less than a block.
    """
    header, steps = journal.read(path)
    scheduler = header.scheduler()
    index, sent = scheduler.group.pool.residency, scheduler.group.pool.residency.sent
    started: dict[int, tuple[Request, float]] = {}

    def note(engine: str, request: Request) -> float:
        expected = sent(engine, request)
        started[request.id] = request, expected
        return expected

    index.sent = note  # type: ignore[method-assign]
    found = []
    for step in steps:
        event = step.event
        if isinstance(event, RequestEnded) and event.cached_tokens is not None and event.request_id in started:
            request, expected = started[event.request_id]
            found.append((request.prompt_tokens, expected, event.cached_tokens))
        scheduler.handle(event, step.now_s)
    prompts, expected, told = np.array(found).T
    differences, whole = abs(expected - told), prompts.sum()
    return {
        "answers": float(len(found)),
        "told": told.sum() / whole,
        "expected": expected.sum() / whole,
        "error": differences.sum() / whole,
        "near": float((differences < NEAR_TOKENS).mean()),
    }


async def measure(args: argparse.Namespace) -> None:
    shape = Shape(args.conversations, prefixes=args.prefixes, begin_per_s=args.begin_per_s, answer_tokens=16)
    passes: list[Row] = []
    async with engines(args.vllm_python, 1, SLOTS, args.cache_blocks) as servers:
        for number in range(args.rounds):
            for arrangement in in_turn([EVENTS, BARE], number):
                load = conversations(shape, np.random.default_rng([args.seed, number]), f"{number} {arrangement}")
                with TemporaryDirectory() as folder:
                    path = Path(folder) / "journal"
                    async with reached(arrangement, servers, "", "--journal", str(path)) as urls:
                        await shared_pass(urls, load)
                    row = Row({"arrangement": NAMES[arrangement], "round": number}, errors(path))
                passes.append(row)
                log(f"{row['arrangement']}: " + ", ".join(f"{name} {value:.3f}" for name, value in row.numbers.items()))
    rows = medians(passes, "round")
    show("expected and told hits", list(COLUMNS), cells(rows, COLUMNS))
    names = ("conversations", "prefixes", "begin_per_s", "cache_blocks", "rounds", "seed")
    setting = {**day_and_machine(), **{name: getattr(args, name) for name in names}}
    records = {"rows": [row.record for row in rows], "passes": [row.record for row in passes]}
    write_json(args.output, rounded({**setting, **records}))


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--vllm-python", required=True, help="interpreter of an environment with vLLM in it")
    add("--rounds", type=int, default=3, help="(%(default)s)")
    add("--conversations", type=int, default=16, help="of 8 turns, in each pass (%(default)s)")
    add("--prefixes", type=int, default=6, help="that they share (%(default)s)")
    add("--begin-per-s", type=float, default=0.3, help="conversations that begin in a second (%(default)s)")
    add("--cache-blocks", type=int, default=400, help="of 32 tokens (%(default)s)")
    add("--seed", type=int, default=2031, help="draws texts and pauses")
    add("--output", type=Path, help="write the results as JSON")
    run(measure(parser.parse_args()))
