"""How fast an exported length predictor is, and what it costs: loading, memory, single prompts, many prompts at once.

scripts/lab/questions/prediction/speed.py runs/predictor --output docs/results/predictor-speed.json

Prompts are random words, --tokens tokens each, and no prompt is used twice. Loading and memory are measured in fresh
processes that import and load the predictor. If the folder has an 8-bit and a 32-bit model, the two take turns.
"""

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kit import ROOT
from kit.arguments import exit_on, parser_of
from kit.results import write_json
from kit.tables import show

from predictor.errors import PredictorError
from predictor.network import INT8_FILE, Network, network_folders
from predictor.options import positive
from predictor.predict import LengthPredictor
from predictor.process import PredictorProcess
from predictor.prompt import Prompt

FRESH = """
import resource, sys, time
started_s = time.perf_counter()
from predictor.predict import LengthPredictor
LengthPredictor.load(sys.argv[1])
print(time.perf_counter() - started_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def main() -> None:
    args = parse_args()
    with exit_on(PredictorError):
        result = asyncio.run(measure(args))
    print_table(result)
    write_json(args.output, result)


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("predictor", type=Path, help="a predictor's folder")
    add("--tokens", type=positive, default=64, help="tokens of each prompt (%(default)s)")
    add("--prompts", type=positive, default=300, help="prompts timed one by one, and then at once (%(default)s)")
    add("--starts", type=positive, default=5, help="fresh processes (%(default)s)")
    add("--threads", type=positive, default=1, help="threads of the model (%(default)s)")
    add("--seed", type=int, default=0)
    add("--output", type=Path, metavar="FILE", help="JSON")
    return parser.parse_args()


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(args.seed)
    models = {"32 bits": LengthPredictor.load(args.predictor, args.threads, bits=32)}
    if all((part / INT8_FILE).is_file() for part in network_folders(args.predictor)):
        models = {"8 bits": LengthPredictor.load(args.predictor, args.threads, bits=8), **models}
    prompts = Words(next(iter(models.values())).networks[0], args.tokens, draw)
    for model in models.values():
        model.predict(prompts.draw(10))
    one_by_one = alternate(models, prompts, args.prompts)
    at_once = {name: args.prompts / timed(model, prompts.draw(args.prompts)) for name, model in models.items()}
    return {
        "tokens": args.tokens,
        "threads": args.threads,
        "start": starts(args.predictor, args.starts),
        "models": {name: speeds(times_s, at_once[name]) for name, times_s in one_by_one.items()},
        "process": await through_the_process(args, prompts),
    }


class Words:
    """Prompts of random words; a word is one token."""

    def __init__(self, network: Network, tokens: int, draw: random.Random) -> None:
        vocabulary = network.tokenizer.get_vocab()
        self._words = sorted(word for word in vocabulary if word.isascii() and word.isalpha())
        self._draw = draw
        empty = len(network.encoding.encode(network.tokenizer, [Prompt("")])[0])
        self._count = max(1, tokens - empty)

    def draw(self, count: int) -> list[Prompt]:
        return [Prompt(" ".join(self._draw.choices(self._words, k=self._count))) for _ in range(count)]


def alternate(models: dict[str, LengthPredictor], prompts: Words, count: int) -> dict[str, list[float]]:
    """Seconds of each prompt alone, by model. The models take turns."""
    times_s: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(count):
        for name, model in models.items():
            times_s[name].append(timed(model, prompts.draw(1)))
    return times_s


def timed(model: LengthPredictor, prompts: list[Prompt]) -> float:
    started_s = time.perf_counter()
    model.predict(prompts)
    return time.perf_counter() - started_s


def starts(folder: Path, count: int) -> dict[str, float]:
    """Medians of loading time and memory over fresh processes."""
    command = [sys.executable, "-c", FRESH, str(folder.resolve())]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT) for _ in range(count)]
    seconds, mebibytes = zip(*[map(float, run.stdout.split()) for run in runs], strict=True)
    return {"load_s": round(statistics.median(seconds), 2), "memory_mib": round(statistics.median(mebibytes))}


async def through_the_process(args: argparse.Namespace, prompts: Words) -> dict[str, float]:
    """Speeds of the predictor process that the server uses: one prompt at a time, then all prompts at once."""
    async with PredictorProcess(args.predictor, threads=args.threads, waiting_max=args.prompts) as process:
        times_s = []
        for prompt in prompts.draw(args.prompts):
            started_s = time.perf_counter()
            await process.predict(prompt)
            times_s.append(time.perf_counter() - started_s)
        started_s = time.perf_counter()
        await asyncio.gather(*map(process.predict, prompts.draw(args.prompts)))
        all_s = time.perf_counter() - started_s
    return speeds(times_s, args.prompts / all_s)


def speeds(times_s: list[float], prompts_per_s: float) -> dict[str, float]:
    """times_s : of prompts one by one.  prompts_per_s : of all prompts at once"""
    return {
        "prompt_ms_p50": round(1e3 * statistics.median(times_s), 2),
        "prompt_ms_p95": round(1e3 * statistics.quantiles(times_s, n=20)[-1], 2),
        "prompts_per_s": round(prompts_per_s),
    }


def print_table(result: dict[str, Any]) -> None:
    start = result["start"]
    rows = {**result["models"], "through its process": result["process"]}
    show(
        f"Prompts of {result['tokens']} tokens, {result['threads']} thread(s)",
        ("", "one prompt, ms p50", "p95", "prompts/s, many at once"),
        [[name, *map(str, row.values())] for name, row in rows.items()],
        caption=f"a fresh process is ready after {start['load_s']} s and takes {start['memory_mib']} MiB",
    )
