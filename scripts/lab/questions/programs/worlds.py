"""Worlds of agents and chats: sessions of turns, and turns of steps with tools between them.

A file has one session a line, as JSON:

    {"session": "s12", "kind": "kind-1", "arrival_s": 8.8, "shared_tokens": 15000, "turns": [{"gap_s": 40.2, "steps": [
        {"new_tokens": 9182, "output_tokens": 211, "tool": "edit", "tool_s": 0.1},
        {"new_tokens": 700, "output_tokens": 90}]}]}

shared_tokens : the system prompt, which all sessions of the kind share.  compacted : the session's context begins anew
with the step.  sessions : sub-agents that the step's tool call consists of; it ends when all have ended
"""

from __future__ import annotations

import gzip
from pathlib import Path

import msgspec
import numpy as np

CONTEXT_TOKENS_MAX = 110_000
TOOLS = {"edit": (0.3, 0.5), "shell": (1.5, 1.5), "build": (20.0, 1.0)}
"""Median seconds of a tool, and the deviation of their logarithm."""


class Step(msgspec.Struct, omit_defaults=True):
    new_tokens: float
    output_tokens: float
    tool: str | None = None
    tool_s: float = 0.0
    compacted: bool = False
    sessions: list[Session] = []


class Turn(msgspec.Struct):
    """gap_s : before the turn, unless it is the first"""

    steps: list[Step]
    gap_s: float = 0.0


class Session(msgspec.Struct):
    session: str
    kind: str
    arrival_s: float
    shared_tokens: float
    turns: list[Turn]


def read_world(path: Path) -> list[Session]:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        return [msgspec.json.decode(line, type=Session) for line in file]


def drawn(seed: int, agents: int = 150, chats: int = 150, sub_agents: float = 0.1) -> list[Session]:
    """A world with sessions of these numbers. sub_agents : share of tool calls that are two to four of them"""
    random = np.random.default_rng(seed)
    sessions, now_s = list[Session](), 0.0
    for number in random.permutation(agents + chats):
        now_s += random.exponential(8.0)
        name = f"s{len(sessions)}"
        if number < agents:
            sessions.append(_agent(random, name, now_s, f"kind-{random.integers(4)}", sub_agents))
        else:
            step = Step(random.lognormal(5.7, 0.8), random.lognormal(5.5, 0.7))
            sessions.append(Session(name, "chat", now_s, 400, [Turn([step])]))
    return sessions


def _agent(random: np.random.Generator, name: str, arrival_s: float, kind: str, sub_agents: float) -> Session:
    context, turns = 15_000.0, []
    for number in range(random.geometric(0.6) if sub_agents else 1):
        steps = []
        for _ in range(min(60, int(np.ceil(random.lognormal(1.4, 1.1))))):
            new = random.lognormal(8.0, 1.0) if not steps else random.lognormal(6.5, 1.2)
            compacted = context + new > CONTEXT_TOKENS_MAX
            context = 15_000.0 + new if compacted else context + new
            tool = str(random.choice(list(TOOLS)))
            median_s, deviation = TOOLS[tool]
            step = Step(new, random.lognormal(5.2, 0.8), tool, median_s * random.lognormal(0.0, deviation), compacted)
            if random.random() < sub_agents:
                children = random.integers(2, 5)
                step.sessions = [_agent(random, f"{name}.{i}.{new:.0f}", 0.0, "kind-sub", 0.0) for i in range(children)]
            steps.append(step)
        steps[-1].tool, steps[-1].sessions = None, []
        turns.append(Turn(steps, 0.0 if number == 0 else min(600.0, random.lognormal(4.4, 1.5))))
    return Session(name, kind, arrival_s, 15_000.0, turns)
