"""Show a cluster: its gateways, groups and engines, where they run, what waits, and how they ended last."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from llmserve.machines import address as cluster_address

NODE_CHARS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cluster_address.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")


def main(args: argparse.Namespace) -> int:
    with cluster_address.connected(args):
        from llmserve.machines.on_ray import report_of

        report = report_of(args.name)
    if args.json:
        print(json.dumps(report))
        return 0
    console = Console()
    console.print(_groups(report))
    console.print(_processes(report))
    return 0


def _groups(report: dict[str, Any]) -> Table:
    table = Table("group", "models", "workers", "engines", "waiting")
    for group in report["groups"]:
        waiting = "?" if group["waiting"] is None else str(group["waiting"])
        engines = ", ".join([f"{count} {kind}" for kind, count in group["engines"].items()])
        table.add_row(group["name"], ", ".join(group["models"]), ", ".join(group["workers"]), engines, waiting)
    return table


def _processes(report: dict[str, Any]) -> Table:
    table = Table("process", "state", "address", "node", "up for", "restarts", "ended last")
    for row in report["processes"]:
        since_s = row.get("since_s")
        table.add_row(
            *(row["name"], row["state"], row.get("url", ""), row.get("node", "")[:NODE_CHARS]),
            *("" if since_s is None else f"{time.time() - since_s:.0f} s", str(row.get("restarts", ""))),
            row.get("last_end", "").splitlines()[0] if row.get("last_end") else "",
        )
    return table
