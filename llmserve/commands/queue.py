"""Show who waits in a running server: by model, share and bin, how many, how long, and when the next one starts. And
which programs of agents are present: running, held over a tool call, or waiting.

    llmserve queue --url http://127.0.0.1:8000 --key-file FILE

FILE is the --admin-key-file of the server. A share is whoever --fair-by names: a key, a stream or an address.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from llmserve.commands import asking
from llmserve.errors import ConfigError, NoAnswer
from llmserve.estimates.waiting_rows import ProgramSeen, WaitingRow

REFUSALS = {
    401: "refuses the first key of the file: give the server's --admin-key-file as --key-file",
    404: "has no /admin/queue: start it with --admin-key-file FILE",
}


class Waiting(msgspec.Struct):
    """The answer of /admin/queue.

    waiting         requests, also those of reserved batches, which are in no row
    wait_bounds_s   by model under the order boost: the longest wait, while forecasts of the work are right
    program_counts  by state, of all programs
    programs        the first of them
    """

    waiting: int
    queues: list[WaitingRow]
    wait_bounds_s: dict[str, float] = {}
    program_counts: dict[str, int] = {}
    programs: list[ProgramSeen] = []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("place", nargs="?", metavar="URL", help="the same as --url URL")
    asking.add_server(parser)
    parser.add_argument("--json", action="store_true", help="print the server's JSON object instead of the table")


def main(args: argparse.Namespace) -> int:
    args.url, key = args.place or args.url, asking.key_of(args)
    if key is None:
        raise ConfigError("queue needs --key-file FILE, the server's --admin-key-file")
    body = asking.ask(args.url, "/admin/queue", key, REFUSALS)
    if args.json:
        print(body.decode())
        return 0
    try:
        waiting = msgspec.json.decode(body, type=Waiting)
    except msgspec.MsgspecError as error:
        raise NoAnswer(f"{args.url} is no llmserve, or another version of it: {error}") from error
    if waiting.queues:
        Console().print(table_of(waiting))
    for model, bound_s in waiting.wait_bounds_s.items():
        if bound_s > 0.0:
            print(f"no request of {model} waits longer than {bound_s:.1f} s, by forecasts of the work")
    print(f"{waiting.waiting} requests wait")
    if waiting.programs:
        Console().print(table_of_programs(waiting.programs))
        print(counted(waiting.program_counts))
    return 0


STATES = {"running": "run", "held": "are held over a tool call", "waiting": "wait"}


def counted(program_counts: Mapping[str, int]) -> str:
    """Such as `5 programs: 2 run, 3 wait`."""
    states = [f"{count} {STATES.get(state, state)}" for state, count in program_counts.items()]
    return f"{sum(program_counts.values())} programs: {', '.join(states)}"


def table_of_programs(programs: Sequence[ProgramSeen]) -> Table:
    table = Table("program", "step", "state", "for", "tokens", "engine", "tools called", "next")
    for name in ("step", "for", "tokens"):
        next(column for column in table.columns if column.header == name).justify = "right"
    for program in programs:
        table.add_row(
            program.program,
            str(program.step),
            program.state,
            f"{program.since_s:.1f} s",
            f"{program.tokens:,}",
            program.engine or "-",
            ", ".join(program.tools) or "-",
            next_of(program),
        )
    return table


def next_of(program: ProgramSeen) -> str:
    if program.over_s is not None:
        return f"its room is kept for {program.over_s:.1f} s" if program.over_s > 0.0 else "its room is free for others"
    if program.state != "waiting":
        return "-"
    return "?" if program.starts_s is None else f"starts in {program.starts_s:.1f} s"


def table_of(waiting: Waiting) -> Table:
    table = Table("model", "share", "bin", "waiting", "oldest", "next starts in")
    for name in ("bin", "waiting", "oldest", "next starts in"):
        next(column for column in table.columns if column.header == name).justify = "right"
    for row in waiting.queues:
        starts = "?" if row.next_starts_s is None else f"{row.next_starts_s:.1f} s"
        table.add_row(row.model, row.share or "-", str(row.bin), str(row.waiting), f"{row.oldest_s:.1f} s", starts)
    return table
