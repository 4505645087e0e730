"""kill -9, in turn and at random, of what a cluster consists of, while clients ask."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import psutil

from llmserve.errors import NoAnswer
from llmserve.machines import on_ray
from questions.machines.clients import Asked, Clients
from questions.machines.nodes import Nodes

KINDS = ("engine", "group", "gateway", "keeper", "node")
BACK_S = 120.0


async def report(cluster: str) -> dict[str, Any]:
    return await asyncio.to_thread(on_ray.report_of, cluster)


class Victim(NamedTuple):
    """What was killed. pids : of the servers (as in the report) that ended by it"""

    name: str
    pids: frozenset[int]


async def kill_one(nodes: Nodes, cluster: str, kind: str, rng: np.random.Generator) -> Victim:
    """Kill something of this kind."""
    rows = [row for row in (await report(cluster))["processes"] if row.get("pid")]
    if kind == "node":
        number = int(rng.integers(len(nodes.workers)))
        below = await asyncio.to_thread(nodes.workers[number].kill)
        return Victim(f"node {number}", frozenset(row["pid"] for row in rows) & below)
    row = rows[int(rng.choice([n for n, row in enumerate(rows) if kind in (row["kind"], "keeper")]))]
    supervisor = psutil.Process(row["pid"])
    os.kill(supervisor.ppid() if kind == "keeper" else supervisor.children()[0].pid, signal.SIGKILL)
    return Victim(f"{kind} of {row['name']}" if kind == "keeper" else row["name"], frozenset({row["pid"]}))


async def until_back(
    cluster: str, clients: Clients, models: list[str], killed_s: float, killed: frozenset[int]
) -> tuple[float, float]:
    """(seconds until a request of each model that came after the kill was answered, until everything runs again).

    killed : process ids that must have been replaced
    """
    served_s: float | None = None
    while time.monotonic() - killed_s < BACK_S:
        await asyncio.sleep(0.25)
        if served_s is None:
            firsts = [first_answer(clients.asked, model, killed_s) for model in models]
            served_s = max(firsts) - killed_s if all(firsts) else None
        if served_s is not None:
            with contextlib.suppress(NoAnswer):
                told = await report(cluster)
                if told["ready"] and killed.isdisjoint(row.get("pid") for row in told["processes"]):
                    return served_s, time.monotonic() - killed_s
    return (served_s if served_s is not None else BACK_S), BACK_S


def first_answer(asked: list[Asked], model: str, after_s: float) -> float:
    """When the first request of a model that was sent after a time got its first token; 0: not yet."""
    firsts = [one.first_s for one in asked if one.model == model and one.sent_s > after_s and one.first_s is not None]
    return min(firsts, default=0.0)


def summary(asked: list[Asked]) -> dict[str, Any]:
    ends = Counter(end for one in asked for end in one.ends)
    without_first = [one for one in asked if one.first_s is None or one.ends == ["whole"]]
    answered = sum(one.ends == ["whole"] for one in without_first)
    waits_s = sorted(one.ended_s - one.sent_s for one in asked if one.ends == ["whole"] and one.ended_s is not None)
    return {
        "requests": len(asked),
        "ends": dict(sorted(ends.items())),
        "ended_once": sum(len(one.ends) == 1 for one in asked),
        "answered_of_those_without_a_first_byte": answered / max(1, len(without_first)),
        "longest_answer_s": waits_s[-1] if waits_s else None,
        "sent_again": sum(one.tries > 1 for one in asked),
        "notes": dict(Counter(one.note[:160] for one in asked if one.ends and one.ends[0] in ("refused", "wrong"))),
    }
