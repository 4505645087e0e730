"""`python -m gpu.engine`: the embedded engine with a Llama of random weights, for a campaign."""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket

from gpu.models import SHAPES, load
from llmserve.engines.embedded.server import EmbeddedEngine, serve

DRAIN_S = 1.0
QUEUE_MAX = 1 << 16  # a campaign measures the engine, not its refusals


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gpu.engine", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch-size-max", type=int, default=8)
    parser.add_argument("--columns", type=int, required=True, help="of the longest prompt with its answer")
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    model = load(args.shape, args.device)
    model.context_tokens = args.columns
    model.warm_up(args.batch_size_max)
    engine = EmbeddedEngine(model, args.shape, batch_size_max=args.batch_size_max, queue_max=QUEUE_MAX)
    asyncio.run(_serve(engine, args.port))


async def _serve(engine: EmbeddedEngine, port: int) -> None:
    sock = socket.create_server(("127.0.0.1", port))
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await serve(engine, sock, stop, drain_s=DRAIN_S, ready=lambda: print("ready", flush=True))


if __name__ == "__main__":
    main()
