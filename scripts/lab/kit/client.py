"""Requests to OpenAI-compatible servers: the load of every benchmark."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

from llmserve.wire.headers import BATCH_HEADER

MODEL = "llmserve-demo"
BEGIN_S = 0.1  # from the start of a load to time 0 of its requests
JSON_HEADERS = {"content-type": "application/json"}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to a request.

    status  of HTTP; 0: the connection failed or broke
    body    bytes received, until the break if there was one
    error   name of the exception that broke the connection
    """

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    error: str = ""

    @property
    def answer(self) -> Any:
        """The answer, as JSON. Raises AssertionError when the status is not 200."""
        assert self.status == 200, f"{self.status} {self.error}{self.body.decode(errors='replace')}"
        return json.loads(self.body)

    @property
    def tokens(self) -> int:
        """Output tokens of an answer that was not streamed."""
        return int(self.answer["usage"]["completion_tokens"])

    @property
    def batch(self) -> str:
        """The id of the last batch that the request ran in, as llmserve reports it; "" without a batch."""
        return self.headers.get(BATCH_HEADER, "")


def session_of(timeout_s: float | None = None, *, connections_kept: bool = True) -> aiohttp.ClientSession:
    """A session without a limit on connections.

    connections_kept : False: open a connection for each request, for a server may close an idle connection just when
    a request uses it
    """
    connector = aiohttp.TCPConnector(limit=0, force_close=not connections_kept)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=timeout_s))


def body_of(prompt: str, **more: Any) -> dict[str, Any]:
    """The body of a greedy request to the demo model. more : fields of the body to add or replace."""
    return {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "temperature": 0, **more}


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    body: bytes | Mapping[str, Any],
    headers: Mapping[str, str] | None = None,
    *,
    path: str = "/v1/chat/completions",
    on_chunk: Callable[[bytes], None] = lambda chunk: None,
) -> Reply:
    """Send a request and read the whole reply, also of a broken connection. on_chunk : called with each chunk."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    chunks: list[bytes] = []
    try:
        async with session.post(f"{url}{path}", data=data, headers={**JSON_HEADERS, **(headers or {})}) as response:
            async for chunk in response.content.iter_any():
                on_chunk(chunk)
                chunks.append(chunk)
            return Reply(response.status, b"".join(chunks), response.headers)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return Reply(0, b"".join(chunks), error=type(error).__name__)


class FirstToken:
    """The time of a stream's first token, from its chunks: `on_chunk` of `ask`. The first event only opens the answer.

    due_s : on the clock of perf_counter.  seconds : from then to the first token; 0 before it
    """

    def __init__(self, due_s: float) -> None:
        self.seconds = 0.0
        self._due_s, self._head = due_s, b""

    def __call__(self, chunk: bytes) -> None:
        if not self.seconds:
            self._head += chunk
            if self._head.count(b"data: ") > 1:
                self.seconds = time.perf_counter() - self._due_s


async def at_their_times(at_s: Sequence[float], do: Callable[[int, float], Awaitable[T]]) -> list[T]:
    """Call do(index, due_s) at each of these times, and return the results in the order of at_s.

    due_s : the time of the call, on the clock of perf_counter. Raises an ExceptionGroup when a call raises; all other
    calls are then cancelled.
    """
    begin_s = time.perf_counter() + BEGIN_S

    async def in_time(index: int) -> T:
        due_s = begin_s + at_s[index]
        if (wait_s := due_s - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        return await do(index, due_s)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(in_time(index)) for index in range(len(at_s))]
    return [task.result() for task in tasks]


async def get_text(session: aiohttp.ClientSession, url: str) -> str:
    """The text of a page, for example Prometheus metrics."""
    async with session.get(url) as response:
        return await response.text()


async def add_batch(
    session: aiohttp.ClientSession, url: str, bodies: Sequence[Mapping[str, Any]], *, window_s: int = 86_400
) -> str:
    """Upload a file of chat completions, and make a batch of it. Returns the id of the batch.

    Raises AssertionError when the server refuses the file or the batch.
    """
    endpoint = "/v1/chat/completions"
    fixed = {"method": "POST", "url": endpoint}
    rows = [json.dumps({"custom_id": str(number), **fixed, "body": body}) for number, body in enumerate(bodies)]
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", "\n".join(rows), filename="requests.jsonl")
    async with session.post(f"{url}/v1/files", data=form) as response:
        file = Reply(response.status, await response.read()).answer
    made = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": f"{window_s}s"}
    reply = await ask(session, url, made, path="/v1/batches")
    return str(reply.answer["id"])
