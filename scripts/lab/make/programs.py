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
from pathlib import Path
from typing import Any

import numpy as np

SHARED_TOKENS = (10_000, 15_000, 22_000, 30_000)  # of the system prompts and tools of each kind of agent
KINDS = (0.3, 0.3, 0.25, 0.15)  # probabilities
ANOTHER_TURN = 0.4
CONTEXT_MAX, COMPACTED_TOKENS = 110_000, 10_000
GAP_S, GAP_SIGMA, GAP_MAX_S = 86.0, 2.1, 600.0
TOOLS = {"edit": (0.6, 0.1, 1.0), "shell": (0.3, 1.5, 1.3), "build": (0.1, 60.0, 1.2)}
"""By name: probability, median seconds, and sigma of the logarithm."""
AGENTS, AGENTS_MAX = "agents", 4


class Drawing:
    """Draws one world. subagents : probability that a tool is two to four sub-agents"""

    def __init__(self, seed: int, subagents: float) -> None:
        self._rng = np.random.default_rng(seed)
        self._subagents = subagents
        self._count = 0

    def world(self, agents: int, chats: int, rate_per_s: float) -> Iterator[dict[str, Any]]:
        """Sessions in order of arrival: Poisson, of this rate in all."""
        kinds = self._rng.permutation(["agent"] * agents + ["chat"] * chats)
        at_s = 0.0
        for kind in kinds.tolist():
            at_s += float(self._rng.exponential(1 / rate_per_s))
            yield self.chat(at_s) if kind == "chat" else self.agent(at_s)

    def chat(self, at_s: float) -> dict[str, Any]:
        step = {"new_tokens": self._lognormal(300, 1.0), "output_tokens": self._lognormal(250, 0.9)}
        return self._session("chat", at_s, 400, [{"gap_s": 0.0, "steps": [step]}])

    def agent(self, at_s: float, subagents: bool = True) -> dict[str, Any]:
        kind = int(self._rng.choice(len(KINDS), p=KINDS))
        turns: list[dict[str, Any]] = []
        own = 0
        while not turns or self._rng.random() < ANOTHER_TURN:
            gap_s = min(GAP_MAX_S, float(self._rng.lognormal(math.log(GAP_S), GAP_SIGMA)))
            steps, own = self._steps(own, SHARED_TOKENS[kind], first=not turns, subagents=subagents)
            turns.append({"gap_s": round(gap_s, 2), "steps": steps})
        return self._session(f"kind-{kind}", at_s, SHARED_TOKENS[kind], turns)

    def _steps(self, own: int, shared: int, *, first: bool, subagents: bool) -> tuple[list[dict[str, Any]], int]:
        """The steps of a turn, and the session's own tokens after it. own : before it"""
        steps: list[dict[str, Any]] = []
        count = self._lognormal(4, 1.15)
        for number in range(count):
            new = self._lognormal(8_000, 0.9) if first and not number else self._lognormal(907, 1.3)
            step: dict[str, Any] = {"new_tokens": new, "output_tokens": self._lognormal(212, 0.9)}
            if shared + own + new + step["output_tokens"] > CONTEXT_MAX:
                step |= {"new_tokens": COMPACTED_TOKENS, "compacted": True}
                own = 0
            own += step["new_tokens"] + step["output_tokens"]
            if number + 1 < count:
                step |= self._tool(subagents)
            steps.append(step)
        return steps, own

    def _tool(self, subagents: bool) -> dict[str, Any]:
        if subagents and self._rng.random() < self._subagents:
            sessions = [self.agent(0.0, subagents=False) for _ in range(int(self._rng.integers(2, AGENTS_MAX + 1)))]
            return {"tool": AGENTS, "sessions": [{**one, "turns": one["turns"][:1]} for one in sessions]}
        name = str(self._rng.choice(list(TOOLS), p=[probability for probability, *_ in TOOLS.values()]))
        _, median_s, sigma = TOOLS[name]
        return {"tool": name, "tool_s": round(float(self._rng.lognormal(math.log(median_s), sigma)), 3)}

    def _session(self, kind: str, at_s: float, shared: int, turns: list[dict[str, Any]]) -> dict[str, Any]:
        self._count += 1
        name = f"s{self._count - 1}"
        return {"session": name, "kind": kind, "arrival_s": round(at_s, 3), "shared_tokens": shared, "turns": turns}

    def _lognormal(self, median: float, sigma: float) -> int:
        return max(1, round(float(self._rng.lognormal(math.log(median), sigma))))


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
