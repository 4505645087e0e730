"""`python -m gpu.engine`: the embedded engine with a Llama of random weights, for a campaign.

Static batches in captured graphs; with --refill transformers' continuous batching, whose slots refill. --batch-size-max
that does not fit into memory is halved until it does. The file --notes has a JSON list of what is not as it should be,
and FILE.size the largest batch.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from gpu.models import ObedientModel, fused_llama, tokenizer
from gpu.noted import Noted
from gpu.refill import RefillEngine, refilling_model, started_manager
from gpu.shapes import SHAPES
from llmserve.demo import static_batch
from llmserve.demo.server import EmbeddedEngine, serve

DRAIN_S = 1.0
QUEUE_MAX = 1 << 16  # a campaign measures the engine, not its refusals


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gpu.engine", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch-size-max", type=int, required=True, help="of a static batch, or the slots")
    parser.add_argument("--columns", type=int, required=True, help="of the longest prompt with its answer")
    parser.add_argument("--refill", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--notes", type=Path, required=True, metavar="FILE")
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    noted = Noted(args.notes)
    engine, size = (_refill if args.refill else _static)(args, noted)
    size_file(args.notes).write_text(str(size), encoding="utf-8")
    asyncio.run(_serve(engine, args.port))
    sys.stdout.flush()
    os._exit(0)  # transformers' thread may be in the middle of a step


def size_file(notes: Path) -> Path:
    """Where the engine writes its largest batch."""
    return notes.with_suffix(".size")


def _static(args: argparse.Namespace, noted: Noted) -> tuple[EmbeddedEngine, int]:
    model = loaded(args.shape, args.device, compiles=not args.no_compile, captures=not args.no_graphs)
    model.context_tokens = args.columns
    size = warmed_up(model, args.batch_size_max, noted)
    return EmbeddedEngine(model, args.shape, batch_size_max=size, queue_max=QUEUE_MAX), size


def _refill(args: argparse.Namespace, noted: Noted) -> tuple[EmbeddedEngine, int]:
    network = refilling_model(args.shape, args.device)
    model = ObedientModel(tokenizer(args.shape), network, static=False)
    model.context_tokens = args.columns
    graphs = not (args.no_compile or args.no_graphs)  # it compiles nothing
    manager = started_manager(network, args.batch_size_max, args.columns, graphs=graphs)
    return RefillEngine(model, args.shape, manager, queue_max=QUEUE_MAX), args.batch_size_max


def loaded(shape: str, device: str, *, compiles: bool = True, captures: bool = True) -> ObedientModel:
    """The model with its tokenizer, in batches of fixed tensors on a CPU, too. captures : steps as graphs, on a GPU"""
    network = fused_llama(shape, device, compiles=compiles)
    return ObedientModel(tokenizer(shape), network, static=True, capture=None if captures else static_batch.uncaptured)


def warmed_up(model: Any, size: int, noted: Noted) -> int:
    """The largest batch that fits into memory, of at most `size` rows. Raises torch.OutOfMemoryError if none does."""
    while True:
        try:
            model.warm_up(size)
            return size
        except torch.OutOfMemoryError:
            if size == 1:
                raise
        noted.add(f"out of memory at batches of {size}: the largest batch has {size // 2}")
        size //= 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


async def _serve(engine: EmbeddedEngine, port: int) -> None:
    sock = socket.create_server(("127.0.0.1", port))
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await serve(engine, sock, stop, drain_s=DRAIN_S, ready=lambda: print("ready", flush=True))


if __name__ == "__main__":
    main()
