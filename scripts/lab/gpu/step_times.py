"""`python -m gpu.step_times`: device seconds of a prefill, and of a step by rows and context beside its floor.

The floor is the time to read the weights and the cached keys and values once, at the bandwidth of a copy on the same
device. Steps run back to back, so that the device never waits for the host. Each repetition has other random inputs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpu.models import fused_llama
from gpu.noted import Noted
from gpu.shapes import SHAPES, Shape
from gpu.timing import copy_bytes_per_s, median_s
from llmserve.demo import static_batch
from llmserve.demo.static_batch import StaticDecoder, Step

STEPS = 8  # back to back, in each repetition
REPEATS, PREFILL_REPEATS = 9, 5  # of which the median counts
PREFILL_TOKENS = 128  # of each prompt


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gpu.step_times", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--rows", type=_numbers, required=True)
    parser.add_argument("--contexts", type=_numbers, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-graphs", action="store_true")
    args = parser.parse_args()
    noted = Noted()
    copied = copy_bytes_per_s(torch.device(args.device))
    model = fused_llama(args.shape, args.device, compiles=not args.no_compile)
    capture = static_batch.uncaptured if args.no_graphs else None
    with torch.inference_mode():
        measured = measure(model, SHAPES[args.shape], args.rows, args.contexts, copied, noted, capture)
    print(json.dumps({"copy_bytes_per_s": copied, "prefill_tokens": PREFILL_TOKENS, **measured, "notes": noted.notes}))


def measure(
    model: Any,
    shape: Shape,
    rows: list[int],
    contexts: list[int],
    bytes_per_s: float,
    noted: Noted,
    capture: Callable[[Step], Step] | None = None,
) -> dict[str, Any]:
    """Prefills and steps. Those without enough memory are left out and noted; smaller ones follow."""
    steps, prefills = [], []
    decoder = StaticDecoder(model, capture)
    cases = sorted(((count, context) for count in rows for context in contexts), key=_places, reverse=True)
    for count, context in cases:  # the largest first: its memory is enough for all others
        try:
            steps.append(_step(decoder, shape, count, context, bytes_per_s))
            continue
        except torch.OutOfMemoryError:
            noted.add(f"out of memory in a step of {count} sequences with context {context}")
        _free()
    for count in sorted(rows, reverse=True):
        try:
            prefills.append(_prefill(decoder, shape, count))
            continue
        except torch.OutOfMemoryError:
            noted.add(f"out of memory in a prefill of {count} prompts")
        _free()
    return {"steps": sorted(steps, key=_case), "prefills": sorted(prefills, key=lambda prefill: prefill["rows"])}


def _places(case: tuple[int, int]) -> int:
    return case[0] * case[1]


def _case(step: dict[str, Any]) -> tuple[int, int]:
    return step["rows"], step["context"]


def _step(decoder: StaticDecoder, shape: Shape, rows: int, context: int, bytes_per_s: float) -> dict[str, Any]:
    batch = decoder.batch(_prompts(shape, rows, 1), context)
    batch.prefill()  # allocates the cache
    decoder.randomise()
    inputs = list(_inputs(decoder, shape, rows, REPEATS))
    batch.go_to(context - 1)
    batch.step(inputs[0])  # captures the graph

    def work(number: int) -> None:
        for _ in range(STEPS):
            batch.go_to(context - 1)
            batch.step(inputs[number])

    work(0)  # warms up
    seconds, spread = median_s(work, decoder.device, REPEATS)
    floor_s = shape.step_bytes(rows, context, decoder.model.dtype.itemsize) / bytes_per_s
    return {
        **{"rows": rows, "context": context, "step_s": seconds / STEPS, "spread": spread},
        **{"floor_s": floor_s, "share_of_floor": floor_s * STEPS / seconds},
    }


def _prefill(decoder: StaticDecoder, shape: Shape, rows: int) -> dict[str, Any]:
    batches = [decoder.batch(_prompts(shape, rows, PREFILL_TOKENS), 1) for _ in range(PREFILL_REPEATS)]
    batches[0].prefill()  # warms up
    seconds, spread = median_s(lambda number: batches[number].prefill(), decoder.device, PREFILL_REPEATS)
    return {"rows": rows, "prefill_s": seconds, "spread": spread}


def _prompts(shape: Shape, rows: int, tokens: int) -> list[list[int]]:
    return torch.randint(0, shape.vocabulary, (rows, tokens)).tolist()  # type: ignore[no-any-return]


def _inputs(decoder: StaticDecoder, shape: Shape, rows: int, count: int) -> Iterator[torch.Tensor]:
    for _ in range(count):
        yield torch.randint(0, shape.vocabulary, (rows,), device=decoder.device)


def _free() -> None:
    """After the exception is gone, and with it the frames that held tensors."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
