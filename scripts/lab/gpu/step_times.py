"""`python -m gpu.step_times`: seconds of a prefill, and of a step by rows and context beside the floor of memory."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpu.models import H200_BYTES_PER_S, SHAPES, Shape, random_llama
from llmserve.engines.embedded.static_batch import StaticDecoder

REPEATS = 12  # of each step, of which the median counts
COPY_BYTES = 4 << 30
PREFILL_TOKENS = 128  # of each prompt


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gpu.step_times", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--rows", type=_numbers, required=True)
    parser.add_argument("--contexts", type=_numbers, required=True)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    result = {
        "copy_bytes_per_s": _copy_bytes_per_s(args.device),
        "data_sheet_bytes_per_s": H200_BYTES_PER_S,
        "steps": [],
    }
    for fused in (False, True):
        model = random_llama(args.shape, args.device, fused=fused)
        with torch.inference_mode():
            result["steps"] += [{"fused": fused, **row} for row in _measured(model, shape, args.rows, args.contexts)]
        del model
    print(json.dumps(result))


def _measured(model: Any, shape: Shape, rows: list[int], contexts: list[int]) -> Iterator[dict[str, Any]]:
    decoder = StaticDecoder(model)
    for count in sorted(rows, reverse=True):  # the largest makes room for all
        prompts = [[1] * PREFILL_TOKENS] * count
        decoder.batch(prompts, max(contexts)).prefill()
        prefill_s = _median_s(decoder.batch(prompts, max(contexts)).prefill, decoder.device, 3)
        decoder.randomise()
        for context in contexts:
            batch = decoder.batch([[1]] * count, max(contexts))
            batch.go_to(context - 1)
            ids = torch.ones(count, dtype=torch.int64, device=decoder.device)
            batch.step(ids)  # captures it
            step_s = _median_s(lambda: _at(batch, context - 1, ids), decoder.device, REPEATS)  # noqa: B023
            floor_s = shape.step_bytes(count, context) / H200_BYTES_PER_S
            yield {
                **{"rows": count, "context": context, "step_s": step_s, "floor_s": floor_s},
                **{"share_of_floor": floor_s / step_s, "prefill_s": prefill_s},
            }


def _at(batch: Any, column: int, ids: torch.Tensor) -> None:
    batch.go_to(column)
    batch.step(ids)


def _median_s(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        _wait(device)
        began_s = time.perf_counter()
        run()
        _wait(device)
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds)


def _copy_bytes_per_s(device: str) -> float:
    """Of a copy in the device's memory, read and written bytes both counted."""
    size = COPY_BYTES if device != "cpu" else 64 << 20
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * size / _median_s(lambda: target.copy_(source), source.device, 5)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.synchronize(device)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
