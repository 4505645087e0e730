"""Spans of requests: a collector gets them by OTLP, and the engine gets the name of its span."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from engines.lying import LyingEngine, http
from front import Front, StartFront, until
from missing_modules import without
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from llmserve.engines.timed.server import FakeEngine, Fault
from llmserve.errors import ConfigError
from llmserve.runtime.installation import pip_install
from llmserve.scheduling.messages import DrainRequested
from llmserve.server.serving import checked
from llmserve.settings.tree import Config, ServerConfig

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ALL = ServerConfig(port=0, traces_sample=1.0)


class Collector:
    """Spans that have arrived, by name."""

    def __init__(self) -> None:
        self.spans: dict[str, Any] = {}
        self.service = ""

    async def take(self, request: web.Request) -> web.Response:
        message = ExportTraceServiceRequest.FromString(await request.read())
        for resource in message.resource_spans:
            self.service = attributes(resource.resource)["service.name"]
            for scope in resource.scope_spans:
                self.spans |= {span.name: span for span in scope.spans}
        return web.Response()


def attributes(span: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    collector, app = Collector(), web.Application()
    app.router.add_post("/v1/traces", collector.take)
    async with TestServer(app) as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", str(server.make_url("")).rstrip("/"))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        yield collector


async def ask(front: Front, headers: dict[str, str] | None = None, **fields: Any) -> int:
    async with front.post(headers=headers, **fields) as response:
        await response.read()
        return int(response.status)


def asked(engine: LyingEngine) -> list[bytes]:
    """The heads of completions, without those of probes."""
    return [head for head in engine.heads if head.startswith(b"POST")]


async def test_a_request_has_a_span_at_the_gateway_one_in_the_queue_and_one_on_the_engine(
    start_front: StartFront, collector: Collector
) -> None:
    async with FakeEngine(step_s=0.01) as engine:
        front = await start_front(engine, server=ALL)
        assert await ask(front, stream=True, max_tokens=5) == 200
        await until(lambda: len(collector.spans) == 3)
    name = engine.url.removeprefix("http://")
    gateway, queue, run = (collector.spans[span] for span in ("POST /v1/chat/completions", "queue", f"engine {name}"))
    assert collector.service == "llmserve"
    assert gateway.trace_id == queue.trace_id == run.trace_id
    assert (gateway.parent_span_id, queue.parent_span_id, run.parent_span_id) == (b"", gateway.span_id, gateway.span_id)
    assert gateway.start_time_unix_nano <= queue.start_time_unix_nano <= queue.end_time_unix_nano
    assert queue.end_time_unix_nano <= run.start_time_unix_nano < run.end_time_unix_nano <= gateway.end_time_unix_nano
    assert run.end_time_unix_nano - run.start_time_unix_nano >= 0.04e9
    (event,) = run.events
    assert run.start_time_unix_nano < event.time_unix_nano < run.end_time_unix_nano
    asked = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "fake", "gen_ai.request.max_tokens": 5}
    assert asked.items() <= attributes(gateway).items()
    assert {**asked, "gen_ai.usage.output_tokens": 5, "llmserve.attempt": 1}.items() <= attributes(run).items()
    assert attributes(gateway)["http.response.status_code"] == 200
    assert attributes(gateway)["llmserve.request_id"] == "llmserve-1"
    assert attributes(queue)["llmserve.order"] == "boost"
    assert attributes(queue)["llmserve.forecast"] in ("none", "recent")


async def test_the_engine_gets_the_name_of_its_span_and_the_clients_trace_goes_on(
    start_front: StartFront, collector: Collector
) -> None:
    body = (
        b'{"choices": [{"index": 0, "finish_reason": "stop"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}'
    )
    async with LyingEngine(http(body)) as engine:
        front = await start_front(engine.url, server=ServerConfig(port=0, traces_sample=1e-9))
        assert await ask(front, {"traceparent": f"00-{TRACE}-{PARENT}-01"}) == 200
        await until(lambda: len(collector.spans) == 3)
        traced = collector.spans["POST /v1/chat/completions"]
        run = collector.spans[f"engine {engine.url.removeprefix('http://')}"]
        assert (traced.trace_id.hex(), traced.parent_span_id.hex()) == (TRACE, PARENT)
        assert f"traceparent: 00-{TRACE}-{run.span_id.hex()}-01".encode() in asked(engine)[-1]
        collector.spans.clear()
        not_sampled = f"00-{TRACE}-{PARENT}-00"
        assert await ask(front, {"traceparent": not_sampled}) == 200
        assert await ask(front, {"traceparent": "no such thing"}) == 200
        assert f"traceparent: {not_sampled}".encode() in asked(engine)[-2], "what is not traced is passed on as it came"
    assert not collector.spans


async def test_a_retry_has_a_span_on_each_engine(start_front: StartFront, collector: Collector) -> None:
    async with FakeEngine() as bad, FakeEngine() as good:
        bad.fault = Fault("500")
        front = await start_front(bad, good, server=ALL, slots=1)
        assert await asyncio.gather(*(ask(front, max_tokens=2) for _ in range(2))) == [200, 200]
        await until(lambda: len(collector.spans) == 4)
    failed, worked = (collector.spans[f"engine {engine.url.removeprefix('http://')}"] for engine in (bad, good))
    assert attributes(failed)["error.type"] == "fault"
    assert attributes(worked)["llmserve.outcome"] == "completed"


async def test_a_request_that_the_queue_refuses_ends_its_trace(start_front: StartFront, collector: Collector) -> None:
    async with FakeEngine(step_s=0.01) as engine:
        front = await start_front(engine, server=ALL)
        assert await ask(front, max_tokens=1) == 200
        await until(lambda: len(collector.spans) == 3)
        collector.spans.clear()
        front.cluster.driver.step(DrainRequested())
        assert await ask(front) == 503
        await until(lambda: len(collector.spans) == 2)
    gateway = collector.spans["POST /v1/chat/completions"]
    assert attributes(gateway)["error.type"] == "draining"
    assert attributes(gateway)["http.response.status_code"] == 503


def test_without_the_setting_nothing_of_opentelemetry_is_imported() -> None:
    code = "import sys, llmserve.server.serving, llmserve.commands.serve; print('opentelemetry.sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_without_the_extra_its_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "opentelemetry")
    with pytest.raises(ConfigError, match=f"traces_sample needs opentelemetry: {re.escape(pip_install('traces'))}"):
        checked(Config(server=ALL))
