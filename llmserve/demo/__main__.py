"""`python -m llmserve.demo`: serve a small local model, with static batching.

With the variable EMBEDDED_API_KEY, all requests below /v1 need this key.
"""

import argparse
import asyncio
import gc
import os
import re
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llmserve.demo import KEY_VARIABLE
from llmserve.errors import ConfigError
from llmserve.runtime.extras import need_embedded

if TYPE_CHECKING:  # importing torch takes seconds: check flags and port first
    from llmserve.demo.generation import LanguageModel

_DEMO_MODEL = Path(__file__).parent / "model"
_DEMO_MODEL_NAME = "llmserve-demo"
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main() -> None:
    """Parse the command line and serve. On an error, print one line and exit with status 1."""
    arguments = _parser().parse_args()
    for number in _STOP_SIGNALS:  # before the server listens, no request needs to finish
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        need_embedded()
        _check_model(arguments.model)
        # Bind the socket before the model is loaded, so that a port in use fails at once. The socket does not
        # listen yet, so that clients cannot connect before the model is loaded.
        sock = _bound_socket(arguments.host, arguments.port)
        model = _loaded_model(arguments)
        asyncio.run(_serve(model, arguments, sock))
    except (_StartError, ConfigError) as error:
        sys.exit(f"llmserve.demo: error: {error}")


class _StartError(Exception):
    """The engine cannot start. The message fits on one line."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m llmserve.demo", description=__doc__)
    add = parser.add_argument
    add("--model", default=str(_DEMO_MODEL), help="folder or Hugging Face id (default: the demo model)")
    add("--served-model-name", help="name in the API (default: the id, or the folder's name)")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8001, help="0: any free port, named in the ready line")
    add("--batch-size-max", type=_positive, default=8)
    add("--threads", type=_positive, help="CPU threads (default: 1 for a small model, else all cores)")
    add("--dtype", choices=("float32", "bfloat16", "auto"), default="float32")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: a static cache and captured graphs")
    add("--queue-max", type=_positive, default=1024, help="limit of waiting requests; above it, status 429")
    add("--gather-s", type=float, default=1.0, help="longest wait for a batch's missing members")
    add("--drain-s", type=float, default=3.0, help="longest wait for the running batch after SIGTERM")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def _bound_socket(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        return sock
    except (OSError, OverflowError) as error:
        raise _cannot_listen(host, port, error) from None


def _cannot_listen(host: str, port: int, error: Exception) -> _StartError:
    return _StartError(f"cannot listen on {host}:{port}: {error}")


def _check_model(name: str) -> None:
    """Refuse a name that is neither a folder nor has the form of a hub id, before slow imports."""
    if not Path(name).is_dir() and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise _StartError(f"the model folder {name} does not exist")


def _loaded_model(arguments: argparse.Namespace) -> "LanguageModel":
    from transformers.utils import logging

    from llmserve.demo.generation import LanguageModel, ModelLoadError

    logging.disable_progress_bar()  # the ready line should be the only line on the terminal
    try:
        model = LanguageModel.load(arguments.model, arguments.dtype, arguments.threads, arguments.device)
    except ModelLoadError as error:
        raise _StartError(str(error)) from None
    try:
        model.warm_up(arguments.batch_size_max)
    except Exception as error:  # for example an architecture without a key-value cache
        raise _StartError(f"cannot run the model {arguments.model}: {error!r}") from None
    gc.collect()
    gc.freeze()  # objects of torch and transformers live forever: later collections need not scan them
    return model


async def _serve(model: "LanguageModel", arguments: argparse.Namespace, sock: socket.socket) -> None:
    from llmserve.demo.server import EmbeddedEngine, serve

    name = arguments.served_model_name or _name_of(arguments.model)
    engine = EmbeddedEngine(
        model,
        name,
        batch_size_max=arguments.batch_size_max,
        queue_max=arguments.queue_max,
        gather_s=arguments.gather_s,
    )
    stop = asyncio.Event()
    for number in _STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    host, port = sock.getsockname()[:2]
    line = f"llmserve embedded engine: {name} is ready at http://{host}:{port}"
    try:
        await serve(
            engine,
            sock,
            stop,
            drain_s=arguments.drain_s,
            ready=lambda: print(line, flush=True),
            api_key=os.environ.get(KEY_VARIABLE),
        )
    except OSError as error:  # another process bound the same port with SO_REUSEADDR, and listened first
        raise _cannot_listen(host, port, error) from None


def _name_of(model: str) -> str:
    path = Path(model)
    if path.resolve() == _DEMO_MODEL.resolve():
        return _DEMO_MODEL_NAME
    return path.resolve().name if path.is_dir() else model


if __name__ == "__main__":
    main()
