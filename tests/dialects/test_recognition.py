"""Each program of tests/dialects/programs.py is recognised, and read, by what it says of itself."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from dialects.programs import (
    BEHIND_HTML,
    LLAMA,
    LLAMA_PROPS,
    LLAMA_SILENT,
    LLAMA_SLOTS,
    LM_STUDIO,
    OLLAMA,
    PLAIN,
    PROGRAMS,
    SGLANG,
    SGLANG_GETS,
    SGLANG_INFO,
    SGLANG_PLAIN,
    VLLM,
    Program,
    Running,
    models,
    said,
)
from engines.lying import http
from front import StartFront, until

from llmserve.engines import probing
from llmserve.engines.dialects import DIALECTS, Priority
from llmserve.engines.engine import EngineError
from llmserve.engines.openai import OpenAIEngine
from llmserve.engines.probing import models_of
from llmserve.engines.slots import SlotsLearner
from llmserve.request import EngineInfo
from llmserve.settings.tree import EngineConfig, LiveConfig

PROBES = 3


@asynccontextmanager
async def probed(program: Program, **info: Any) -> AsyncIterator[tuple[OpenAIEngine, Running]]:
    async with Running(program) as running:
        engine = OpenAIEngine(EngineInfo("e", 8, False, **info), running.url, slots=SlotsLearner(8))
        try:
            yield engine, running
        finally:
            await engine.close()


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
async def test_a_program_is_recognised_and_read(program: Program) -> None:
    async with probed(program) as (engine, running):
        for _ in range(PROBES):
            health = await engine.probe()
        assert str(health.program) == program.shown
        assert health.told == program.told
        assert {model.context_tokens for model in health.models} == {program.context}
        assert [path for path in program.untouched if running.asked(path)] == []


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
async def test_a_path_that_says_nothing_is_asked_once(program: Program) -> None:
    """What an engine does not have is an error in its log each time that it is asked for."""
    async with probed(program) as (engine, running):
        for _ in range(PROBES):
            await engine.probe()
        paths = {head.split()[1].decode() for head in running.heads}
        missing = paths - set(program.gets) - {"/health", "/metrics"}
        assert {path: running.asked(path) for path in missing} == dict.fromkeys(missing, 1)
        assert {path: running.asked(path) for path in ("/v1/models",)} == {"/v1/models": PROBES}


def test_every_known_dialect_is_some_program() -> None:
    shown = {program.shown.split()[0] for program in PROGRAMS}
    assert {dialect.name.split()[0] for dialect in DIALECTS} <= shown


async def test_slots_that_an_engine_tells_are_no_guess() -> None:
    async with probed(LLAMA) as (engine, _):
        health = await engine.probe()
        assert (health.slots, health.slots_found) == (2, True)
    async with probed(LLAMA_SILENT) as (engine, _):
        assert not (await engine.probe()).slots_found


async def test_an_engine_without_any_model_yet_is_up() -> None:
    """Ollama's list is null until a model has been pulled."""
    empty = Program("", {**OLLAMA.gets, "/v1/models": said({"object": "list", "data": None})}, "")
    async with probed(empty) as (engine, running):
        assert (await engine.probe()).models == ()
        running.become(OLLAMA)
        assert str((await engine.probe()).program) == OLLAMA.shown


async def test_a_program_that_takes_the_place_of_another_is_recognised() -> None:
    async with probed(LLAMA) as (engine, running):
        await engine.probe()
        running.become(OLLAMA)
        health = await engine.probe()
        assert (str(health.program), health.told) == (OLLAMA.shown, OLLAMA.told)


async def test_another_version_with_the_same_models_is_seen_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async with probed(LLAMA) as (engine, running):
        await engine.probe()
        newer = {"default_generation_settings": {"n_ctx": 1024}, "total_slots": 4, "build_info": "b7000-1"}
        running.become(Program("", {**LLAMA.gets, "/props": said(newer)}, ""))
        assert str((await engine.probe()).program) == "llama.cpp b6000", "asked now and then only"
        monkeypatch.setattr(probing, "SETTINGS_S", 0.0)
        health = await engine.probe()
        assert (str(health.program), health.slots) == ("llama.cpp b7000", 4)


async def test_a_refused_connection_makes_the_probe_look_again() -> None:
    async with probed(LLAMA) as (engine, running):
        await engine.probe()
        before = running.asked("/props")
        await engine.probe()
        engine._prober.look_again()
        await engine.probe()
        assert running.asked("/props") == before + 1


async def test_a_restart_with_more_to_tell_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the program did not have before may be there now."""
    monkeypatch.setattr(probing, "SETTINGS_S", 0.0)
    async with probed(LLAMA_SLOTS) as (engine, running):
        assert (await engine.probe()).told.waiting is None
        running.become(Program("", {**LLAMA.gets, "/props": said({**LLAMA_PROPS, "total_slots": 1})}, ""))
        await engine.probe()
        assert (await engine.probe()).told.waiting == 3


async def test_a_probe_without_metrics_forgets_no_cache() -> None:
    async with probed(VLLM) as (engine, running):
        await engine.probe()
        running.become(Program("", {**VLLM.gets, "/metrics": http(b"", status="503 Busy")}, ""))
        health = await engine.probe()
        assert (health.load_known, health.tokens_max) == (False, 1280)


# ---- priority ----


def sglang(**changed: Any) -> Program:
    return Program("", {**SGLANG_GETS, "/server_info": said({**SGLANG_INFO, **changed})}, "")


@pytest.mark.parametrize(
    ("program", "sign"),
    [
        (VLLM, 1),
        (PLAIN, 1),
        (SGLANG, -1),
        (sglang(schedule_low_priority_values_first=True), 1),
        (SGLANG_PLAIN, 0),
        (LLAMA, 0),
        (OLLAMA, 0),
    ],
    ids=["vLLM", "unknown", "SGLang", "SGLang, lower first", "SGLang without", "llama.cpp", "Ollama"],
)
async def test_the_priority_of_a_turn_runs_as_the_engine_has_it(program: Program, sign: int) -> None:
    async with probed(program) as (engine, _):
        await engine.probe()
        assert engine._prober.sign == sign


@pytest.mark.parametrize("program", [SGLANG_PLAIN, OLLAMA, LLAMA], ids=str)
async def test_an_engine_that_knows_no_priority_is_refused_where_priority_is_wanted(program: Program) -> None:
    async with probed(program, by_priority=True) as (engine, _):
        with pytest.raises(EngineError, match="does not go by priority: start it with one that does"):
            await engine.probe()


async def test_preemption_by_priority_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    preempts = sglang(disable_priority_preemption=False)
    for by_priority in (True, False):
        caplog.clear()
        async with probed(preempts, by_priority=by_priority) as (engine, _):
            for _ in range(PROBES):
                await engine.probe()
        assert caplog.text.count("--disable-priority-preemption") == by_priority


async def test_sglang_runs_the_first_in_order_first(start_front: StartFront) -> None:
    """Its largest priority is first, so the turn goes out with the other sign."""
    async with Running(SGLANG) as running:
        engines = EngineConfig(engine=(running.url,), slots=4, engine_priority=True)
        front = await start_front(running.url, engines=engines)
        for tokens in (400, 4):
            async with front.post(model="qwen", max_tokens=tokens) as response:
                assert response.status == 200
        sent = [json.loads(body)["priority"] for body in running.requests]
        assert all(priority < 0 for priority in sent), sent


# ---- what operators and clients see ----


async def test_the_log_says_in_one_line_what_was_found(
    start_front: StartFront, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "llmserve")
    async with Running(LLAMA) as running:
        await start_front(running.url, engines=EngineConfig(engine=(running.url,)))
        name = running.url.removeprefix("http://")
        assert f"engine {name}: llama.cpp b6000, 1 model, 2 slots: demo.gguf" in caplog.text
    async with Running(LM_STUDIO) as running:
        await start_front(running.url, engines=EngineConfig(engine=(running.url,)))
        assert "LM Studio, 2 models, 2 slots (learning): qwen2-vl, granite" in caplog.text


async def test_a_list_of_models_keeps_what_the_engine_says_of_each(start_front: StartFront) -> None:
    async with Running(VLLM) as running:
        front = await start_front(running.url)
        async with front.session.get(front.url + "/v1/models") as response:
            (model,) = (await response.json())["data"]
            server = response.headers["server"]
        assert (model["created"], model["owned_by"], model["max_model_len"]) == (1_790_000_000, "vllm", 4096)
        assert server == "llmserve", "another llmserve in front is not to take this one for vLLM"


async def test_a_time_of_creation_that_is_always_now_changes_nothing(start_front: StartFront) -> None:
    """vLLM and llama.cpp say the time of the answer."""
    async with Running(VLLM) as running:
        front = await start_front(running.url, live=LiveConfig(probe_every_s=0.02))
        later = json.loads(VLLM.gets["/v1/models"].partition(b"\r\n\r\n")[2])
        later["data"][0]["created"] += 1
        running._probes["/v1/models"] = said(later)
        before = running.asked("/v1/models")
        await until(lambda: running.asked("/v1/models") >= before + 2)
        async with front.session.get(front.url + "/v1/models") as response:
            assert (await response.json())["data"][0]["created"] == 1_790_000_000


async def test_the_kind_of_an_engine_is_in_the_metrics_and_in_the_list_of_engines(start_front: StartFront) -> None:
    async with Running(LLAMA) as running:
        front = await start_front(running.url)
        async with front.session.get(front.url + "/metrics") as response:
            text = await response.text()
        name = running.url.removeprefix("http://")
        assert f'llmserve_engine_info{{engine="{name}",kind="llama.cpp",version="b6000"}} 1' in text


async def test_a_name_without_a_tag_is_the_latest(start_front: StartFront) -> None:
    """As Ollama takes it. A model of that very name comes first."""
    listed = models("llama3.2:latest", "qwen3:8b", owner="library")
    async with Running(Program("", {**OLLAMA.gets, "/v1/models": said(listed)}, "")) as running:
        front = await start_front(running.url)
        for name, status in (("llama3.2", 200), ("llama3.2:latest", 200), ("qwen3", 404)):
            async with front.post(model=name) as response:
                assert response.status == status
        assert [json.loads(body)["model"] for body in running.requests] == ["llama3.2:latest"] * 2


# ---- reading ----


def test_priorities_are_named_as_they_run() -> None:
    assert [priority.value for priority in Priority] == ["lower first", "higher first", "none"]


@pytest.mark.parametrize(
    "body", [b'{"data": null}', b"null", b"[", b"<html>", b'{"object": "error"}', b'{"models": 3}', b""]
)
def test_what_is_no_list_is_no_list(body: bytes) -> None:
    assert models_of(body) is None


async def test_html_for_everything_is_no_program(caplog: pytest.LogCaptureFixture) -> None:
    async with probed(BEHIND_HTML) as (engine, _):
        health = await engine.probe()
        assert (health.load_known, health.paths, health.told.version) == (False, None, "")
