"""`python -m gpu.continuous`: the same answers by transformers' own continuous batching, whose slots refill."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig

from gpu.models import PROMPT_WORDS, SHAPES, random_llama

REHEARSED = {"num_blocks": 64, "max_batch_tokens": 64, "block_size": 16}  # a CPU does not say what memory it has
SILENCE_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gpu.continuous", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--lengths", type=Path, required=True, help="output tokens, one a line")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    lengths = [int(line) for line in args.lengths.read_text().split()]
    model = random_llama(args.shape, args.device, fused=False)  # it captures graphs and fuses by itself
    model.set_attn_implementation("sdpa")
    memory: dict[str, Any] = REHEARSED if args.device == "cpu" else {}
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(
            max_requests_per_batch=args.slots, allow_block_sharing=False, **memory
        ),
    )
    manager.start()
    try:
        _answered(manager, [max(lengths)] * args.slots)  # compiles and captures what it needs
        began_s = time.perf_counter()
        tokens = _answered(manager, lengths)
        seconds = time.perf_counter() - began_s
    finally:
        manager.stop(block=True)
    print(
        json.dumps(
            {"slots": args.slots, "requests": len(lengths), "seconds": seconds, "tokens_per_s": tokens / seconds}
        )
    )


def _answered(manager: Any, lengths: list[int]) -> int:
    """Output tokens of all answers. Raises RuntimeError when one does not come, or is too short."""
    prompts = [[1 + number % 1000, *[1] * (PROMPT_WORDS - 1)] for number in range(len(lengths))]
    asked = {
        manager.add_request(prompt, max_new_tokens=length): length
        for prompt, length in zip(prompts, lengths, strict=True)
    }
    tokens = 0
    while asked:
        result = manager.get_result(timeout=SILENCE_S)
        if result is None:
            raise RuntimeError(f"{len(asked)} of {len(lengths)} answers did not come")
        if not result.is_finished():
            continue
        length = asked.pop(result.request_id)
        if len(result.generated_tokens) != length:
            raise RuntimeError(f"an answer of {length} tokens has {len(result.generated_tokens)}: {result.error}")
        tokens += length
    return tokens


if __name__ == "__main__":
    main()
