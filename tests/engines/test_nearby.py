"""Engines on this machine that nobody has named."""

from __future__ import annotations

from pathlib import Path

import pytest
from front import StartFront
from missing_modules import without

from llmserve.commands import serve
from llmserve.engines.nearby import Nearby, nearby
from llmserve.engines.timed.server import FakeEngine
from llmserve.errors import ConfigError
from llmserve.settings.tree import Config, EngineConfig, SchedulingConfig, ServerConfig


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


async def test_an_engine_is_found_with_its_models_and_another_llmserve_is_not(
    start_front: StartFront, tmp_path: Path
) -> None:
    async with FakeEngine(model="m") as engine, FakeEngine(model="n", api_key="k") as locked:
        front = await start_front(engine)
        ports = (port_of(engine.url), port_of(front.url), port_of(locked.url))
        found = await nearby((*ports, 9))
    assert found == [Nearby(engine.url, ("m",)), Nearby(locked.url, None)]
    assert str(found[0]) == f"127.0.0.1:{ports[0]} (m)"
    assert "--engine-api-key" in str(found[1])


def test_only_a_server_of_which_nothing_is_said_looks_around() -> None:
    assert serve.looks_around(Config(), {})
    assert serve.looks_around(Config(server=ServerConfig(port=1)), {"port": "the command line"})
    for config, given in (
        (Config(engines=EngineConfig(engine=("embedded",))), "engine"),
        (Config(engines=EngineConfig(model="folder")), "model"),
        (Config(scheduling=SchedulingConfig(batch_size=4)), "batch_size"),
    ):
        assert not serve.looks_around(config, {given: "the command line"})


def test_what_is_found_is_served_and_without_anything_the_demo_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert serve.engines_of([Nearby("http://127.0.0.1:1", ("m",)), Nearby("http://127.0.0.1:2", None)]) == (
        "http://127.0.0.1:1",
    )
    assert serve.engines_of([]) == ("embedded",)
    without(monkeypatch, "torch")
    with pytest.raises(
        ConfigError, match=r"no engine answers on this machine \(ports 8000, .*\): name one with --engine"
    ):
        serve.engines_of([])
