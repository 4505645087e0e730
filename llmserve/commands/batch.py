"""Run a file of requests on an engine, without a server; or list, show and cancel the batches of a server.

    llmserve batch run in.jsonl out.jsonl --engine http://127.0.0.1:8001    goes on where an earlier run has ended
    llmserve batch list --url http://127.0.0.1:8000
    llmserve batch show batch_123 --url http://127.0.0.1:8000
    llmserve batch cancel batch_123 --url http://127.0.0.1:8000

The files have OpenAI's formats of a batch. `run` takes every setting of `llmserve serve`, writes lines that fail to
out.jsonl.errors, and returns 1 if some did. A second run goes on where the first was stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from llmserve.commands import asking, serve
from llmserve.errors import ConfigError, NoAnswer
from llmserve.jobs.run.local_file import read_input
from llmserve.settings import load as configuration
from llmserve.settings.tree import Config

if TYPE_CHECKING:
    from llmserve.live.cluster import LiveCluster

PLAIN_EVERY_S = 10.0  # between lines of progress without a terminal
MODELS_SHOWN = 5
COLUMNS = ("batch", "status", "window", "done", "failed", "lines")  # of a list of batches
WIDTH_MAX = 1000  # of the list
INTERRUPTED = 130  # a shell's exit status after Ctrl-C


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("run", "list", "show", "cancel"), help="what to do")
    parser.add_argument("names", nargs="*", metavar="NAME", help="run: INPUT OUTPUT; show and cancel: a batch's ID")
    parser.add_argument("--errors", type=Path, metavar="FILE", help="run: file of failed lines (OUTPUT.errors)")
    asking.add_server(parser, what="list, show, cancel: ", own_flags=False)
    serve.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    wanted = {"run": ["INPUT", "OUTPUT"], "list": [], "show": ["ID"], "cancel": ["ID"]}[args.action]
    if len(args.names) != len(wanted):
        raise ConfigError(f"batch {args.action} needs {' '.join(wanted) or 'no names'}, not {len(args.names)} names")
    if args.action == "run":
        return run(args, *map(Path, args.names))
    if args.action == "list":
        return show_all(args)
    path = f"/v1/batches/{quote(args.names[0], safe='')}"
    answer = ask(args, path + "/cancel", method="POST") if args.action == "cancel" else ask(args, path)
    print(msgspec.json.format(answer, indent=2).decode())
    return 0


# ---- a file -----------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace, path: Path, output: Path) -> int:
    names = {name for struct in configuration.sections(Config).values() for name in struct.__struct_fields__}
    flags = {name: value for name, value in vars(args).items() if name in names}
    file = args.config or os.environ.get(f"{configuration.ENVIRONMENT_PREFIX}CONFIG")
    config, origin = configuration.load(Config, flags, os.environ, file)
    if args.show_config:
        print(config.shown(origin))
        return 0
    logging.basicConfig(level=config.server.log_level.upper(), format="%(levelname)s %(message)s", stream=sys.stderr)
    lines = read_input(path)
    errors = args.errors or output.with_name(output.name + ".errors")
    try:
        return asyncio.run(run_file(config, path, lines, output, errors))
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return INTERRUPTED


async def run_file(config: Config, path: Path, lines: Any, output: Path, errors: Path) -> int:
    """Run the lines of a file that have no result yet. Returns the exit status."""
    from llmserve.jobs.run.local_run import LocalRun
    from llmserve.live.cluster import LiveCluster
    from llmserve.part import Server
    from llmserve.server.parts import DRIVER
    from llmserve.server.serving import checked, opened

    config = checked(config, DRIVER)
    local_run = LocalRun(path, lines, output, errors)
    print(f"{local_run.total} lines, {local_run.done} of them done before", file=sys.stderr)
    if local_run.done < local_run.total:
        server = Server(config)
        async with opened(DRIVER, server):
            cluster = server.get(LiveCluster)
            cluster.start()
            with progress(local_run, cluster):
                while not any(cluster.engines_ready.values()):  # noqa: ASYNC110 (no event to wait for)
                    await asyncio.sleep(0.1)
                check_models(local_run.models, cluster)
                slots = sum([engine.info.slots for engine in cluster.scheduler.engines.values()])
                await local_run.run(cluster, slots=slots, barrier=config.barrier)
    print(f"{local_run.total} lines are done, {local_run.failed} have failed", file=sys.stderr)
    if local_run.failed:
        print(f"the failed lines are in {errors}", file=sys.stderr)
    return 1 if local_run.failed else 0


def check_models(models: Collection[str], cluster: LiveCluster) -> None:
    """Raise NoAnswer if no line can run, for no engine has or will have one of these models. "": none is named"""
    known = cluster.models
    if models and not any(not model or model in known or cluster.fleet.may_come(model) for model in models):
        engines = [f"{name} has {', '.join(sorted(handle.models))}" for name, handle in cluster.fleet.handles.items()]
        wanted = ", ".join([repr(model) for model in sorted(models)[:MODELS_SHOWN]])
        raise NoAnswer(f"no engine serves model {wanted}; {'; '.join(engines)}")


@contextmanager
def progress(local_run: Any, cluster: LiveCluster) -> Iterator[None]:
    """Show the progress: a bar in a terminal, otherwise a line every PLAIN_EVERY_S seconds."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    bar = Progress(TextColumn("lines"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    task = bar.add_task("", total=local_run.total, completed=local_run.done)
    bar = bar if console.is_terminal else None  # type: ignore[assignment]

    async def show() -> None:
        while True:
            left_s = local_run.seconds_left()
            words = f"{local_run.failed} failed, {'?' if left_s is None else f'{left_s:.0f} s'} left"
            if waits := local_run.waits_for(cluster):
                words += f"; {waits}"
            if bar is not None:
                bar.update(task, completed=local_run.done, description=words)
            else:
                print(f"{local_run.done} of {local_run.total} lines, {words}", file=sys.stderr, flush=True)
            await asyncio.sleep(0.5 if bar is not None else PLAIN_EVERY_S)

    with bar if bar is not None else contextlib.nullcontext():
        showing = asyncio.create_task(show())
        try:
            yield
        finally:
            showing.cancel()


# ---- a server ---------------------------------------------------------------------------------------------------


class Counts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct):
    """What a table shows of a batch."""

    id: str
    status: str
    completion_window: str = ""
    request_counts: Counts | None = None


class Page(msgspec.Struct):
    data: list[Batch]
    has_more: bool = False


def show_all(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Column, Table

    table, after = Table(*[Column(name, no_wrap=True) for name in COLUMNS]), ""
    while True:
        query = f"?limit=100&after={quote(after, safe='')}" if after else "?limit=100"
        try:
            page = msgspec.json.decode(ask(args, f"/v1/batches{query}"), type=Page)
        except msgspec.MsgspecError as error:
            raise NoAnswer(f"{args.url} lists no batches: {error}") from error
        for batch in page.data:
            counts = batch.request_counts or Counts()
            numbers = [str(number) for number in (counts.completed, counts.failed, counts.total)]
            table.add_row(batch.id, batch.status, batch.completion_window, *numbers)
        if not page.has_more or not page.data:
            break
        after = page.data[-1].id
    console = Console()
    whole = console.measure(table, options=console.options.update(width=WIDTH_MAX)).maximum
    console.width = max(console.width, whole)  # a narrow terminal breaks lines; an ID that is cut has no use
    console.print(table)
    return 0


def ask(args: argparse.Namespace, path: str, method: str = "GET") -> bytes:
    """The body of the server's answer. Raises ConfigError for a bad URL or key, and NoAnswer."""
    return asking.ask(args.url, path, asking.key_of(args), asking.NEEDS_KEY, method)
