"""Agents of openai-agents, with a loop and tools of their own, before an engine whose KV cache is short."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from pathlib import Path

import pytest
from front import StartFront
from tool_engine import ToolEngine

from llmserve.live.journal import replay
from llmserve.scheduling.messages import RequestArrived, RequestEnded

LOOP = Path(__file__).with_name("openai_loop.py")
AGENTS, STEPS = 6, 5


@pytest.fixture
def agents_python() -> str:
    """The interpreter of an environment with openai-agents, which AGENTS_PYTHON names; scripts/test creates one."""
    python = os.environ.get("AGENTS_PYTHON")
    if python is None:
        pytest.skip("AGENTS_PYTHON is not set: run ./scripts/test, which installs openai-agents in an environment")
    return python


async def test_a_loop_of_agents_is_as_many_programs_whose_tokens_are_kept_over_their_tool_calls(
    start_front: StartFront, agents_python: str
) -> None:
    async with ToolEngine(step_s=0.002, slots=8, tokens_max=2_000) as engine:
        front = await start_front(engine)
        words = (agents_python, str(LOOP), front.url, str(AGENTS), str(STEPS))
        process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
        printed, _ = await process.communicate()
    assert process.returncode == 0
    assert printed.split() == [str(STEPS - 1).encode()] * AGENTS
    journal = front.cluster.journal
    steps, called = defaultdict[int, list[int]](list), dict[int, tuple[str, ...]]()
    for step in journal.steps:
        if isinstance(step.event, RequestArrived):
            request = step.event.request
            steps[request.program].append(request.step)
        elif isinstance(step.event, RequestEnded):
            called[step.event.request_id] = step.event.tools
    assert list(steps.values()) == [list(range(1, STEPS + 1))] * AGENTS
    assert sorted(called.values()) == [()] * AGENTS + [("edit",)] * AGENTS * (STEPS - 1)
    programs = front.cluster.scheduler.group.programs
    assert programs.returns["in_time"] > programs.returns["late"]
    assert replay(journal.header, list(journal.steps)) == list(journal.steps)
