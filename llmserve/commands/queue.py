"""Show who waits in a running server: by model, share and bin, how many, how long, and when the next one starts.

    llmserve queue http://127.0.0.1:8000 --admin-key-file FILE

The server needs the same --admin-key-file. A share is whoever --fair-by names: a key, a stream or an address.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from llmserve.commands import asking
from llmserve.errors import NoAnswer
from llmserve.estimates.waiting_rows import WaitingRow
from llmserve.tenants.key_file import read_keys

REFUSALS = {
    401: "refuses the first key of --admin-key-file",
    404: "has no /admin/queue: start it with --admin-key-file FILE",
}


class Waiting(msgspec.Struct):
    """The answer of /admin/queue. waiting : requests, also those of reserved batches, which are in no row"""

    waiting: int
    queues: list[WaitingRow]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="address of the server, e.g. http://127.0.0.1:8000")
    parser.add_argument(
        "--admin-key-file", type=Path, metavar="FILE", required=True, help="file whose first key is sent"
    )
    parser.add_argument("--json", action="store_true", help="print the server's JSON object instead of the table")


def main(args: argparse.Namespace) -> int:
    body = asking.ask(args.url, "/admin/queue", next(iter(read_keys(args.admin_key_file).values())), REFUSALS)
    if args.json:
        print(body.decode())
        return 0
    try:
        waiting = msgspec.json.decode(body, type=Waiting)
    except msgspec.MsgspecError as error:
        raise NoAnswer(f"{args.url} is no llmserve, or another version of it: {error}") from error
    if waiting.queues:
        Console().print(table_of(waiting))
    print(f"{waiting.waiting} requests wait")
    return 0


def table_of(waiting: Waiting) -> Table:
    table = Table("model", "share", "bin", "waiting", "oldest", "next starts in")
    for name in ("bin", "waiting", "oldest", "next starts in"):
        next(column for column in table.columns if column.header == name).justify = "right"
    for row in waiting.queues:
        starts = "?" if row.next_starts_s is None else f"{row.next_starts_s:.1f} s"
        table.add_row(row.model, row.share or "-", str(row.bin), str(row.waiting), f"{row.oldest_s:.1f} s", starts)
    return table
