"""Make a world of programs: sessions of agents and chats, for `llmserve simulate --programs`.

The percentiles are those published of a coding agent's traces: steps of a turn (4 at the median, 18 at the 90th), new
and answered tokens of a step (907 and 212 at the median), seconds of tools, pauses of persons (86 s at the median);
contexts are half as long, so that pools of one GPU make sense. The quantities are drawn one by one, independent of each
other: rows of real traces are not.

    python scripts/lab programs --seed 1 --sessions 300 --rate 0.08 --output world.jsonl.gz
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

KINDS = (0.3, 0.3, 0.25, 0.15)  # probabilities of the kinds of agents
ANOTHER_TURN = 0.4
TOOL_NAMES = ("edit", "shell", "build")
TOOLS = (0.6, 0.3, 0.1)  # their probabilities
AGENTS, AGENTS_MAX = "agents", 4
SUBAGENT = len(KINDS)  # the kind of all sub-agents

Median = tuple[float, float]
"""A median, and the standard deviation of the logarithm."""


@dataclass(frozen=True)
class Shape:
    """How large sessions are, in tokens and seconds.

    shared            of the system prompt and the tools of each kind of agent
    first, new        of an agent's first message; of what a further step adds to the prompt
    output            of an agent's answer
    context_max       a session's context begins anew, with `compacted`, before the context has more
    steps             of a turn
    gap_s, gap_max_s  a person's pause before the next turn
    tools_s           as in TOOL_NAMES
    chat, chat_output of a chat's question and answer; chat_shared: of its system prompt
    subagent_...      as of agents; a sub-agent has one turn
    """

    shared: tuple[int, ...] = (10_000, 15_000, 22_000, 30_000)
    first: Median = (8_000, 0.9)
    new: Median = (907, 1.3)
    output: Median = (212, 0.9)
    context_max: int = 110_000
    compacted: int = 10_000
    steps: Median = (4, 1.15)
    gap_s: Median = (86.0, 2.1)
    gap_max_s: float = 600.0
    tools_s: tuple[Median, ...] = ((0.1, 1.0), (1.5, 1.3), (60.0, 1.2))
    chat_shared: int = 400
    chat: Median = (300, 1.0)
    chat_output: Median = (250, 0.9)
    subagent_shared: int = 12_000
    subagent_first: Median = (2_000, 0.8)
    subagent_steps: Median = (3, 0.85)


AS_PUBLISHED = Shape()


class Drawing:
    """Draws one world. subagents : probability that a tool is two to four sub-agents"""

    def __init__(self, seed: int, subagents: float, shape: Shape = AS_PUBLISHED) -> None:
        self._rng = np.random.default_rng(seed)
        self._subagents, self._shape = subagents, shape
        self._count = 0

    def world(self, agents: int, chats: int, rate_per_s: float) -> Iterator[dict[str, Any]]:
        """Sessions in order of arrival: Poisson, of this rate in all."""
        kinds = self._rng.permutation(["agent"] * agents + ["chat"] * chats)
        at_s = 0.0
        for kind in kinds.tolist():
            at_s += float(self._rng.exponential(1 / rate_per_s))
            yield self.chat(at_s) if kind == "chat" else self.agent(at_s)

    def chat(self, at_s: float) -> dict[str, Any]:
        shape = self._shape
        step = {"new_tokens": self._lognormal(shape.chat), "output_tokens": self._lognormal(shape.chat_output)}
        return self._session("chat", at_s, shape.chat_shared, [{"gap_s": 0.0, "steps": [step]}])

    def agent(self, at_s: float) -> dict[str, Any]:
        kind, shape = int(self._rng.choice(len(KINDS), p=KINDS)), self._shape
        turns: list[dict[str, Any]] = []
        own = 0
        while not turns or self._rng.random() < ANOTHER_TURN:
            gap_s = min(shape.gap_max_s, self._drawn(shape.gap_s))
            steps, own = self._steps(own, shape.shared[kind], shape.steps, shape.new if turns else shape.first)
            turns.append({"gap_s": round(gap_s, 2), "steps": steps})
        return self._session(f"kind-{kind}", at_s, shape.shared[kind], turns)

    def subagent(self) -> dict[str, Any]:
        shape = self._shape
        steps, _ = self._steps(0, shape.subagent_shared, shape.subagent_steps, shape.subagent_first, subagents=False)
        turns = [{"gap_s": 0.0, "steps": steps}]
        return self._session(f"kind-{SUBAGENT}", 0.0, shape.subagent_shared, turns)

    def _steps(
        self, own: int, shared: int, median: Median, first: Median, *, subagents: bool = True
    ) -> tuple[list[dict[str, Any]], int]:
        """The steps of a turn, and the session's own tokens after it. own : before it.  median : of their number.
        first : tokens of the first one
        """
        steps: list[dict[str, Any]] = []
        shape = self._shape
        count = self._lognormal(median)
        for number in range(count):
            new = self._lognormal(shape.new if number else first)
            step: dict[str, Any] = {"new_tokens": new, "output_tokens": self._lognormal(shape.output)}
            if shared + own + new + step["output_tokens"] > shape.context_max:
                step |= {"new_tokens": shape.compacted, "compacted": True}
                own = 0
            own += step["new_tokens"] + step["output_tokens"]
            if number + 1 < count:
                step |= self._tool(subagents)
            steps.append(step)
        return steps, own

    def _tool(self, subagents: bool) -> dict[str, Any]:
        if subagents and self._rng.random() < self._subagents:
            return {"tool": AGENTS, "sessions": [self.subagent() for _ in range(self._rng.integers(2, AGENTS_MAX + 1))]}
        tool = TOOL_NAMES.index(str(self._rng.choice(TOOL_NAMES, p=TOOLS)))
        return {"tool": TOOL_NAMES[tool], "tool_s": round(self._drawn(self._shape.tools_s[tool]), 3)}

    def _session(self, kind: str, at_s: float, shared: int, turns: list[dict[str, Any]]) -> dict[str, Any]:
        self._count += 1
        name = f"s{self._count - 1}"
        return {"session": name, "kind": kind, "arrival_s": round(at_s, 3), "shared_tokens": shared, "turns": turns}

    def _lognormal(self, median: Median) -> int:
        return max(1, round(self._drawn(median)))

    def _drawn(self, median: Median) -> float:
        value, sigma = median
        return float(self._rng.lognormal(math.log(value), sigma))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sessions", type=int, default=300, help="sessions of agents, and as many chats")
    parser.add_argument("--rate", type=float, default=0.08, help="sessions and chats per second")
    parser.add_argument("--subagents", type=float, default=0.0, help="share of tools that are sub-agents")
    parser.add_argument("--output", type=Path, required=True, help="a file of JSON lines, with .gz compressed")
    args = parser.parse_args()
    sessions = Drawing(args.seed, args.subagents).world(args.sessions, args.sessions, args.rate)
    text = "".join(json.dumps(session) + "\n" for session in sessions)
    data = text.encode()
    args.output.write_bytes(gzip.compress(data, mtime=0) if args.output.suffix == ".gz" else data)


if __name__ == "__main__":
    main()
