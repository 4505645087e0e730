"""Conversations of agents, recorded, without ids: each request is counted to its program.

recordings/ has what openai-agents 0.24 and langgraph 1.2 send: a main agent with a sub-agent as a tool, with both APIs;
two threads that ask the same in turn.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from agents.asking import Asking, end
from gateway.claude_conversation import CLAUDE
from gateway.codex_conversation import CODEX

from llmserve.gateway.draft import Draft

RECORDINGS = sorted((Path(__file__).parent / "recordings").glob("*.jsonl"))


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_each_request_of_a_recording_is_of_its_program(path: Path) -> None:
    asking, programs = Asking(), defaultdict[str, set[int]](set)
    for line in path.read_text().splitlines():
        turn: dict[str, Any] = json.loads(line)
        draft = asking.asked(turn["asked"], turn["path"], turn["answered"])
        programs[turn["program"]].add(draft.program)
    assert [len(ids) for ids in programs.values()] == [1, 1]
    assert len(set.union(*programs.values())) == 2


@pytest.mark.parametrize("turns", [CLAUDE, CODEX], ids=["claude", "codex"])
def test_a_conversation_of_a_coding_agent_is_one_program(turns: list[Any]) -> None:
    asking, drafts = Asking(), list[Draft]()
    for turn in turns:
        path = turn.path.partition("?")[0]
        body = json.loads(turn.asked)
        if "tools" in body and "count" not in path:
            drafts.append(asking.ask({name: body[name] for name in body if name != "prompt_cache_key"}, path))
            end(drafts[-1])
    assert len({draft.program for draft in drafts}) == 1
    assert [draft.step for draft in drafts] == list(range(1, len(drafts) + 1))
