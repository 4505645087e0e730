"""How long tools take, and for how long an engine's memory is worth keeping for their results.

To keep a program's tokens over a tool call for t seconds saves the prefill of all of them if the tool returns by then,
and takes the room from others meanwhile. Both are in proportion to the tokens, so one time is best for programs of any
size:

    t = argmax over t of WORTH R F(t) - E[min(X, t)]

    X  seconds of the tool, F its distribution.  R : seconds in which the engine computes as many tokens as it has room
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

import numpy as np

WORTH = 3.0
SLACK = 1.1  # the next call may take a little longer than the longest of those that are worth the wait
CALLS_KEPT = 400
CALLS_LEAST = 8  # before so many a tool's time is unknown
UNKNOWN_S = 2.0
TOOLS_MAX = 1024  # tools that are remembered, the last used
REFRESH = 16  # calls after which the time is computed again
KEPT_MAX = 64  # tools that outlive a restart, the last used

LearntTool = tuple[tuple[str, ...], tuple[float, ...]]
"""The names of tools that are called at once, and the seconds that their last calls took."""


class _Tool:
    __slots__ = ("keep_s", "new", "seconds", "worth_s")

    def __init__(self, seconds: Iterable[float] = ()) -> None:
        self.seconds: deque[float] = deque(seconds, maxlen=CALLS_KEPT)
        self.keep_s, self.worth_s, self.new = UNKNOWN_S, 0.0, 0


class Tools:
    """All tools, by name; several that are called at once are one tool. learnt : before the start"""

    def __init__(self, learnt: Sequence[LearntTool] = ()) -> None:
        self._tools = OrderedDict([(tools, _Tool(seconds)) for tools, seconds in learnt])

    def learnt(self) -> tuple[LearntTool, ...]:
        """What was learnt so far, of the tools that were called last."""
        return tuple([(tools, tuple(tool.seconds)) for tools, tool in list(self._tools.items())[-KEPT_MAX:]])

    def returned(self, tools: tuple[str, ...], seconds: float) -> None:
        """Learn that the results of a call have come after so many seconds."""
        tool = self._tools.get(tools)
        if tool is None:
            tool = self._tools[tools] = _Tool()
            if len(self._tools) > TOOLS_MAX:
                self._tools.popitem(last=False)
        self._tools.move_to_end(tools)
        tool.seconds.append(seconds)
        tool.new += 1

    def keep_s(self, tools: tuple[str, ...], pool_s: float) -> float:
        """For how long to keep a program's tokens after a call of these tools. pool_s : R"""
        tool = self._tools.get(tools)
        if tool is None or len(tool.seconds) < CALLS_LEAST:
            return UNKNOWN_S
        if tool.new >= REFRESH or not 0.8 * tool.worth_s <= pool_s <= 1.25 * tool.worth_s:
            tool.keep_s, tool.worth_s, tool.new = _best_s(np.sort(np.array(tool.seconds)), pool_s), pool_s, 0
        return tool.keep_s


def _best_s(seconds: np.ndarray, pool_s: float) -> float:
    """The best time to keep. seconds : (n,) ascending"""
    n = len(seconds)
    returned = np.arange(1, n + 1) / n
    kept_s = (np.cumsum(seconds) + (n - np.arange(1, n + 1)) * seconds) / n  # E[min(X, t)] at each t of the sample
    gains = WORTH * pool_s * returned - kept_s
    best = int(np.argmax(gains))
    return SLACK * float(seconds[best]) if gains[best] > 0.0 else 0.0
