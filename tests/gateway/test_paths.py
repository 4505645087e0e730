"""Paths as clients and proxies spell them, OPTIONS and HEAD of load balancers, and what a wrong base URL is told."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import pytest
from front import Front, StartFront

from llmserve.engines.timed.server import FakeEngine
from llmserve.http.heads import path_and_query

CHAT = b'{"model":"fake","messages":[{"role":"user","content":"hi"}]}'


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"/v1//models", "/v1/models", b""),
        (b"//v1/models?a=//b/", "/v1/models", b"a=//b/"),
        (b"///v1///chat//completions//", "/v1/chat/completions", b""),
        (b"/v1/models/", "/v1/models", b""),
        (b"/v1/models/org%2F%2Fm", "/v1/models/org//m", b""),
        (b"/", "/", b""),
        (b"//", "/", b""),
        (b"http://host:8000/v1/models/", "/v1/models", b""),
        (b"http://host:8000", "/", b""),
        (b"http://host//v1/models?x", "/v1/models", b"x"),
        (b"*", "*", b""),
    ],
)
def test_slashes_are_merged_and_one_at_the_end_is_left_out(target: bytes, path: str, query: bytes) -> None:
    assert path_and_query(target) == (path, query)


async def asked(front: Front, head: str, body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
    """Send a request's line as it is. Returns status, headers and body."""
    url = urlsplit(front.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    length = f"content-length: {len(body)}\r\n" if body else ""
    writer.write(f"{head} HTTP/1.1\r\nhost: {url.netloc}\r\n{length}connection: close\r\n\r\n".encode() + body)
    status, _, rest = (await reader.read()).partition(b"\r\n")
    lines, _, answer = rest.partition(b"\r\n\r\n")
    writer.close()
    headers = dict(line.lower().split(": ", 1) for line in lines.decode().split("\r\n"))
    return int(status.split()[1]), headers, answer


@pytest.mark.parametrize(
    "path", ["/v1//models", "//v1/models", "/v1/models/", "http://any//v1/models", "/v1/models//fake/"]
)
async def test_models_are_found_under_odd_paths(start_front: StartFront, path: str) -> None:
    async with FakeEngine() as engine:
        status, _, body = await asked(await start_front(engine), f"GET {path}")
        assert status == 200
        assert b'"fake"' in body


@pytest.mark.parametrize("path", ["//v1/chat/completions", "/v1/chat/completions/", "http://x:1/v1/chat//completions"])
async def test_chats_are_answered_under_odd_paths(start_front: StartFront, path: str) -> None:
    async with FakeEngine(step_s=0) as engine:
        assert (await asked(await start_front(engine), f"POST {path}", CHAT))[0] == 200


@pytest.mark.parametrize(
    ("path", "allow"),
    [
        ("/", "get, head, options"),
        ("*", "get, head, post, put, patch, delete, options"),
        ("/health", "get, head, options"),
        ("/v1/models/", "get, head, options"),
        ("/v1/chat/completions", "post, options"),
        ("/v1/responses/resp_1", "get, head, delete, options"),
        ("/admin/reload", "post, options"),
        ("/nothing", "options"),
    ],
)
async def test_options_say_what_a_path_takes(start_front: StartFront, path: str, allow: str) -> None:
    async with FakeEngine() as engine:
        front = await start_front(engine)
        status, headers, body = await asked(front, f"OPTIONS {path}")
        assert (status, headers["allow"], body) == (204, allow, b"")
        if path not in ("*", "/nothing"):
            status, headers, _ = await asked(front, f"PUT {path}")
            assert (status, headers["allow"]) == (405, allow)


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/v1/models", "/metrics"])
async def test_heads_are_answered_without_a_body(start_front: StartFront, path: str) -> None:
    async with FakeEngine() as engine:
        status, headers, body = await asked(await start_front(engine), f"HEAD {path}")
        assert (status, body) == (200, b"")
        assert int(headers["content-length"]) > 0


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/embeddings", "/v1/embeddings"),
        ("/audio/transcriptions", "/v1/audio/transcriptions"),
        ("/models", "/v1/models"),
        ("/models/fake", "/v1/models/fake"),
        ("/batches", "/v1/batches"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/openai/v1/chat/completions", "/v1/chat/completions"),
        ("/api/v1/models", "/v1/models"),
        ("/openai/chat/completions", "/v1/chat/completions"),
        ("/v1beta/openai/completions", "/v1/completions"),
    ],
)
@pytest.mark.parametrize("body", [b"", CHAT, CHAT + b" " * 200_000])
async def test_a_wrong_base_url_is_told_the_path_that_was_meant(
    start_front: StartFront, path: str, meant: str, body: bytes
) -> None:
    async with FakeEngine() as engine:
        status, _, answer = await asked(await start_front(engine), f"{'POST' if body else 'GET'} {path}", body)
        assert status == 404
        assert f"there is no {path}; did you mean {meant}?".encode() in answer


async def test_a_path_that_is_like_no_other_is_only_named(start_front: StartFront) -> None:
    async with FakeEngine() as engine:
        status, _, answer = await asked(await start_front(engine), "GET /nothing")
        assert status == 404
        assert b'"there is no /nothing"' in answer


async def test_the_page_names_its_parts_relatively_so_that_it_works_under_a_prefix(start_front: StartFront) -> None:
    async with FakeEngine() as engine:
        front = await start_front(engine)
        for path in ("/", "/page.js", "/charts.js", "/page.css"):
            _, _, text = await asked(front, f"GET {path}")
            for absolute in (b'href="/', b'src="/', b'from "/', b'fetch("/', b"url(/"):
                assert absolute not in text
