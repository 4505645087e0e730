"""A timed engine without a model: `python -m llmserve.engines.timed`.

An answer takes one step per token, a step takes `step_s`, and every token is the same word. The engine runs `slots`
requests at once and refills each slot as it becomes free. A barrier engine instead runs one static batch after the
other, and each step takes `row_s` more per row: answers of one token then take alpha b + beta for a batch of b, as on
an image classifier. The engine may serve several models, each with its own pace. With a step time of 0 the engine is
as fast as aiohttp allows, for measuring a front-end.

Tests start the engine in their own process:

    async with FakeEngine(slots=2, step_s=0.001) as engine:
        await session.post(engine.url + "/v1/chat/completions", json={..., "max_tokens": 5})
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import msgspec
from aiohttp import web

from bins.profile import batch_s
from llmserve.demo.batching import BatchQueue, Seat, seat_of
from llmserve.engines.timed.answer import GENERATING, PATHS, RESPONSES, FakeAnswer, events, whole_body, whole_stream
from llmserve.engines.timed.body import FakeBody
from llmserve.engines.timed.cache import PrefixCache

FaultMode = Literal["ok", "hang", "500", "close_mid_stream", "slow"]

_BODY_BYTES_MAX = 64 << 20
_SLOW_FACTOR = 10
_SLOW_STEP_S_MIN = 0.01


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of all requests that arrive from now on.

    hang              no further byte after `after_tokens` tokens, until the client disconnects
    500               status 500
    close_mid_stream  the connection is cut after `after_tokens` tokens
    slow              every step takes ten times as long (10 ms at least)
    """

    mode: FaultMode = "ok"
    after_tokens: int = 0


@dataclass(frozen=True, slots=True)
class FakePace:
    """Times in seconds: an answer of L tokens in a batch of b takes prefill_s + L (step_s + row_s b)."""

    step_s: float = 0.01
    prefill_s: float = 0.0
    row_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Start:
    """The time at which a request began to run, and the size of its batch; 0 rows: in a slot."""

    at_s: float
    rows: int = 0


@dataclass(slots=True, eq=False)
class _Turn:
    """A request of a barrier engine, waiting or running."""

    started: asyncio.Future[_Start]
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class FakeEngine:
    """The engine and its HTTP server, as an async context manager; `url` is valid inside the context.

    running, waiting : requests now.  running_max : largest `running` so far.  bodies : the last request bodies.
    others : further models besides `model`, each with its pace.  row_s without barrier raises ValueError.
    api_key : needed below /v1, as vLLM's.  endpoints : paths, which /openapi.json lists; None: all, and no such list.
    responses : ids of those that the engine keeps.  cache_words : capacity of a prefix cache, whose hits the answers
    tell; None: the engine has no such cache
    """

    def __init__(
        self,
        *,
        slots: int = 8,
        step_s: float = 0.01,
        prefill_s: float = 0.0,
        row_s: float = 0.0,
        barrier: bool = False,
        model: str = "fake",
        others: Mapping[str, FakePace] = MappingProxyType({}),
        output_tokens: int = 16,
        host: str = "127.0.0.1",
        port: int = 0,
        gather_s: float = 1.0,
        tokens_max: int | None = None,
        context_tokens: int = 1 << 20,
        api_key: str | None = None,
        endpoints: Collection[str] | None = None,
        cache_words: int | None = None,
    ) -> None:
        self.model = model
        self.running = 0
        self.running_max = 0
        self.waiting = 0
        self.bodies: deque[bytes] = deque(maxlen=256)
        self.fault = Fault()
        self.responses: set[str] = set()
        self._endpoints = endpoints
        self._slots_count = slots
        self._slots = asyncio.Semaphore(slots)
        self._barrier = barrier
        self._queue: BatchQueue[_Turn] = BatchQueue(gather_s)
        self._paces = {model: FakePace(step_s, prefill_s, row_s), **others}
        if not barrier and any(pace.row_s for pace in self._paces.values()):
            raise ValueError("row_s: only a barrier engine has batches of a size")
        self._output_tokens = output_tokens
        self._tokens_max, self._context_tokens = tokens_max, context_tokens  # reported; not enforced
        self._cache = PrefixCache(cache_words) if cache_words is not None else None
        self._authorization = f"Bearer {api_key}" if api_key else None
        self._host, self._port = host, port
        self._runner: web.ServerRunner | None = None
        self._batches: asyncio.Task[None] | None = None
        self._routes = {
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/v1/models"): self._models,
            ("POST", "/fault"): self._set_fault,
            **{("POST", path): self._complete for path in (PATHS if endpoints is None else endpoints)},
        }
        if endpoints is not None:
            self._routes["GET", "/openapi.json"] = self._list_endpoints

    async def __aenter__(self) -> FakeEngine:
        # A bare web.Server is nearly twice as fast as an application with router and middlewares.
        server = web.Server(
            self._handle,
            request_factory=_make_request,
            handler_cancellation=True,
            access_log=None,
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port, backlog=4096).start()
        self._port = self._runner.addresses[0][1]
        if self._barrier:
            self._batches = asyncio.create_task(self._run_batches())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._batches is not None:
            self._batches.cancel()
        assert self._runner is not None
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self._port}"

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        handler = self._routes.get((request.method, request.path))
        if handler is None and request.path.startswith(f"{RESPONSES}/"):
            handler = self._kept_response
        if handler is None:
            return _Refused(404, f"no such path: {request.path}").response()
        is_open = self._authorization is None or not request.path.startswith("/v1/")
        if not is_open and request.headers.get("authorization") != self._authorization:
            return _Refused(401, "the API key is wrong", "invalid_api_key").response()
        try:
            return await handler(request)
        except ValueError as error:  # a member whose batch has another size
            return _Refused(400, str(error)).response()
        except ConnectionError:  # the client disconnected during the answer
            return web.Response()

    async def _health(self, request: web.BaseRequest) -> web.Response:
        return web.Response()

    async def _models(self, request: web.BaseRequest) -> web.Response:
        common = {"object": "model", "created": 0, "owned_by": "vllm", "max_model_len": self._context_tokens}
        return web.json_response({"object": "list", "data": [{"id": model, **common} for model in self._paces]})

    async def _list_endpoints(self, request: web.BaseRequest) -> web.Response:
        return web.json_response({"openapi": "3.1.0", "paths": {path: {} for path in self._endpoints or ()}})

    async def _kept_response(self, request: web.BaseRequest) -> web.Response:
        response_id = request.path.split("/")[3]
        if response_id not in self.responses:
            return _Refused(404, f"there is no response {response_id}").response()
        if request.method == "DELETE":
            self.responses.remove(response_id)
        return web.json_response({"id": response_id, "object": "response", "asked": f"{request.method} {request.path}"})

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        lines = [
            f'vllm:num_requests_{state}{{model_name="{self.model}"}} {count}.0'
            for state, count in (("running", self.running), ("waiting", self.waiting))
        ]
        if self._tokens_max is not None:
            lines.append(f'vllm:cache_config_info{{kv_cache_size_tokens="{self._tokens_max}"}} 1.0')
        return web.Response(text="\n".join(lines) + "\n")

    async def _set_fault(self, request: web.BaseRequest) -> web.Response:
        try:
            self.fault = msgspec.json.decode(await request.read(), type=Fault)
        except msgspec.MsgspecError as error:
            return _Refused(400, str(error)).response()
        return web.json_response({"mode": self.fault.mode, "after_tokens": self.fault.after_tokens})

    async def _complete(self, request: web.BaseRequest) -> web.StreamResponse:
        raw = await request.read()
        self.bodies.append(raw)
        seat = None
        try:
            seat = seat_of(request.headers, self._slots_count) if self._barrier else None
            is_form = request.content_type == "multipart/form-data"
            body = FakeBody() if is_form else msgspec.json.decode(raw, type=FakeBody)
            if body.previous_response_id is not None and body.previous_response_id not in self.responses:
                raise _Refused(404, f"there is no response {body.previous_response_id}")
            if body.model is not None and body.model not in self._paces:
                raise _Refused(404, f"the model {body.model!r} does not exist", "model_not_found")
            if self.fault.mode == "500":
                raise _Refused(500, "the engine was told to fail", "internal_error")
        except _Refused as error:
            self._queue.cancel_seat(seat)
            return error.response()
        except (msgspec.MsgspecError, ValueError) as error:
            self._queue.cancel_seat(seat)
            return _Refused(400, str(error)).response()
        answer = self._answer(body, request.path)
        return await (self._stream(request, answer, seat) if body.stream else self._whole(request, answer, seat))

    def _answer(self, body: FakeBody, path: str) -> FakeAnswer:
        prompt = body.prompts.split()
        words = len(prompt)  # instead of tokens: grows with the text
        if path not in GENERATING:
            return FakeAnswer(body.model or self.model, path, 0, words, inputs=body.inputs)
        cached = self._cache.take(prompt) if self._cache is not None else None
        kept = f"resp-{self._port}" if path == RESPONSES else ""
        if kept:
            self.responses.add(kept)
        usage = body.stream_options is not None and body.stream_options.include_usage
        tokens = body.most or self.tokens_of(body)
        model, cut = body.model or self.model, body.most is not None
        return FakeAnswer(model, path, tokens, words, usage, cut, id=kept, cached_tokens=cached)

    def tokens_of(self, body: FakeBody) -> int:
        """Output tokens of an answer that the request does not bound."""
        return self._output_tokens

    async def _whole(self, request: web.BaseRequest, answer: FakeAnswer, seat: Seat | None) -> web.StreamResponse:
        if not self._is_instant(answer.model):
            fault = self.fault
            async with self._running_turn(seat) as start:
                async for due in self._steps(start, answer, fault, stride=answer.tokens):
                    if due is None:
                        _cut(request)
                        return web.Response()
        return web.Response(body=whole_body(answer), content_type="application/json")

    async def _stream(self, request: web.BaseRequest, answer: FakeAnswer, seat: Seat | None) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        opening, token, closing = events(answer)
        if self._is_instant(answer.model):
            await response.prepare(request)
            await response.write(whole_stream(answer))
            return response
        fault = self.fault
        async with self._running_turn(seat) as start:
            async for due in self._steps(start, answer, fault):
                if not response.prepared:
                    await response.prepare(request)
                if due is None:
                    _cut(request)
                    return response
                await response.write(opening + token * due)
                opening = b""
        await response.write(closing)
        return response

    def _is_instant(self, model: str) -> bool:
        """Whether an answer takes no time and no slot."""
        return self._paces[model] == FakePace(0.0) and not self._barrier and self.fault.mode == "ok"

    async def _steps(
        self, start: _Start, answer: FakeAnswer, fault: Fault, stride: int = 1
    ) -> AsyncIterator[int | None]:
        """Wait until `stride` more tokens are due and yield the number of due tokens; None where a fault cuts in.

        Times are counted from the start, so that a late timer does not delay all later tokens.
        """
        loop = asyncio.get_running_loop()
        tokens, pace = answer.tokens, self._paces[answer.model]
        step_s = pace.step_s + pace.row_s * start.rows
        if fault.mode == "slow":
            step_s = max(_SLOW_STEP_S_MIN, _SLOW_FACTOR * step_s)
        faulty = fault.mode in ("hang", "close_mid_stream")
        last = min(tokens, fault.after_tokens) if faulty else tokens
        first_s = start.at_s + pace.prefill_s
        done = 0
        if not tokens:
            await asyncio.sleep(pace.prefill_s)
        while done < last:
            target = min(done + stride, last)
            due_s = start.at_s + batch_s(target, step_s, pace.prefill_s)
            if (delay_s := due_s - loop.time()) > 0:
                await asyncio.sleep(delay_s)
            due = int((loop.time() - first_s) / step_s) if step_s else last
            due = min(max(due, target), last)
            yield due - done
            done = due
        if fault.mode == "hang":
            await asyncio.Event().wait()
        if fault.mode == "close_mid_stream":
            yield None

    @asynccontextmanager
    async def _running_turn(self, seat: Seat | None) -> AsyncIterator[_Start]:
        """Wait for a slot, or for the request's batch to run. Yields the start."""
        async with AsyncExitStack() as place:
            self.waiting += 1
            try:
                wait = self._place_in_batch(seat) if self._barrier else self._slot()
                start = await place.enter_async_context(wait)
            finally:
                self.waiting -= 1
            self.running += 1
            self.running_max = max(self.running_max, self.running)
            try:
                yield start
            finally:
                self.running -= 1

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[_Start]:
        async with self._slots:
            yield _Start(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def _place_in_batch(self, seat: Seat | None) -> AsyncIterator[_Start]:
        turn = _Turn(asyncio.get_running_loop().create_future())
        self._queue.add(turn, seat)
        try:
            yield await turn.started
        finally:
            turn.ended.set()
            self._queue.remove(turn)

    async def _run_batches(self) -> None:
        while True:
            batch = await self._queue.take()
            start = _Start(asyncio.get_running_loop().time(), len(batch))
            for turn in batch:
                if not turn.started.done():
                    turn.started.set_result(start)
            for turn in batch:
                await turn.ended.wait()


def _make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    """Return the request object of aiohttp's server, with a higher limit for the body."""
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=_BODY_BYTES_MAX)


class _Refused(Exception):
    """A request answered with an error."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def response(self) -> web.Response:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": None, "code": self.code}
        return web.json_response({"error": error}, status=self.status)


def _cut(request: web.BaseRequest) -> None:
    if request.transport is not None:
        request.transport.abort()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # Windows
        return None
    return uvloop.new_event_loop


def main(engine: type[FakeEngine] = FakeEngine) -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m llmserve.engines.timed", description="A timed engine, no model.")
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8002, help="0: any free port, named in the ready line")
    add("--model", default="fake", help="name in the API")
    add("--slots", type=int, default=8, help="requests at once, or the largest batch with --barrier")
    add("--step-s", type=float, default=0.01, help="seconds per token")
    add("--prefill-s", type=float, default=0.0, help="seconds before the first step")
    add("--row-s", type=float, default=0.0, help="further seconds per step for each row of a batch, with --barrier")
    add("--barrier", action="store_true", help="run one static batch at a time")
    add("--tokens-max", type=int, help="KV cache size in tokens, in /metrics")
    add(
        "--other",
        type=_other,
        action="append",
        default=[],
        metavar="NAME=STEP_S[,PREFILL_S[,ROW_S]]",
        help="a further model with its own pace; repeat for several models",
    )
    add("--api-key", help="needed below /v1")
    add("--cache-words", type=int, help="capacity of a prefix cache, in words of prompts (default: no cache)")
    add("--output-tokens", type=int, default=16, help="tokens of an answer to a request without max_tokens")
    arguments = vars(parser.parse_args())
    arguments["others"] = dict(arguments.pop("other"))
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(engine(**arguments)))
    except (OSError, ValueError) as error:
        sys.exit(f"llmserve.engines.timed: error: {error}")


def _other(text: str) -> tuple[str, FakePace]:
    name, separator, seconds = text.rpartition("=")
    if not (separator and name):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=STEP_S[,PREFILL_S[,ROW_S]]")
    try:
        return name, FakePace(*[float(part) for part in seconds.split(",")])
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} does not end with one to three numbers of seconds") from None


async def _serve(engine: FakeEngine) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with engine:
        print(f"llmserve fake engine: {engine.model} is ready at {engine.url}", flush=True)
        await stop.wait()
