"""What each key uses of each model."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from front import StartFront, until
from test_energy import profile

from llmserve.engines.timed.server import FakeEngine
from llmserve.live.journal import Step
from llmserve.observe.counters import Families
from llmserve.observe.key_usage import KEYS_MAX, KeyUsage
from llmserve.observe.table import TABLE
from llmserve.request import Batch, EngineInfo, Request
from llmserve.scheduling.messages import EngineLost, EngineReady, RequestCancelled, RequestEnded, StartBatch, TimerFired
from llmserve.settings.dispatch import DispatchConfig
from llmserve.settings.tree import ServerConfig


class Meter:
    """100 W, from second 0 on."""

    source, of_all_work = "modelled", True

    def joules(self, now_s: float) -> float:
        return 100.0 * now_s


def start(now_s: float, *requests: Request, engine: str = "e") -> Step:
    return Step(now_s, TimerFired(), (StartBatch(engine, Batch(1, 0, requests, 0.0, len(requests))),))


def end(now_s: float, request_id: int, outcome: Any = "completed", engine: str = "e") -> Step:
    return Step(now_s, RequestEnded(engine, request_id, outcome, 1.0), ())


def usage_of(*steps: Step, models: Collection[str] = ("m",), measured: bool = True) -> KeyUsage:
    usage = KeyUsage(lambda: models, Families(TABLE))
    usage.meter = Meter() if measured else None
    for step in steps:
        usage.observe(step)
    return usage


def row(usage: KeyUsage, request_id: int) -> dict[str, Any]:
    """The row of a key with this one request."""
    usage.ended(f"key{request_id}", "m", request_id, 7.0, 9.0, 0.5)
    (own,) = [row for row in usage.shown() if row["key"] == f"key{request_id}"]
    return own


def test_requests_that_run_together_share_the_joules_of_each_moment() -> None:
    """0 to 10 s: one alone.  10 to 20 s: with another of three answers.  20 to 25 s: the other alone."""
    one, other = Request(1), Request(2, choices=3)
    usage = usage_of(start(10.0, one), start(20.0, other), end(30.0, 1), end(35.0, 2))
    first, second = row(usage, 1), row(usage, 2)
    assert (first["slot_seconds"], first["joules"]) == (20.0, 1_000.0 + 1_000.0 / 4)
    assert (second["slot_seconds"], second["joules"]) == (45.0, 3_000.0 / 4 + 500.0)
    assert first["joules"] + second["joules"] == 100.0 * 25, "of all the time in which anything ran"
    assert (first["requests"], first["prompt_tokens"], first["output_tokens"], first["money"]) == (1, 7, 9, 0.5)


def test_idle_engines_are_nobodys() -> None:
    usage = usage_of(start(0.0, Request(1)), end(1.0, 1), start(100.0, Request(2)), end(101.0, 2))
    assert (row(usage, 1)["joules"], row(usage, 2)["joules"]) == (100.0, 100.0)


def test_a_request_that_runs_again_pays_for_both_runs() -> None:
    again = (
        start(0.0, Request(1)),
        Step(2.0, EngineLost("e", ()), (StartBatch("f", Batch(2, 0, (Request(1),), 0.0, 1)),)),
        end(3.0, 1, engine="e"),  # a late word of the lost engine
        end(7.0, 1, engine="f"),
    )
    assert row(usage_of(*again), 1)["slot_seconds"] == 7.0


def test_a_request_that_never_ran_cost_nothing() -> None:
    usage = usage_of(Step(1.0, RequestCancelled(1), ()))
    assert (row(usage, 1)["slot_seconds"], row(usage, 1)["joules"]) == (0.0, 0.0)


def test_without_a_meter_there_are_no_joules() -> None:
    assert "joules" not in row(usage_of(start(0.0, Request(1)), end(1.0, 1), measured=False), 1)


def test_keys_beyond_a_thousand_share_a_row() -> None:
    usage = usage_of()
    for number in range(KEYS_MAX + 5):
        usage.ended(f"key{number}", "m", number, 1.0, 1.0, 0.0)
    rows = {row["key"]: row["requests"] for row in usage.shown()}
    assert len(rows) == KEYS_MAX + 1
    assert rows["other"] == 5


def test_models_that_are_gone_are_added_up() -> None:
    models = ["m", "a", "b"]
    usage = usage_of(models=models)
    for model in models:
        usage.ended("alice", model, 1, 1.0, 10.0, 0.0)
    assert len(usage.shown()) == 3
    del models[1:]
    usage.observe(Step(0.0, EngineReady(EngineInfo("e", 1, False)), ()))
    assert {row["model"]: row["output_tokens"] for row in usage.shown()} == {"m": 10, "other": 20}


def test_models_that_no_engine_lists_share_a_row() -> None:
    """While no engine is up, any name is let in to wait."""
    usage = usage_of(models=("m",))
    for number in range(100):
        usage.ended("alice", f"invented{number}", number, 1.0, 1.0, 0.0)
        usage.refused("alice", f"invented{number}")
    assert [(row["model"], row["requests"], row["refused"]) for row in usage.shown()] == [("other", 100, 100)]


async def test_operators_see_what_keys_use(start_front: StartFront, tmp_path: Path) -> None:
    keys, admin = tmp_path / "keys.toml", tmp_path / "admin"
    keys.write_text(
        '[keys.alice]\nkey = "sk-1"\ntokens_per_day = 1000\nmoney_per_month = 5\nrequests_per_minute = 3\n'
        '[keys.bob]\nkey = "sk-2"\n[prices.fake]\ninput = 1_000_000\noutput = 10_000\n'
    )
    admin.write_text("admin\n")
    profile().save(tmp_path / "profile.json")
    async with FakeEngine(step_s=0.005) as engine:
        front = await start_front(
            engine,
            server=ServerConfig(
                port=0, api_key_file=str(keys), admin_key_file=str(admin), usage_file=str(tmp_path / "usage.sqlite")
            ),
            dispatch=DispatchConfig(profile=(str(tmp_path / "profile.json"),)),
        )

        async def ask(key: str, tokens: int, **fields: Any) -> int:
            body = {"model": "fake", "prompt": "x", "max_tokens": tokens, **fields}
            headers = {"authorization": f"Bearer {key}"}
            async with front.session.post(f"{front.url}/v1/completions", json=body, headers=headers) as response:
                await response.read()
                return int(response.status)

        assert [await ask("sk-1", 20), await ask("sk-1", 30, stream=True), await ask("sk-2", 10)] == [200, 200, 200]
        assert [await ask("sk-1", 2_000, min_tokens=2_000), await ask("sk-1", 1)] == [400, 429]
        await until(lambda: not front.cluster.scheduler.requests)
        async with front.session.get(f"{front.url}/admin/usage", headers={"authorization": "Bearer admin"}) as response:
            shown = await response.json()
        async with front.session.get(f"{front.url}/metrics", headers={"authorization": "Bearer admin"}) as response:
            metrics = await response.text()
        async with front.session.get(f"{front.url}/admin/usage", headers={"authorization": "Bearer sk-1"}) as response:
            assert response.status == 401
    rows = {(row["key"], row["model"]): row for row in shown["usage"]}
    alice, bob = rows["alice", "fake"], rows["bob", "fake"]
    assert (alice["requests"], alice["prompt_tokens"], alice["output_tokens"]) == (2, 2, 50)
    assert alice["money"] == pytest.approx(2 + 0.5)
    assert (alice["refused"], rows["alice", ""]["refused"]) == (1, 1)
    assert alice["slot_seconds"] >= 50 * 0.005
    assert alice["joules"] > 0
    assert (bob["requests"], bob["output_tokens"], bob["money"]) == (1, 10, pytest.approx(1.1))
    assert shown["budgets"] == [
        {"key": "alice", "unit": "tokens", "per": "day", "limit": 1000, "spent": 52, "reserved": 0},
        {"key": "alice", "unit": "money", "per": "month", "limit": 5, "spent": pytest.approx(2.5), "reserved": 0},
    ]
    assert 'llmserve_key_output_tokens_total{key="alice",model="fake"} 50.0' in metrics
