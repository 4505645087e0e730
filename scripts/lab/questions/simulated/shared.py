"""Chats whose prompts begin alike, before one simulated GPU: how full is its cache?

    python scripts/lab simulated.shared --output docs/results/simulated-shared.json

The engine has the costs of the GPU of `simulated.long`, and a cache of 215,000 tokens. Conversations of 8 turns begin
with one of 5 system prompts of some 8,000 tokens; each turn adds some 250 tokens and an answer of 200. The first eighth
of the requests is not counted. Ways:

    whole     llmserve as it is, but each running request counts with its whole prompt
    llmserve  as it is: what running requests have in common counts once
    no bound  llmserve does not know the cache's size, so that the engine itself lets requests wait, or preempts them
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from kit.arguments import parser_of
from kit.results import rounded, write_json
from kit.rows import Row, medians
from kit.tables import cells, show

from llmserve.scheduling.engines import EngineState
from questions.simulated import warm

WHOLE, OURS, UNBOUND = WAYS = ("whole", "llmserve", "no bound")
TALK = replace(warm.TALKS["GPU"], prefixes=5, rates_per_s=(0.7, 1.0))
COLUMNS = {name: column for name, column in warm.COLUMNS.items() if name != "engines"}
COLUMNS |= {"latency mean (s)": ("latency_s_mean", ".1f"), "preempted": ("preemptions", ".0f")}
RATIOS = (*warm.RATIOS, "latency_s_mean")


def passed(way: str, conversations: int, begin_per_s: float, seed: int) -> dict[str, float]:
    """The figures of a pass."""
    with ExitStack() as patches:
        if way == WHOLE:
            patches.enter_context(patch.object(EngineState, "_in_common", lambda *_: 0))
        return warm.passed(TALK, warm.OURS, conversations, begin_per_s, seed, engines=1, told=way != UNBOUND)


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--conversations", type=int, default=100, help="of each pass (%(default)s)")
    add("--seeds", type=int, default=4, help="passes of each way (%(default)s)")
    add("--first-seed", type=int, default=101, help="(%(default)s)")
    add("--output", type=Path, help="write the results as JSON")
    args = parser.parse_args()
    passes = [
        Row({"begin_per_s": rate, "way": way, "seed": seed}, passed(way, args.conversations, rate, seed))
        for rate in TALK.rates_per_s
        for seed in range(args.first_seed, args.first_seed + args.seeds)
        for way in WAYS
    ]
    rows = medians(passes, "seed")
    show("chats whose prompts begin alike", list(COLUMNS), cells(rows, COLUMNS))
    ratios = []
    for rate in TALK.rates_per_s:
        ratios += warm.ratios_to(passes, (WHOLE, UNBOUND), RATIOS, begin_per_s=rate)
    lines = [[f"{one['begin_per_s']:.1f}", one["to"], *[f"{one[name]:.2f}" for name in RATIOS]] for one in ratios]
    show("llmserve", ("conversations/s", "to", *RATIOS), lines, left=("to",))
    setting = {name: getattr(args, name) for name in ("conversations", "seeds", "first_seed")}
    records = {"rows": [row.record for row in rows], "passes": [row.record for row in passes]}
    write_json(args.output, rounded({**setting, "ratios": ratios, **records}))


if __name__ == "__main__":
    main()
