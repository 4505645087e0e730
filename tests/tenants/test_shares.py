"""Whose share pays for a request, and what it weighs; and a flood beside a modest client on the real server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from front import Front, StartFront

from llmserve.engines.timed.server import FakeEngine
from llmserve.errors import BadRequest
from llmserve.live.calls import Calls
from llmserve.request import Call
from llmserve.settings.tree import ApiConfig, ServerConfig
from llmserve.tenants.key_file import KeyPolicy
from llmserve.tenants.shares import LEVEL_WEIGHT, share_of
from llmserve.wire.headers import QUEUE_HEADER, STREAM_HEADER

ALICE, BOB = {"authorization": "Bearer sk-1"}, {"authorization": "Bearer sk-2"}


def keys(tmp_path: Path, of_alice: str = "") -> ServerConfig:
    path = tmp_path / "keys.toml"
    path.write_text(f'[keys.alice]\nkey = "sk-1"\n{of_alice}\n[keys.bob]\nkey = "sk-2"\n')
    path.chmod(0o600)
    return ServerConfig(port=0, api_key_file=str(path))


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    calls: list[Call] = []
    submit = Calls.submit

    def watched(self: Calls, call: Call, *more: Any) -> Any:
        calls.append(call)
        return submit(self, call, *more)

    monkeypatch.setattr(Calls, "submit", watched)
    return calls


async def status(front: Front, key: dict[str, str], **fields: Any) -> int:
    async with front.post(headers=key, **fields) as response:
        await response.read()
        return int(response.status)


def test_a_refusal_says_whether_there_are_keys() -> None:
    for tier, priority, setting in (("priority", 0, "service tier"), ("", -1, "priority -1")):
        with pytest.raises(
            BadRequest, match=rf"without keys \(--api-key-file\), a request may not ask for the {setting}"
        ):
            share_of("", KeyPolicy(), "", tier, priority)
        with pytest.raises(BadRequest, match=f"this key may not ask for the {setting}"):
            share_of("alice", KeyPolicy(), "alice", tier, priority)


@pytest.mark.parametrize(
    ("tier", "priority", "level"),
    [
        *[("", 0, 0), ("auto", 0, 0), ("default", 0, 0), ("scale", 0, 0), ("flex", 0, 1), ("priority", 0, -1)],
        *[("", 2, 2), ("flex", 1, 2), ("", -2, -2), ("priority", 3, 2), ("", 3, 3), ("flex", 3, 3)],
    ],
)
def test_a_step_back_or_forward_is_a_share_of_its_own_of_less_or_more_weight(
    tier: str, priority: int, level: int
) -> None:
    policy = KeyPolicy(weight=2.0, tiers=("auto", "default", "flex", "priority"), priority=(-3, 3))
    share, weight = share_of("alice", policy, "alice", tier, priority)
    assert weight == 2.0 * LEVEL_WEIGHT**-level
    assert share == ("alice" if level == 0 else f"alice//{level:+d}")


def test_everybody_may_step_back_and_nobody_forward_without_a_word_in_the_key_file() -> None:
    assert share_of("alice", KeyPolicy(), "alice", "", 1_000_000) == ("alice//+3", LEVEL_WEIGHT**-3)
    with pytest.raises(BadRequest, match="may not ask for the priority -1; it may ask for 0 and above"):
        share_of("alice", KeyPolicy(), "alice", "", -1)
    with pytest.raises(BadRequest, match="may not ask for the service tier 'priority'; it may ask for auto, default"):
        share_of("alice", KeyPolicy(), "alice", "priority", 0)
    with pytest.raises(BadRequest, match="it may ask for from 0 to 1"):
        share_of("alice", KeyPolicy(priority=(0, 1)), "alice", "", 2)


async def test_shares_are_of_keys_where_there_are_keys(
    start_front: StartFront, tmp_path: Path, submitted: list[Call]
) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, server=keys(tmp_path, "weight = 3"))
        assert await status(front, {**ALICE, STREAM_HEADER: "chat"}) == 200
        assert await status(front, BOB, service_tier="flex", priority=1) == 200
        assert await status(front, BOB, priority=-1) == 400
    assert [(call.terms.share, call.terms.weight) for call in submitted] == [
        ("alice", 3.0),
        ("bob//+2", LEVEL_WEIGHT**-2),
    ]


@pytest.mark.parametrize(
    ("fair_by", "share"), [("stream", "alice/chat"), ("address", "127.0.0.1"), ("none", ""), ("key", "alice")]
)
async def test_shares_are_of_whom_fair_by_names(
    start_front: StartFront, tmp_path: Path, submitted: list[Call], fair_by: Any, share: str
) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, server=keys(tmp_path), limits=ApiConfig(fair_by=fair_by))
        assert await status(front, {**ALICE, STREAM_HEADER: "chat"}) == 200
    assert [call.terms.share for call in submitted] == [share]


async def test_the_clients_priority_is_not_the_engines(start_front: StartFront, tmp_path: Path) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, server=keys(tmp_path))
        assert await status(front, ALICE, priority=2) == 200
        assert [json.loads(body).get("priority") for body in engine.bodies] == [0]


async def test_a_flood_delays_another_key_by_the_next_free_slot_only(start_front: StartFront, tmp_path: Path) -> None:
    async with FakeEngine(step_s=0.005, slots=2) as engine:
        front = await start_front(engine, server=keys(tmp_path), slots=2, limits=ApiConfig())

        async def queued_ms(key: dict[str, str]) -> float:
            async with front.post(headers=key, max_tokens=10) as response:
                assert response.status == 200
                return float(response.headers[QUEUE_HEADER])

        flood = [asyncio.create_task(queued_ms(ALICE)) for _ in range(150)]
        await asyncio.sleep(0.1)
        modest = [await queued_ms(BOB) for _ in range(3)]
        assert not all(task.done() for task in flood), "the flood was over too soon"
        flooded = [await task for task in flood]
        assert median(modest) < 0.25 * median(flooded)
