"""The study of programs: what counts as right, and that its worlds are asked whole."""

from __future__ import annotations

import numpy as np
from questions.programs.run import CASES, Asked, Asking, judged
from questions.programs.worlds import Session, Step, Turn, drawn


def asked(session: str, program: int, *, first: bool = False, compacted: bool = False) -> Asked:
    return Asked(session, program, compacted, first)


def test_merged_and_split_requests_are_wrong_and_new_contexts_are_counted_apart() -> None:
    merged = [asked("a", 1, first=True), asked("b", 1, first=True)]
    assert judged(merged) == {"requests": 2, "merged": 1, "split": 0, "anew": 0}
    split = [asked("a", 1, first=True), asked("a", 2), asked("a", 2), asked("a", 3, compacted=True)]
    assert judged(split) == {"requests": 4, "merged": 0, "split": 1, "anew": 1}
    alone = [asked("a", 0, first=True), asked("b", 0, first=True), asked("b", 4)]
    assert judged(alone) == {"requests": 3, "merged": 0, "split": 1, "anew": 0}


def test_each_step_of_a_world_is_asked_once_also_those_of_sub_agents() -> None:
    child = Session("b", "kind-sub", 0.0, 0, [Turn([Step(1, 1, "edit", 1.0), Step(1, 1)])])
    session = Session("a", "kind-1", 0.0, 0, [Turn([Step(1, 1, "edit", sessions=[child]), Step(1, 1)])])
    requests = Asking(CASES[0], np.random.default_rng(0)).run([session])
    assert [request.session for request in requests] == ["a", "b", "b", "a"]
    assert len({request.program for request in requests}) == 2


def test_a_small_world_is_told_apart() -> None:
    world = drawn(7, agents=6, chats=6)
    counts = judged(Asking(CASES[0], np.random.default_rng(7)).run(world))
    assert counts["requests"] > 12
    assert counts["merged"] == counts["split"] == 0
