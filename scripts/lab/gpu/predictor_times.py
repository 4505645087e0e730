"""`python -m gpu.predictor_times`: how fast an exported predictor is, on the CPU and on the GPU."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

import predictor
from gpu.onnx_on_torch import OnnxOnTorch
from predictor.network import GPU, MODEL_FILE, network_folders
from predictor.predict import LengthPredictor
from predictor.prompt import Prompt

WORDS = [
    "a",
    "prompt",
    "asks",
    "the",
    "model",
    "for",
    "a",
    "story",
    "about",
    "ships",
    "and",
    "stars",
    "or",
    "for",
    "code",
    "that",
    "sorts",
    "numbers",
    "quickly",
]
PROMPT_WORDS = 40
BATCH = 64


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gpu.predictor_times", description=__doc__)
    parser.add_argument("--predictor", type=Path, default=predictor.DEMO, help="an exported folder")
    parser.add_argument("--prompts", type=int, required=True)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    rng = random.Random(0)
    prompts = [Prompt(" ".join(rng.choices(WORDS, k=PROMPT_WORDS)) + f" {number}") for number in range(args.prompts)]
    on_cpu = LengthPredictor.load(args.predictor, bits=32)
    on_gpu = LengthPredictor.load(args.predictor, bits=32)
    for network, folder in zip(on_gpu.networks, network_folders(args.predictor), strict=True):
        network.session = OnnxOnTorch(folder / MODEL_FILE, args.device)
    expected, seen = on_cpu.predict(prompts[:BATCH]), on_gpu.predict(prompts[:BATCH])
    result = {
        "onnxruntime_on_gpu": GPU in onnxruntime.get_available_providers(),
        "difference": float(np.max(np.abs(seen / expected - 1))),
        "CPU, 8 bits, one thread": _times(LengthPredictor.load(args.predictor, bits=8), prompts),
        "CPU, 32 bits, one thread": _times(on_cpu, prompts),
        f"{args.device}, torch": _times(on_gpu, prompts),
    }
    if result["onnxruntime_on_gpu"]:
        result["GPU, ONNX Runtime"] = _times(LengthPredictor.load(args.predictor), prompts)
    print(json.dumps(result))


def _times(predictor: LengthPredictor, prompts: list[Prompt]) -> dict[str, Any]:
    predictor.predict(prompts[:BATCH], BATCH)
    alone_s = []
    for prompt in prompts[:100]:
        began_s = time.perf_counter()
        predictor.predict([prompt])
        alone_s.append(time.perf_counter() - began_s)
    began_s = time.perf_counter()
    predictor.predict(prompts, BATCH)
    return {"alone_s": statistics.median(alone_s), "prompts_per_s": len(prompts) / (time.perf_counter() - began_s)}


if __name__ == "__main__":
    main()
