"""Who sees /health, /ready and /metrics, and whose streams clients can name."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from front import Front, StartFront, until

from llmserve.engines.timed.server import FakeEngine
from llmserve.errors import ConfigError
from llmserve.settings.tree import ApiConfig, ServerConfig

ALICE, ADMIN = "Bearer sk-1", "Bearer sk-9"


@pytest.fixture
def with_keys(tmp_path: Path) -> dict[str, Any]:
    """Settings with the keys of alice and bob, and an admin's."""
    for name, text in (("keys", "alice: sk-1\nbob: sk-2\n"), ("admin", "root: sk-9\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    return {"api_key_file": str(tmp_path / "keys"), "admin_key_file": str(tmp_path / "admin")}


async def get(front: Front, path: str, key: str | None = None, url: str | None = None) -> tuple[int, str]:
    headers = {"authorization": key} if key else {}
    async with front.session.get((url or front.url) + path, headers=headers) as response:
        return response.status, await response.text()


async def test_with_keys_on_only_a_key_shows_metrics_and_engines(
    start_front: StartFront, with_keys: dict[str, Any]
) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, server=ServerConfig(port=0, **with_keys))
        assert await get(front, "/health") == (200, '{"status":"ok"}')
        for key in (None, "Bearer wrong"):
            assert await get(front, "/ready", key) == (200, '{"ready":true}')
            status, text = await get(front, "/metrics", key)
            assert (status, "invalid_api_key" in text, "llmserve_requests" in text) == (401, True, False)
        name = engine.url.removeprefix("http://")
        for key in (ALICE, ADMIN):
            assert name in (await get(front, "/ready", key))[1]
            status, text = await get(front, "/metrics", key)
            assert (status, "llmserve_requests" in text) == (200, True)


async def test_without_an_engine_ready_is_503_for_everybody(start_front: StartFront, with_keys: dict[str, Any]) -> None:
    front = await start_front("http://127.0.0.1:9", wait=False, server=ServerConfig(port=0, **with_keys))
    assert await get(front, "/ready") == (503, '{"ready":false}')


async def test_without_keys_everybody_sees_all(start_front: StartFront, with_keys: dict[str, Any]) -> None:
    """Also with the key of an admin, which is for /admin."""
    server = ServerConfig(port=0, admin_key_file=with_keys["admin_key_file"])
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, server=server)
        assert "engines" in (await get(front, "/ready"))[1]
        assert (await get(front, "/metrics"))[0] == 200


async def test_a_port_of_its_own_shows_all_without_a_key_and_nothing_else(
    start_front: StartFront, with_keys: dict[str, Any]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, server=ServerConfig(port=0, metrics_port=port, **with_keys))
        url = f"http://127.0.0.1:{port}"
        assert await get(front, "/health", url=url) == (200, '{"status":"ok"}')
        assert "engines" in (await get(front, "/ready", url=url))[1]
        assert "llmserve_requests" in (await get(front, "/metrics", url=url))[1]
        for path in ("/v1/models", "/admin/engines"):
            status, text = await get(front, path, ALICE, url)
            assert (status, '"not_found"' in text) == (404, True)
        async with front.session.post(f"{url}/v1/chat/completions", json={}) as response:
            assert response.status == 404
        assert (await get(front, "/metrics"))[0] == 401, "the port of clients still needs a key"


async def test_a_port_that_is_taken_is_an_error_at_the_start(start_front: StartFront) -> None:
    from llmserve.errors import ListenError

    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ListenError):
        await start_front("http://127.0.0.1:9", server=ServerConfig(port=0, metrics_port=taken.getsockname()[1]))


async def test_an_address_for_metrics_without_a_port_is_refused(start_front: StartFront) -> None:
    with pytest.raises(ConfigError, match=r"metrics_host: .* --metrics-port"):
        await start_front("http://127.0.0.1:9", server=ServerConfig(port=0, metrics_host="127.0.0.1"))


async def test_a_client_cannot_name_the_stream_of_another_key(
    start_front: StartFront, with_keys: dict[str, Any]
) -> None:
    """Neither for its deadline nor for its counters."""
    async with FakeEngine(step_s=0.01) as engine:
        front = await start_front(
            engine,
            server=ServerConfig(port=0, **with_keys),
            limits=ApiConfig(slo_ms=("stream:bob=1", "stream:alice/night=60000", "stream:alice=60000", "1")),
        )

        async def ask(key: str, **headers: str) -> int:
            async with front.post(headers={"authorization": key, **headers}, max_tokens=5) as response:
                await response.read()
                return int(response.status)

        assert await ask(ALICE) == 200
        assert await ask(ALICE, **{"x-llmserve-stream": "night"}) == 200
        assert await ask(ALICE, **{"x-llmserve-stream": "bob"}) in (200, 504)
        await until(lambda: not front.cluster.scheduler.requests)
        text = (await get(front, "/metrics", ADMIN))[1]
    for stream in ("alice", "alice/night", "alice/bob"):
        assert f'stream="{stream}"' in text
    assert 'stream="bob"' not in text


async def test_without_keys_a_client_names_its_stream(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine)
        async with front.post(headers={"x-llmserve-stream": "night"}, max_tokens=1) as response:
            await response.read()
        await until(lambda: not front.cluster.scheduler.requests)
        assert 'stream="night"' in (await get(front, "/metrics"))[1]
