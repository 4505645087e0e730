"""How often it is known which requests belong to one agent, when clients send no ids.

    python scripts/lab programs --output docs/results/programs.json
    python scripts/lab programs --worlds DIR/*.jsonl.gz

Each session of a world is turned into the requests of a client, which the server's own code reads and counts to
programs. A request is right if its program is that of the session's request before, and of no other session. A case
makes the worlds harder. Nothing was fitted to worlds.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from kit.arguments import add_results, parser_of, whole
from kit.progress import log
from kit.results import day_and_machine, rounded, write_json
from kit.tables import markdown

from llmserve.gateway.bodies import BodyLimits
from llmserve.gateway.draft import Draft
from llmserve.gateway.endpoints import ENDPOINTS
from llmserve.gateway.stages import identified, reading
from llmserve.programs.known_programs import KnownPrograms
from questions.programs.worlds import Session, Step, drawn, read_world

CHAT, COMPLETION = ENDPOINTS["/v1/chat/completions"], ENDPOINTS["/v1/completions"]
READ = reading(BodyLimits(), b"secret")
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("edit", "shell", "build")]
TOKEN_S, PROMPT_TOKEN_S = 0.02, 5e-5  # of an engine that nobody waits for
QUESTIONS = ("Fix the failing test.", "Continue.", "Go on with the plan.")


@dataclass(frozen=True)
class Case:
    """What makes a world harder.

    ids         the engine gives each tool call an id of its own; else all the same
    tools       requests offer tools; else results are messages of the user, and nothing calls a tool
    alike       share of turns that begin with one of QUESTIONS instead of words of their own
    edited      share of steps that are asked a second time, with another last message
    keeps_call  a context that begins anew keeps the last tool call with its result
    plain       prompts without turns, as /v1/completions takes them
    """

    name: str
    ids: bool = True
    tools: bool = True
    alike: float = 0.0
    edited: float = 0.0
    keeps_call: bool = False
    plain: bool = False


CASES = (
    Case("as they are"),
    Case("tool calls without ids", ids=False),
    Case("half of the questions alike", alike=0.5),
    Case("half alike, without ids", alike=0.5, ids=False),
    Case("a tenth edited and asked again", edited=0.1, ids=False),
    Case("a new context keeps the last tool call", keeps_call=True),
    Case("agents without tools", tools=False),
    Case("prompts without turns", plain=True),
)


class Asked(NamedTuple):
    """A request that has been counted. compacted : its context has begun anew"""

    session: str
    program: int
    compacted: bool
    first: bool


@dataclass
class Asking:
    """Asks the requests of a world, in the order of their times."""

    case: Case
    random: np.random.Generator
    now_s: float = 0.0
    asked: list[Asked] = field(default_factory=list)
    _ids: Any = field(default_factory=count)

    def __post_init__(self) -> None:
        self._identify = identified(KnownPrograms(), lambda: self.now_s)

    def run(self, sessions: Iterable[Session]) -> list[Asked]:
        order, waiting = count(), list[tuple[float, int, Generator[float, None, None]]]()
        self._start = lambda session, at_s, then: heapq.heappush(
            waiting, (at_s, next(order), self._lives(session, then))
        )
        for session in sessions:
            self._start(session, session.arrival_s, None)
        while waiting:
            self.now_s, _, life = heapq.heappop(waiting)
            for pause_s in life:
                heapq.heappush(waiting, (self.now_s + pause_s, next(order), life))
                break
        return self.asked

    def _lives(self, session: Session, then: Callable[[], None] | None) -> Generator[float, None, None]:
        """The life of a session; it yields pauses in seconds."""
        offers = TOOLS if self.case.tools and session.kind != "chat" else []
        rules = {
            "role": "system",
            "content": f"You are {session.kind}. " + "Be careful. " * (60 if self.case.plain else 5),
        }
        messages, steps = [rules], 0
        for turn in session.turns:
            if steps:
                yield turn.gap_s
            question = str(self.random.choice(QUESTIONS)) if self.random.random() < self.case.alike else self._words()
            messages.append({"role": "user", "content": question})
            for step in turn.steps:
                if step.compacted:
                    kept = messages[-2:] if self.case.keeps_call and messages[-1]["role"] == "tool" else []
                    messages = [rules, {"role": "user", "content": f"So far: {self._words()}"}, *kept]
                for again in (False, True):
                    if again:
                        if self.random.random() >= self.case.edited:
                            break
                        messages = [*messages[:-1], {**messages[-1], "content": self._words()}]
                    draft = self._ask(
                        session.session, messages, offers, compacted=step.compacted and not again, first=not steps
                    )
                    steps += 1
                    yield step.output_tokens * TOKEN_S + step.new_tokens * PROMPT_TOKEN_S
                    call = "call_" + str(next(self._ids) if self.case.ids else 0)
                    if draft.member is not None:
                        draft.member.left((call,) if step.tool and offers else ())
                messages = [*messages, *self._answered(step, call, offers=bool(offers))]
                if step.sessions:
                    yield from self._children(step)
                else:
                    yield step.tool_s
        if then is not None:
            then()

    def _children(self, step: Step) -> Generator[float, None, None]:
        left = len(step.sessions)

        def ended() -> None:
            nonlocal left
            left -= 1

        for child in step.sessions:
            self._start(child, self.now_s + child.arrival_s, ended)
        while left:
            yield 0.5

    def _answered(self, step: Step, call: str, *, offers: bool) -> list[dict[str, Any]]:
        """The answer, and the result of its tool."""
        if step.tool is None:
            return [{"role": "assistant", "content": self._words()}]
        if not offers:
            result = {"role": "user", "content": self._words()}
            return [{"role": "assistant", "content": self._words()}, result]
        made = {"id": call, "type": "function", "function": {"name": step.tool, "arguments": "{}"}}
        result = {"role": "tool", "tool_call_id": call, "content": self._words()}
        return [{"role": "assistant", "content": None, "tool_calls": [made]}, result]

    def _words(self) -> str:
        return f"word {self.random.integers(1 << 62)}"

    def _ask(self, session: str, messages: list[Any], tools: list[Any], *, compacted: bool, first: bool) -> Draft:
        if self.case.plain:
            turns = [f"{each['role']}: {each['content'] or json.dumps(each['tool_calls'])}\n" for each in messages]
            draft = Draft(COMPLETION, body=json.dumps({"model": "m", "prompt": "".join(turns)}).encode())
        else:
            body = {"model": "m", "messages": messages, **({"tools": tools} if tools else {})}
            draft = Draft(CHAT, body=json.dumps(body).encode())
        READ(draft)
        self._identify(draft)
        self.asked.append(Asked(session, draft.program, compacted, first))
        return draft


def judged(asked: Iterable[Asked]) -> dict[str, int]:
    """Requests, and how many of them are wrong: of another session's program, or not of the session's last one. Those
    with which a context begins anew are counted apart.
    """
    owners, last = dict[int, str](), dict[str, int]()
    counts = dict.fromkeys(("requests", "merged", "split", "anew"), 0)
    for request in asked:
        counts["requests"] += 1
        known = request.program or -counts["requests"]  # of no program: alone
        if owners.setdefault(known, request.session) != request.session:
            counts["merged"] += 1
        elif not request.first and known != last[request.session]:
            counts["anew" if request.compacted else "split"] += 1
        last[request.session] = known
    return counts


def measured(case: Case, worlds: Iterable[tuple[int, list[Session]]]) -> dict[str, Any]:
    total = dict.fromkeys(("requests", "merged", "split", "anew"), 0)
    for seed, sessions in worlds:
        for name, number in judged(Asking(case, np.random.default_rng(seed)).run(sessions)).items():
            total[name] += number
    right = 1.0 - (total["merged"] + total["split"]) / total["requests"]
    strictly = right - total["anew"] / total["requests"]
    return {"case": case.name, **total, "right": right, "right_strictly": strictly}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=whole(1), default=4)
    parser.add_argument("--first-seed", type=whole(0), default=20_000)
    parser.add_argument("--worlds", type=Path, nargs="+", metavar="FILE", default=[], help="instead of drawn worlds")
    parser.add_argument("--cases", type=whole(1), default=len(CASES), help="only so many, from the first on")
    add_results(parser)
    args = parser.parse_args()
    if args.worlds:
        worlds = [(seed, read_world(path)) for seed, path in enumerate(args.worlds)]
    else:
        worlds = [(seed, drawn(seed)) for seed in range(args.first_seed, args.first_seed + args.seeds)]
    rows = []
    for case in CASES[: args.cases]:
        rows.append(measured(case, worlds))
        log(f"{case.name}: {rows[-1]['right']:.2%}")
    result = {**day_and_machine(), "worlds": len(worlds), "first_seed": args.first_seed, "cases": rows}
    write_json(args.output, rounded(result))
    head = ("world", "requests", "right", "with the first of a new context", "of another's program", "split")
    cells = [
        (
            row["case"],
            f"{row['requests']:,}",
            f"{row['right']:.2%}",
            f"{row['right_strictly']:.2%}",
            str(row["merged"]),
            str(row["split"]),
        )
        for row in rows
    ]
    print(markdown(head, cells, right=True))


if __name__ == "__main__":
    main()
