"""Arbitrary bytes from clients and engines against a real server: every request has an end, and nothing stays behind.

FUZZ_CASES=10000 python -m pytest tests/fuzz    (500 cases by default; hypothesis draws the same ones each time)
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from server_process import Server

CASES = max(3, int(os.environ.get("FUZZ_CASES", "500")) // 3)  # of each of the three tests
ANSWER_S = 30.0  # an answer takes milliseconds; a shared machine may be slow, a hang has no end
GROWTH_BYTES = 10 << 20
WARM_CASES = 60
MODELS = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
WHOLE = b'{"choices":[{"index":0,"message":{"content":"a"},"finish_reason":"stop"}],"usage":{"completion_tokens":1}}'
STREAM = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'

fuzzed = settings(
    max_examples=CASES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


def response(status: bytes, content_type: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (status, content_type, len(body), body)


class Liar:
    """An engine that is healthy, and answers every completion with the bytes that it was given."""

    def __init__(self) -> None:
        self.answer: bytes | None = None  # None: a right answer
        self.port = 0

    async def start(self) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 24)
        self.port = server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head.lower())
            body = await reader.readexactly(int(length[1]) if length else 0)
            writer.write(self._answer(head, body))
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def _answer(self, head: bytes, body: bytes) -> bytes:
        if head.startswith(b"GET"):
            known = head.startswith((b"GET /health", b"GET /v1/models"))
            return response(b"200 OK" if known else b"404 Not Found", b"application/json", MODELS)
        if self.answer is not None:
            return self.answer
        streams = re.search(rb'"stream"\s*:\s*true', body) is not None
        return response(
            b"200 OK", b"text/event-stream" if streams else b"application/json", STREAM if streams else WHOLE
        )


class Arena:
    """A server in its own process, an engine here, and what the server's memory was after its first cases."""

    def __init__(self, runner: asyncio.Runner, liar: Liar, server: Server) -> None:
        self.liar = liar
        self.server = server
        self.port = int(server.url.rsplit(":", 1)[1])
        self._runner = runner
        self._process = psutil.Process(server.process.pid)
        self._cases = 0
        self._warm_bytes = 0

    def run(self, case: Callable[..., Coroutine[Any, Any, bytes]], *args: Any) -> bytes:
        answer = self._runner.run(case(*args))
        self._cases += 1
        if self._cases == WARM_CASES:
            self._warm_bytes = self._process.memory_info().rss
        assert self.server.process.poll() is None, "the server has ended"
        return answer

    async def send(self, data: bytes) -> bytes:
        """Send the bytes and close the sending side; return everything that comes back."""
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                writer.write(data)
                writer.write_eof()
                return await reader.read()
            except ConnectionError:
                return b""
            finally:
                writer.close()

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.server.url}/metrics", timeout=ANSWER_S) as answer:
            text = answer.read().decode()
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.M))

    def check_nothing_is_left(self) -> None:
        async def settled() -> bytes:
            async with asyncio.timeout(ANSWER_S):
                while any(self.metric(name) for name in LEFT) or self.metric("llmserve_connections") > 1:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            return b""

        self.run(settled)
        if self._cases > WARM_CASES:
            grown = self._process.memory_info().rss - self._warm_bytes
            assert grown < GROWTH_BYTES, f"{grown / 2**20:.0f} MiB stay after {self._cases} cases"


LEFT = ("llmserve_bin_requests", "llmserve_formed_requests", "llmserve_engine_running", "llmserve_buffered_bytes")


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    with asyncio.Runner() as runner:
        liar = Liar()
        runner.run(liar.start())
        starting = runner.get_loop().run_in_executor(None, lambda: Server(*flags(liar.port)))
        server = runner.run(_awaited(starting))
        assert server.process.stdout is not None
        # Read all the time: a server whose log nobody reads stops at a full pipe.
        output = runner.get_loop().run_in_executor(None, server.process.stdout.read)
        try:
            yield Arena(runner, liar, server)
            assert server.process.poll() is None
            server.process.send_signal(signal.SIGTERM)
            said = runner.run(_awaited(output))
            assert "Traceback" not in said, said[-5_000:]
        finally:
            server.close()


def flags(port: int) -> tuple[str, ...]:
    engine = ("--engine", f"http://127.0.0.1:{port}", "--slots", "8", "--engine-idle-s", "2")
    return (*engine, "--circuit-faults-max", "0", "--memory-keys", "0", "--retries-max", "1", "--log-level", "warning")


async def _awaited(future: Any) -> Any:
    return await future


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"^HTTP/1\.1 (\d{3}) ", answer, re.M)]


def check_answer(answer: bytes, *, may_fail: Sequence[int] = ()) -> None:
    """Statuses are those of a client's own fault, or failures that may be."""
    assert not answer or answer.startswith(b"HTTP/1.1 "), answer[:200]
    for status in statuses(answer):
        assert status < 500 or status in may_fail, answer[:500]


# ---- heads ----------------------------------------------------------------------------------------------------------

token = st.one_of(
    st.sampled_from([b"GET", b"POST", b"PRI", b"CONNECT", b"", b"get", b"HEAD", b"OPTIONS"]), st.binary(max_size=8)
)
target = st.one_of(
    st.sampled_from(
        [b"/v1/chat/completions", b"/v1/models/%ff", b"*", b"http://h/ready", b"/", b"//", b"/a?b=%", b"/#"]
    ),
    st.binary(max_size=40),
)
field_name = st.one_of(
    st.sampled_from([b"content-length", b"transfer-encoding", b"expect", b"upgrade", b"connection", b"authorization"]),
    st.binary(max_size=12),
)
field_value = st.one_of(
    st.sampled_from([b"0", b"5", b"-1", b"9" * 30, b"chunked", b"gzip, chunked", b"100-continue", b"h2c", b"close"]),
    st.binary(max_size=40),
)
fields = st.lists(st.tuples(field_name, field_value), max_size=8)
ends = st.sampled_from([b"\r\n", b"\n", b"\r", b""])


@seed(1)
@fuzzed
@given(method=token, path=target, fields=fields, end=ends, body=st.binary(max_size=60), times=st.integers(1, 3))
def test_any_head_is_answered_or_closed(
    arena: Arena, method: bytes, path: bytes, fields: list[tuple[bytes, bytes]], end: bytes, body: bytes, times: int
) -> None:
    lines = b"".join([b"%b: %b%b" % (name, value, end) for name, value in fields])
    data = b"%b %b HTTP/1.1%bhost: h%b%b%b%b" % (method, path, end, end, lines, end, body)
    check_answer(arena.run(arena.send, data * times))


# ---- bodies ---------------------------------------------------------------------------------------------------------

values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.just("m"), st.just(10**400)
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=12,
)
NAMES = (
    *("model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n", "stop"),
    *("temperature", "top_p", "seed", "min_tokens", "ignore_eos", "tools", "response_format", "priority", "user"),
)
RIGHT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "prompt": "hello"}
bodies = st.one_of(
    st.dictionaries(st.sampled_from(NAMES), values, max_size=5).map(
        lambda some: json.dumps({**RIGHT, **some}).encode()
    ),
    values.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=100),
    st.integers(1, 50_000).map(lambda depth: b'{"model":"m","prompt":"a","x":' + b"[" * depth + b"]" * depth + b"}"),
    st.integers(0, len(json.dumps(RIGHT))).map(lambda cut: json.dumps(RIGHT).encode()[:cut]),
)
headers = st.dictionaries(
    st.sampled_from(["x-llmserve-slo-ms", "x-llmserve-stream", "x-llmserve-predicted-tokens", "x-request-id"]),
    st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=20),
    max_size=2,
)


def request(path: str, body: bytes, extra: dict[str, str] | None = None) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in (extra or {}).items())
    head = f"POST {path} HTTP/1.1\r\nhost: h\r\nconnection: close\r\ncontent-length: {len(body)}\r\n{lines}\r\n"
    return head.encode("latin-1") + body


@seed(2)
@fuzzed
@given(path=st.sampled_from(["/v1/chat/completions", "/v1/completions"]), body=bodies, extra=headers)
def test_any_body_is_served_or_refused_by_name(arena: Arena, path: str, body: bytes, extra: dict[str, str]) -> None:
    answer = arena.run(arena.send, request(path, body, extra))
    check_answer(answer, may_fail=(504,) if b"deadline" in answer else ())
    final = answer.rpartition(b"HTTP/1.1 ")[2]
    if not final.startswith(b"200"):
        error = json.loads(final.partition(b"\r\n\r\n")[2])["error"]
        assert error["message"]
        assert error["type"]


# ---- engines --------------------------------------------------------------------------------------------------------

status_lines = st.one_of(
    st.sampled_from(
        [b"HTTP/1.1 200 OK", b"HTTP/1.0 200 OK", b"HTTP/1.1 000 X", b"HTTP/1.1 101 X", b"HTTP/1.1 204 X"]
        + [b"HTTP/1.1 %d X" % status for status in (100, 103, 301, 304, 400, 401, 404, 429, 500, 501, 529, 600, 999)]
    ),
    st.binary(max_size=30),
)
engine_fields = st.lists(
    st.tuples(
        st.one_of(
            st.sampled_from([b"content-type", b"content-length", b"transfer-encoding", b"retry-after"]),
            st.sampled_from([b"content-encoding", b"connection", b"x-llmserve-engine"]),
            st.binary(max_size=8),
        ),
        st.one_of(
            st.sampled_from(
                [b"text/event-stream", b"application/json", b"chunked", b"gzip", b"0", b"5", b"99999999999"]
            ),
            st.binary(max_size=30),
        ),
    ),
    max_size=4,
)
engine_bodies = st.one_of(
    st.sampled_from([WHOLE, STREAM, WHOLE[:40], STREAM[:40], STREAM[:-14], b"<html>", b"", b"data: ", b"\n" * 99]),
    st.binary(max_size=80),
)


@seed(3)
@fuzzed
@given(status=status_lines, fields=engine_fields, body=engine_bodies, streams=st.booleans(), sized=st.booleans())
def test_any_engine_answer_becomes_an_answer(
    arena: Arena, status: bytes, fields: list[tuple[bytes, bytes]], body: bytes, streams: bool, sized: bool
) -> None:
    lines = b"".join([b"%b: %b\r\n" % field for field in fields]) + (
        b"content-length: %d\r\n" % len(body) if sized else b""
    )
    arena.liar.answer = b"%b\r\n%b\r\n%b" % (status, lines, body)
    try:
        question = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": streams}
        answer = arena.run(arena.send, request("/v1/chat/completions", json.dumps(question).encode()))
    finally:
        arena.liar.answer = None
    assert statuses(answer), "the client was told something"
    own = [int(code) for code in re.findall(rb"HTTP/1.. (5\d\d) ", status)]
    check_answer(answer, may_fail=(502, 503, 504, *own))


def test_nothing_stays_behind(arena: Arena) -> None:
    arena.check_nothing_is_left()
    assert arena.metric("llmserve_requests_total") > 0
