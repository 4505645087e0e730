"""Agents over HTTP: what the scheduler, the client and the metrics learn of their programs."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from front import StartFront, until
from gateway.agent_turns import Turn
from gateway.claude_conversation import CLAUDE
from gateway.codex_conversation import CODEX
from gateway.test_agents import playing
from tool_engine import ToolEngine, turn

from llmserve.__main__ import main
from llmserve.engines.timed.server import FakeEngine
from llmserve.live.journal import read, replay
from llmserve.observe.scrape import Scrape
from llmserve.scheduling.messages import RequestArrived, RequestEnded
from llmserve.scheduling.programs import tools
from llmserve.server.serving import serving
from llmserve.settings.tree import ApiConfig, Config, EngineConfig, LiveConfig, ServerConfig

HOLD_S = 1000.0


@pytest.mark.parametrize(
    ("turns", "headers", "source", "tool"),
    [
        (CLAUDE, {"x-claude-code-session-id": "s"}, "claude_code", "Bash"),
        (CLAUDE, {}, "claude_code", "Bash"),  # by the `user_id` in its body
        (CODEX, {"session_id": "s", "conversation_id": "s"}, "codex", "shell"),
        (CODEX, {}, "answer", "shell"),
    ],
)
async def test_the_scheduler_is_told_of_programs_steps_and_tools(
    start_front: StartFront, turns: list[Turn], headers: dict[str, str], source: str, tool: str
) -> None:
    asked = [turn for turn in turns if b'"tools"' in turn.asked and "count" not in turn.path]
    told = []
    async with playing(asked) as (url, _):
        front = await start_front(url)
        for turn in asked:
            async with front.session.post(front.url + turn.path, data=turn.asked, headers=headers) as response:
                await response.read()
                told.append(int(response.headers["x-llmserve-program"], 16))
        async with front.session.get(f"{front.url}/metrics") as response:
            scrape = Scrape(await response.text())
    journal = front.cluster.journal
    requests = [step.event.request for step in journal.steps if isinstance(step.event, RequestArrived)]
    tools = [step.event.tools for step in journal.steps if isinstance(step.event, RequestEnded)]
    assert [request.step for request in requests] == [1, 2]
    assert told == [request.program for request in requests]
    assert len(set(told)) == len({request.kind for request in requests}) == 1
    assert tool in tools[0]
    assert tools[1] == ()
    assert scrape.by("llmserve_program_requests_total", "source")[source] >= 1
    assert replay(journal.header, list(journal.steps)) == list(journal.steps)


async def test_a_chat_is_of_no_program(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine)
        async with front.post() as response:
            assert "x-llmserve-program" not in response.headers
    requests: list[Any] = [step.event for step in front.cluster.journal.steps if isinstance(step.event, RequestArrived)]
    assert (requests[0].request.program, requests[0].request.step) == (0, 0)


async def test_a_sites_own_header_names_the_session(start_front: StartFront) -> None:
    told = []
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, limits=ApiConfig(session_from=("header:X-Chat-Id",)))
        for chat in ("one", "two", "one"):
            async with front.post(headers={"X-Chat-Id": chat}) as response:
                told.append(response.headers["x-llmserve-program"])
    assert told[0] == told[2] != told[1]


async def test_what_an_engine_keeps_for_programs_is_in_the_metrics_once_programs_come(start_front: StartFront) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "edit", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "mend it"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    names = ("llmserve_engine_ledger_tokens", "llmserve_engine_kept_programs")

    async def scraped() -> list[list[float]]:
        async with front.session.get(f"{front.url}/metrics") as response:
            scrape = Scrape(await response.text())
        return [list(scrape.by(name, "engine").values()) for name in names]

    async with FakeEngine(step_s=0.001, slots=4, tokens_max=10_000) as engine:
        front = await start_front(engine)
        async with front.post(max_tokens=2) as response:
            assert response.status == 200
        assert await scraped() == [[], []]
        async with front.post(messages=messages, max_tokens=2, headers={"x-llmserve-session": "s"}) as response:
            assert response.status == 200
        assert await scraped() == [[0.0], [0.0]]


async def test_what_is_learnt_of_programs_and_the_ids_of_sessions_outlive_a_restart(tmp_path: Path) -> None:
    """The agent has two sessions; the second one goes on after the restart."""
    server = ServerConfig(port=0, state=str(tmp_path / "kept"), journal=str(tmp_path / "journal"))
    asked = [turn for turn in CODEX if b'"tools"' in turn.asked]
    told: list[list[str]] = []
    async with playing(asked * 3) as (url, _):
        config = Config(
            server=server, engines=EngineConfig(engine=(url,), slots=8), live=LiveConfig(probe_every_s=0.05)
        )
        for sessions in (("a", "b"), ("b",)):
            async with serving(config) as (cluster, front), aiohttp.ClientSession() as client:
                await until(lambda cluster=cluster: all(cluster.engines_ready.values()))
                for session in sessions:
                    told.append([])
                    for turn in asked:
                        headers = {"session_id": session}
                        async with client.post(front + turn.path, data=turn.asked, headers=headers) as response:
                            await response.read()
                            told[-1].append(response.headers["x-llmserve-program"])
                learnt = cluster.scheduler.group.programs
    header, steps = read(tmp_path / "journal")
    assert replay(header, steps) == steps
    before = header.programs
    (kind,) = before.kinds.kinds
    assert {step.event.request.kind for step in steps if isinstance(step.event, RequestArrived)} == {kind}
    assert [tools for tools, _ in before.tools] == [("shell", "apply_patch", "local_shell", "update_plan")]
    assert [len(seconds) for _, seconds in before.tools] == [1]
    assert learnt.tools.learnt() == before.tools
    assert told[0] != told[1] == told[2]


async def test_gateways_of_the_same_groups_give_a_session_one_id(start_front: StartFront, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("gateways: sk-gateways\n")
    (tmp_path / "key").chmod(0o600)
    async with FakeEngine(step_s=0.001) as engine:
        group = await start_front(engine, server=ServerConfig(port=0, gateway_key_file=str(tmp_path / "key")))
        gateways = [
            await start_front(
                engines=EngineConfig(engine=(group.url,), engines_are_groups=True, engine_api_key="sk-gateways")
            )
            for _ in range(2)
        ]
        programs = []
        for gateway in gateways:
            async with gateway.post(headers={"x-llmserve-session": "s"}, tools=[]) as response:
                assert response.status == 200
                programs.append(response.headers["x-llmserve-program"])
    arrived = [step.event.request for step in group.cluster.journal.steps if isinstance(step.event, RequestArrived)]
    assert [f"{request.program:012x}" for request in arrived] == programs
    assert len(set(programs)) == 1


async def test_who_runs_is_held_and_waits_is_listed_for_the_operator(
    start_front: StartFront, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tool of `a` takes longer than the test; `b` runs in the rest of the cache, and `c` waits for room."""
    monkeypatch.setattr(tools, "UNKNOWN_S", HOLD_S)
    (tmp_path / "admin").write_text("ops: sk-admin\n")
    (tmp_path / "admin").chmod(0o600)
    server = ServerConfig(port=0, admin_key_file=str(tmp_path / "admin"))
    async with ToolEngine(step_s=0.05, slots=8, tokens_max=2_000) as engine:
        front = await start_front(engine, server=server)
        await turn(front, "warm", 2)
        asking = [asyncio.create_task(turn(front, "a", 2, tool_s=1000.0, words=800))]
        programs = front.cluster.scheduler.group.programs
        await until(lambda: bool(programs.held()))
        asking.append(asyncio.create_task(turn(front, "b", 1, words=100, tokens=300)))
        await until(lambda: any(queued.run for queued in front.cluster.scheduler.requests.values()))
        asking.append(asyncio.create_task(turn(front, "c", 1, words=1200)))
        await until(lambda: front.cluster.scheduler.waiting == 1)
        headers = {"authorization": "Bearer sk-admin"}
        async with front.session.get(f"{front.url}/admin/queue", headers=headers) as response:
            told = await response.json()
        monkeypatch.setenv("COLUMNS", "200")
        words = ["queue", front.url, "--admin-key-file", str(tmp_path / "admin")]
        assert await asyncio.to_thread(main, words) == 0
        printed = capsys.readouterr().out
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    states = {row["state"]: row for row in told["programs"]}
    assert told["program_counts"] == {"running": 1, "held": 1, "waiting": 1}
    assert len({row["program"] for row in told["programs"]}) == 3
    assert states["held"]["tools"] == ["edit"]
    assert states["held"]["step"] == 1
    assert 0.0 < states["held"]["over_s"] <= HOLD_S
    assert states["held"]["engine"] == states["running"]["engine"] != states["waiting"]["engine"] == ""
    assert states["waiting"]["tokens"] > states["running"]["tokens"]
    assert "3 programs: 1 run, 1 wait, 1 are held over a tool call" in printed
    assert all(row["program"] in printed for row in told["programs"])
    assert re.search(r"its room is kept for \d+\.\d s", printed)
    assert "edit" in printed
