"""A timed engine without a model: `python -m llmserve.engines.fake`.

An answer takes as many steps as it has tokens, a step takes `step_s`, and every token is the same word. It runs
`slots` requests at once and refills each slot as it becomes free, or, as a barrier engine, one static batch
after the other, whose steps take `row_s` more for each of its rows: answers of one token then take what an image
classifier does, alpha b + beta. It may serve several models, each at a pace of its own. With no step time it is as fast
an upstream as aiohttp can be, for measuring a front-end.

Tests start it in their own process:

    async with FakeEngine(slots=2, step_s=0.001) as engine:
        await session.post(engine.url + "/v1/chat/completions", json={..., "max_tokens": 5})
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import msgspec
from aiohttp import web

from bins.profile import batch_s
from llmserve.engines.embedded.batching import BatchQueue, Seat, seat_of
from llmserve.engines.fake_answer import FakeAnswer, events, whole_body, whole_stream

FaultMode = Literal["ok", "hang", "500", "close_mid_stream", "slow"]

_BODY_BYTES_MAX = 64 << 20
_SLOW_FACTOR = 10
_SLOW_STEP_S_MIN = 0.01


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with the requests that arrive from now on.

    hang              no further byte after `after_tokens` tokens, until the client leaves
    500               refused with status 500
    close_mid_stream  the connection is cut after `after_tokens` tokens
    slow              every step takes ten times as long (10 ms at least)
    """

    mode: FaultMode = "ok"
    after_tokens: int = 0


@dataclass(frozen=True, slots=True)
class FakePace:
    """Seconds: an answer of L tokens in a batch of b takes prefill_s + L (step_s + row_s b)."""

    step_s: float = 0.01
    prefill_s: float = 0.0
    row_s: float = 0.0


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Body(msgspec.Struct):
    """The part of a request that an engine without a model cares for."""

    model: str | None = None
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = False
    stream_options: _StreamOptions | None = None


@dataclass(frozen=True, slots=True)
class _Began:
    """When a request began to run, and with how many others in its batch, itself counted; 0: in a slot."""

    at_s: float
    rows: int = 0


@dataclass(slots=True, eq=False)
class _Turn:
    """A request's place in the engine."""

    began: asyncio.Future[_Began]
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class FakeEngine:
    """The engine and its HTTP server, as an async context manager; `url` is valid inside it.

    running, waiting : requests now.  running_max : most at once so far.  bodies : the last ones received.
    others : models that it serves besides `model`, each with its pace. row_s is for barrier engines only: ValueError.
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
    ) -> None:
        self.model = model
        self.running = 0
        self.running_max = 0
        self.waiting = 0
        self.bodies: deque[bytes] = deque(maxlen=256)
        self.fault = Fault()
        self._slots_count = slots
        self._slots = asyncio.Semaphore(slots)
        self._barrier = barrier
        self._queue: BatchQueue[_Turn] = BatchQueue(gather_s)
        self._paces = {model: FakePace(step_s, prefill_s, row_s), **others}
        if not barrier and any(pace.row_s for pace in self._paces.values()):
            raise ValueError("row_s: only a barrier engine has batches of a size")
        self._output_tokens = output_tokens
        self._tokens_max = tokens_max  # what it says its KV cache holds; it counts nothing itself
        self._host, self._port = host, port
        self._runner: web.ServerRunner | None = None
        self._batches: asyncio.Task[None] | None = None
        self._routes = {
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/v1/models"): self._models,
            ("POST", "/fault"): self._set_fault,
            ("POST", "/v1/completions"): self._complete,
            ("POST", "/v1/chat/completions"): self._complete,
        }

    async def __aenter__(self) -> FakeEngine:
        # A bare web.Server: without an application's router and middlewares it is nearly twice as fast.
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
        if handler is None:
            return _Refused(404, f"no such path: {request.path}").response()
        try:
            return await handler(request)
        except ValueError as error:  # a member that contradicts its batch
            return _Refused(400, str(error)).response()
        except ConnectionError:  # the client left while its answer was written
            return web.Response()

    async def _health(self, request: web.BaseRequest) -> web.Response:
        return web.Response()

    async def _models(self, request: web.BaseRequest) -> web.Response:
        common = {"object": "model", "created": 0, "owned_by": "llmserve", "max_model_len": 1 << 20}
        return web.json_response({"object": "list", "data": [{"id": model, **common} for model in self._paces]})

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
            body = msgspec.json.decode(raw, type=_Body)
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
        answer = self._answer(body, chat=request.path == "/v1/chat/completions")
        return await (self._stream(request, answer, seat) if body.stream else self._whole(request, answer, seat))

    def _answer(self, body: _Body, *, chat: bool) -> FakeAnswer:
        return FakeAnswer(
            body.model or self.model,
            chat,
            body.max_completion_tokens or body.max_tokens or self._output_tokens,
            len(bytes(body.messages or body.prompt).split()),  # not tokens, but more of them for more text
            body.stream_options is not None and body.stream_options.include_usage,
            "length" if body.max_completion_tokens or body.max_tokens else "stop",
        )

    async def _whole(self, request: web.BaseRequest, answer: FakeAnswer, seat: Seat | None) -> web.StreamResponse:
        if not self._is_instant(answer.model):
            fault = self.fault
            async with self._turn(seat) as began:
                async for due in self._steps(began, answer, fault, stride=answer.tokens):
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
        async with self._turn(seat) as began:
            async for due in self._steps(began, answer, fault):
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
        """Whether answers need neither time nor a slot."""
        return self._paces[model] == FakePace(0.0) and not self._barrier and self.fault.mode == "ok"

    async def _steps(
        self, began: _Began, answer: FakeAnswer, fault: Fault, stride: int = 1
    ) -> AsyncIterator[int | None]:
        """Waits until `stride` more tokens are due, yields how many are; None where a fault cuts the answer off.

        Times are counted from the start, so that a late timer delays one token and not all that follow.
        """
        loop = asyncio.get_running_loop()
        tokens, pace = answer.tokens, self._paces[answer.model]
        step_s = pace.step_s + pace.row_s * began.rows
        if fault.mode == "slow":
            step_s = max(_SLOW_STEP_S_MIN, _SLOW_FACTOR * step_s)
        faulty = fault.mode in ("hang", "close_mid_stream")
        last = min(tokens, fault.after_tokens) if faulty else tokens
        first_s = began.at_s + pace.prefill_s
        done = 0
        while done < last:
            wanted = min(done + stride, last)
            due_s = began.at_s + batch_s(wanted, step_s, pace.prefill_s)
            if (delay_s := due_s - loop.time()) > 0:
                await asyncio.sleep(delay_s)
            due = int((loop.time() - first_s) / step_s) if step_s else last
            due = min(max(due, wanted), last)
            yield due - done
            done = due
        if fault.mode == "hang":
            await asyncio.Event().wait()
        if fault.mode == "close_mid_stream":
            yield None

    @asynccontextmanager
    async def _turn(self, seat: Seat | None) -> AsyncIterator[_Began]:
        """A slot, or a place in the running batch; yields when it was got."""
        async with AsyncExitStack() as place:
            self.waiting += 1
            try:
                wait = self._place_in_batch(seat) if self._barrier else self._slot()
                began = await place.enter_async_context(wait)
            finally:
                self.waiting -= 1
            self.running += 1
            self.running_max = max(self.running_max, self.running)
            try:
                yield began
            finally:
                self.running -= 1

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[_Began]:
        async with self._slots:
            yield _Began(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def _place_in_batch(self, seat: Seat | None) -> AsyncIterator[_Began]:
        turn = _Turn(asyncio.get_running_loop().create_future())
        self._queue.add(turn, seat)
        try:
            yield await turn.began
        finally:
            turn.ended.set()
            self._queue.remove(turn)

    async def _run_batches(self) -> None:
        while True:
            batch = await self._queue.take()
            began = _Began(asyncio.get_running_loop().time(), len(batch))
            for turn in batch:
                if not turn.began.done():
                    turn.began.set_result(began)
            for turn in batch:
                await turn.ended.wait()


def _make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    """What aiohttp's server makes, with room for large bodies."""
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


def main() -> None:
    """Serves until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m llmserve.engines.fake", description="A timed engine, no model.")
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8002, help="0: any free port; the ready line tells which")
    add("--model", default="fake", help="name in the API")
    add("--slots", type=int, default=8, help="requests at once, or the largest batch with --barrier")
    add("--step-s", type=float, default=0.01, help="seconds per token")
    add("--prefill-s", type=float, default=0.0, help="seconds before the first step")
    add("--row-s", type=float, default=0.0, help="seconds more a step for each row of a batch, with --barrier")
    add("--barrier", action="store_true", help="run one static batch at a time")
    add("--tokens-max", type=int, help="tokens that it says its KV cache holds")
    add(
        "--other",
        type=_other,
        action="append",
        default=[],
        metavar="NAME=STEP_S[,PREFILL_S[,ROW_S]]",
        help="a model served besides, with a pace of its own; repeat for several",
    )
    add("--output-tokens", type=int, default=16, help="tokens of an answer whose request does not say")
    arguments = vars(parser.parse_args())
    arguments["others"] = dict(arguments.pop("other"))
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(FakeEngine(**arguments)))
    except (OSError, ValueError) as error:
        sys.exit(f"llmserve.engines.fake: error: {error}")


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


if __name__ == "__main__":
    main()
