"""Web pages of other sites, and names that lead to this machine by DNS rebinding, on servers without keys."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from front import Front, StartFront

from llmserve.engines.timed.server import FakeEngine
from llmserve.settings.tree import ServerConfig

CHAT = json.dumps({"model": "fake", "messages": [{"role": "user", "content": "hi"}]}).encode()
EVIL = "https://evil.example.com"


async def asked(
    front: Front, method: str = "POST", path: str = "/v1/chat/completions", **headers: str
) -> tuple[int, str]:
    """Send exactly these headers. Returns the status and the error's message."""
    url = urlsplit(front.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    body = CHAT if method == "POST" else b""
    fields = {"host": url.netloc, "content-length": str(len(body)), "connection": "close"}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value)
    writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    status = int(answer.split(b" ")[1])
    return status, json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"] if status == 403 else ""


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": EVIL, "sec_fetch_site": "cross-site", "content_type": "text/plain"},
        {"origin": EVIL},
        {"origin": "null"},
        {"sec_fetch_site": "cross-site"},
        {"origin": "http://localhost:3000", "sec_fetch_site": "same-site"},
        {"origin": "http://127.0.0.1:1"},
    ],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/files"),
        ("POST", "/v1/audio/transcriptions"),
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/admin/reload"),
        ("POST", "/v1/batches"),
    ],
)
async def test_a_page_of_another_site_may_change_nothing(
    start_front: StartFront, method: str, path: str, headers: dict[str, str]
) -> None:
    async with FakeEngine(step_s=0) as engine:
        status, message = await asked(await start_front(engine), method, path, **headers)
        assert status == 403
        assert "--cors-origin" in message
        assert not engine.bodies


async def test_programs_the_own_page_and_links_are_not_affected(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine)
        own = urlsplit(front.url).netloc
        for headers in (
            {},
            {"user_agent": "curl/8"},
            {"sec_fetch_mode": "cors"},  # of Node
            {"origin": front.url, "sec_fetch_site": "same-origin"},
            {"origin": f"http://{own}"},
            {"sec_fetch_site": "none"},
            {"origin": "http://proxy:80", "x_forwarded_host": "proxy:80"},
            {
                "origin": "https://chat.home.lan",
                "sec_fetch_site": "same-origin",
            },  # a proxy that keeps its name to itself
        ):
            assert await asked(front, **headers) == (200, ""), headers
        link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
        assert (await asked(front, "GET", "/", **link))[0] == 200
        assert (await asked(front, "OPTIONS", origin=EVIL, access_control_request_method="POST"))[0] == 204


async def test_named_origins_may_call(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        named = await start_front(engine, server=ServerConfig(port=0, cors_origin=("https://chat.example.com",)))
        for origin, status in (("https://chat.example.com", 200), (EVIL, 403), ("http://chat.example.com", 403)):
            assert (await asked(named, origin=origin, sec_fetch_site="cross-site"))[0] == status
        anybody = await start_front(engine, server=ServerConfig(port=0, cors_origin=("*",)))
        assert (await asked(anybody, origin=EVIL, sec_fetch_site="cross-site", host="evil.example.com"))[0] == 200


FOREIGN = ("evil.example.com", "evil.example.com:8000", "localhost.evil.com", "127.0.0.1.nip.io", "a.internal.evil.com")
OWN = (
    *(
        "localhost",
        "LOCALHOST:8000",
        "127.0.0.1:1",
        "[::1]:8000",
        "10.0.0.7",
        "llmserve:8000",
        "localhost.",
        "a.localhost",
    ),
    *("host.docker.internal:8000", "gpu.local", "box.lan:80"),
)


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("GET", "/"), ("GET", "/health")]
)
async def test_a_name_that_a_page_elsewhere_could_have_is_refused(
    start_front: StartFront, method: str, path: str
) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine)
        for host in FOREIGN:
            status, message = await asked(front, method, path, host=host)
            assert status == 403, host
            assert "--allowed-host" in message
        for host in OWN:
            assert (await asked(front, method, path, host=host))[0] == 200, host


async def test_allowed_hosts_pass(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        for allowed, host, status in (
            ("chat.example.com", "Chat.Example.com", 200),
            ("chat.example.com", "chat.example.com:443", 200),
            ("chat.example.com", "evil.example.com", 403),
            ("*", "evil.example.com", 200),
        ):
            front = await start_front(engine, server=ServerConfig(port=0, allowed_host=(allowed,)))
            assert (await asked(front, host=host))[0] == status


async def test_a_server_beyond_loopback_has_any_name_and_one_with_keys_needs_no_check(
    start_front: StartFront, tmp_path: Path
) -> None:
    """A service's name in a cluster may have dots."""
    async with FakeEngine(step_s=0) as engine:
        wide = await start_front(engine, server=ServerConfig(port=0, host="0.0.0.0", anonymous=True))
        wide.url = wide.url.replace("0.0.0.0", "127.0.0.1")
        assert (await asked(wide, host="llm.example.com"))[0] == 200
        assert (await asked(wide, host="llm.example.com", origin=EVIL))[0] == 403
        keys = tmp_path / "keys"
        keys.write_text("alice: sk-1\n")
        keys.chmod(0o600)
        keyed = await start_front(engine, server=ServerConfig(port=0, api_key_file=str(keys)))
        key = {"authorization": "Bearer sk-1", "host": "llm.example.com", "origin": EVIL}
        assert (await asked(keyed, **key))[0] == 200
