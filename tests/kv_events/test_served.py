"""A server in front of an engine that tells what its prefix cache stores and drops."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from zlib import crc32

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from front import Front, StartFront, until
from missing_modules import without
from publisher import Publisher, removed, stored

from llmserve.engines.timed.body import FakeBody
from llmserve.engines.timed.server import FakeEngine
from llmserve.errors import ConfigError
from llmserve.kv_events.part import KvEvents
from llmserve.runtime.installation import pip_install
from llmserve.scheduling.messages import CacheChanged
from llmserve.settings.tree import Config, EngineConfig

SYSTEM = "you are a helpful program and never tire of long prompts " * 40
TALK = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "hello"}]
BLOCK = 32  # tokens


def tokens_of(body: bytes) -> list[int]:
    """The fake engine's words as tokens."""
    return [crc32(word) for word in msgspec.json.decode(body, type=FakeBody).prompts.split()]


@asynccontextmanager
async def tokenizing(engine: FakeEngine, status: int = 200) -> AsyncIterator[tuple[str, list[bytes]]]:
    """(URL, bodies to tokenize) of the engine with a tokenizer, which answers with this status."""
    bodies: list[bytes] = []

    async def answer(request: web.Request) -> web.Response:
        data = await request.read()
        if request.path == "/tokenize":
            bodies.append(data)
            return web.json_response({"tokens": tokens_of(data)}, status=status)
        async with session.request(request.method, engine.url + request.path, data=data) as told:
            return web.Response(status=told.status, body=await told.read(), content_type=told.content_type)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with aiohttp.ClientSession() as session, TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/"), bodies


async def ask(front: Front) -> None:
    async with front.post(messages=TALK) as response:
        assert response.status == 200


async def counted(front: Front, engine: str, event: str, number: int) -> None:
    """Wait until the metric has counted so many."""
    line, text = f'llmserve_engine_cache_events_total{{engine="{engine}",event="{event}"}} {number}.0\n', ""
    async with asyncio.timeout(30.0):
        while line not in text:
            async with front.session.get(front.url + "/metrics") as response:
                text = await response.text()


def drops(front: Front) -> list[CacheChanged]:
    events = [step.event for step in front.cluster.journal.steps]
    return [event for event in events if isinstance(event, CacheChanged) and event.removed]


async def test_the_end_of_a_prompt_that_the_engine_drops_is_no_hit(start_front: StartFront, tmp_path: Path) -> None:
    async with (
        FakeEngine(step_s=0) as fake,
        tokenizing(fake) as (url, bodies),
        Publisher(tmp_path).running() as publisher,
    ):
        sockets = f"{publisher.endpoint},{publisher.replay}"
        front = await start_front(engines=EngineConfig(engine=(url,), slots=8, kv_events=(sockets,)))
        await publisher.followed()
        name = url.removeprefix("http://")
        await publisher.tell(stored([1_000], list(range(BLOCK))))
        await counted(front, name, "messages", 1)
        await ask(front)
        tokens = tokens_of(fake.bodies[-1])
        hashes = list(range(len(tokens) // BLOCK))
        await publisher.tell(stored(hashes, tokens[: BLOCK * len(hashes)]))
        await counted(front, name, "tied", 1)
        await counted(front, name, "messages", 2)
        await ask(front)
        await ask(front)
        assert len(bodies) == 1, "a prompt that is tied is not asked for again"
        blocks = front.cluster.scheduler.group.pool.residency._cache(name).blocks
        assert len(blocks) == 4
        await publisher.tell(removed(*reversed(hashes[4:])))
        await until(lambda: bool(drops(front)))
        [change] = drops(front)
        assert (change.engine, len(change.removed)) == (name, 3)
        assert len(blocks) == 1, "4 of the engine's blocks have one of the prompt's, of some 100 tokens"


async def test_an_engine_without_a_tokenizer_is_asked_once(
    start_front: StartFront, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        FakeEngine(step_s=0) as fake,
        tokenizing(fake, status=404) as (url, bodies),
        Publisher(tmp_path).running() as publisher,
    ):
        front = await start_front(engines=EngineConfig(engine=(url,), slots=8, kv_events=(publisher.endpoint,)))
        await publisher.followed()
        await publisher.tell(stored([1_000], list(range(BLOCK))))
        await counted(front, url.removeprefix("http://"), "messages", 1)
        for number in range(3):
            await ask(front)
            await until(lambda: "has no /tokenize" in caplog.text)
            assert len(bodies) == 1, f"after request {number}"


# ---- settings ----


def checked(*engines: str, kv_events: tuple[str, ...]) -> None:
    engines_config = EngineConfig(engine=engines, kv_events=kv_events)
    engines_config.check()
    KvEvents().check(Config(engines=engines_config))


def test_each_socket_belongs_to_an_engine() -> None:
    checked("http://a:1", kv_events=("tcp://a:5557,tcp://a:5558",))
    checked("http://a:1", "http://b:2", kv_events=("a:1=tcp://a:5557", "b:2=ipc:///tmp/x"))


@pytest.mark.parametrize(
    ("engines", "kv_events", "said"),
    [
        (("http://a:1",), "a:5557", "is not"),
        (("http://a:1",), "tcp://a:5557,5558", "is not"),
        (("http://a:1",), "=tcp://a:5557", "is not"),
        (("http://a:1",), "b:1=tcp://a:5557", "no engine is b:1"),
        (("http://a:1", "http://b:2"), "tcp://a:5557", "name the engine"),
        (("embedded",), "tcp://a:5557", "none by URL"),
    ],
)
def test_a_socket_of_no_engine_is_refused(engines: tuple[str, ...], kv_events: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        checked(*engines, kv_events=(kv_events,))


def test_a_missing_extra_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "zmq")
    with pytest.raises(ConfigError, match=f"--kv-events needs zmq: {re.escape(pip_install('kv-events'))}"):
        checked("http://a:1", kv_events=("tcp://a:5557",))
