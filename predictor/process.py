"""A predictor in a child process, so that its work never blocks the caller.

The child is `python -m predictor.worker`. Its pipes carry one line of JSON for a batch of prompts, and one line for
their lengths. Prompts that arrive while a batch runs wait for the next batch.
"""

import asyncio
import hashlib
import json
import logging
import os
import sys
from base64 import b64decode
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from msgspec.structs import astuple, replace

from predictor.errors import BadPredictor, PredictionFailed, PredictorDied
from predictor.prediction import Prediction, mark_of
from predictor.prompt import Prompt
from predictor.text import head_and_tail

REPLY_BYTES_MAX = 2**22
IMPORT_ROOT = str(Path(__file__).resolve().parents[1])  # the child imports this same package
QUIET_AND_OFFLINE = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Waiting:
    """One prompt that has not been sent yet, and the futures of its callers."""

    prompt: Prompt
    futures: list[asyncio.Future[Prediction]] = field(default_factory=list)

    def has_callers(self) -> bool:
        return not all(future.done() for future in self.futures)

    def settle(self, answer: Prediction | Exception) -> None:
        for future in self.futures:
            if future.done():  # the caller gave up
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)


class PredictorProcess:
    """An asyncio handle of a child process that holds a LengthPredictor.

    Use it from one event loop: `await start()`, any number of concurrent `await predict(prompt)`, `await close()`; or
    `async with`. When the child dies, all waiting calls get PredictorDied, and so does every later uncached call until
    the child is up again. The child restarts after `restart_delay_s`, which doubles up to `restart_delay_s_max` while
    restarts fail.

    Under overload the newest prompts go first, because the callers of old prompts will soon give up. When more than
    `waiting_max` prompts wait, the oldest get PredictionFailed at once.

    threads : threads of the model in the child.  batch_max, batch_characters_max : most prompts in a batch, and about
    the most text, so that a short prompt never waits long for its batch.  cache_max : most cached predictions (the
    least recently used are dropped).  reply_timeout_s : a child that takes longer for one batch is killed.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        threads: int = 1,
        batch_max: int = 64,
        batch_characters_max: int = 8_192,
        waiting_max: int = 4096,
        cache_max: int = 10_000,
        start_timeout_s: float = 120.0,
        reply_timeout_s: float = 30.0,
        restart_delay_s: float = 0.5,
        restart_delay_s_max: float = 60.0,
    ) -> None:
        self.folder = Path(folder)
        self.threads = threads
        self.batch_max = batch_max
        self.batch_characters_max = batch_characters_max
        self.waiting_max = waiting_max
        self.cache_max = cache_max
        self.start_timeout_s = start_timeout_s
        self.reply_timeout_s = reply_timeout_s
        self.restart_delay_s = restart_delay_s
        self.restart_delay_s_max = restart_delay_s_max
        self._child: _Child | None = None  # None: down
        self._down = "the predictor process has not been started"
        self._keeper: asyncio.Task[None] | None = None
        self._waiting: OrderedDict[bytes, _Waiting] = OrderedDict()
        self._arrived = asyncio.Event()
        self._cache: OrderedDict[bytes, Prediction] = OrderedDict()
        self._in_flight: list[tuple[bytes, _Waiting]] = []
        self._characters_max = sys.maxsize
        self._delay_s = restart_delay_s
        self.mark = b""  # names the predictor; set by start()
        self.training_lengths: list[int] = []  # set by start()
        self.forecasts: list[tuple[float, ...]] = []  # for some validation prompts; set by start()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def pid(self) -> int | None:
        """The child's process id; None while the child is down."""
        return self._child.pid if self._child else None

    async def start(self) -> None:
        """Wait until the predictor is loaded. Raises BadPredictor or PredictorDied."""
        assert self._keeper is None, "started twice"
        child = await self._launch()
        self._keeper = asyncio.create_task(self._keep(child), name="predictor-keeper")

    async def close(self) -> None:
        """End the child. Waiting calls get PredictorDied. A second call has no effect."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])

    async def predict(self, prompt: Prompt) -> Prediction:
        """The prediction for a prompt. Raises PredictorDied or PredictionFailed; may be cancelled freely."""
        prompt = self._cut(prompt)
        key = hashlib.blake2b(repr(prompt).encode("utf-8", "replace"), digest_size=16).digest()
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        if self._child is None:
            raise PredictorDied(self._down)
        future: asyncio.Future[Prediction] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(key, _Waiting(prompt))
        waiting.futures.append(future)
        if len(self._waiting) > self.waiting_max:
            _, oldest = self._waiting.popitem(last=False)
            oldest.settle(PredictionFailed("too many prompts wait for the predictor"))
        self._arrived.set()
        try:
            return await future
        finally:
            if self._waiting.get(key) is waiting and not waiting.has_callers():
                del self._waiting[key]

    def _cut(self, prompt: Prompt) -> Prompt:
        """The prompt with the texts cut to what the child can read."""
        return replace(
            prompt,
            text=head_and_tail(prompt.text, self._characters_max),
            system=head_and_tail(prompt.system, self._characters_max),
        )

    async def _launch(self) -> "_Child":
        """Start and load a child, and use it from now on."""
        child = _Child(self.folder, self.threads)
        ready = await child.start(self.start_timeout_s)
        child.exit.add_done_callback(lambda _: self._arrived.set())  # wakes the keeper when an idle child dies
        self.training_lengths = ready["training_lengths"]
        self.forecasts = [tuple(lengths) for lengths in ready["forecasts"]]
        mark = mark_of(self.training_lengths, self.forecasts)
        if mark != self.mark:
            self._cache.clear()  # the folder has another predictor now
        self.mark = mark
        self._characters_max = ready["characters_max"]
        self._child = child
        return child

    async def _keep(self, child: "_Child") -> None:
        """Serve with the child; when it dies, fail the waiting calls and start another child, until cancelled."""
        try:
            while True:
                self._mark_down(await self._serve(child))
                log.warning("%s; restarting the process", self._down)
                child = await self._relaunch()
        finally:
            self._mark_down("the predictor process was closed")
            await child.end()

    async def _serve(self, child: "_Child") -> str:
        """Send the waiting prompts, batch after batch, until the child is dead; return the reason."""
        while child.alive:
            self._arrived.clear()
            self._in_flight = self._take_batch()
            if not self._in_flight:
                await self._arrived.wait()
                continue
            prompts = [waiting.prompt for _, waiting in self._in_flight]
            try:
                answers = await child.ask(prompts, self.reply_timeout_s)
            except PredictorDied as death:
                await child.end()
                return f"{death} (exit code {child.process.returncode})"
            self._settle(answers)
            self._delay_s = self.restart_delay_s
        return f"the predictor process ended (exit code {child.process.returncode})"

    def _take_batch(self) -> list[tuple[bytes, _Waiting]]:
        """The newest prompts."""
        batch: list[tuple[bytes, _Waiting]] = []
        characters = 0
        while self._waiting and len(batch) < self.batch_max and characters < self.batch_characters_max:
            key, waiting = self._waiting.popitem(last=True)
            batch.append((key, waiting))
            characters += len(waiting.prompt.text) + len(waiting.prompt.system)
        return batch

    def _settle(self, answers: list[Prediction | str]) -> None:
        for (key, waiting), answer in zip(self._in_flight, answers, strict=True):
            if isinstance(answer, str):
                waiting.settle(PredictionFailed(answer))
                continue
            self._cache[key] = answer
            waiting.settle(answer)
            if len(self._cache) > self.cache_max:
                self._cache.popitem(last=False)

    def _mark_down(self, reason: str) -> None:
        """Note that there is no child: waiting calls, and calls before the next child is up, fail for this reason."""
        self._child, self._down = None, reason
        for waiting in [*(waiting for _, waiting in self._in_flight), *self._waiting.values()]:
            waiting.settle(PredictorDied(reason))
        self._in_flight = []
        self._waiting.clear()

    async def _relaunch(self) -> "_Child":
        while True:
            await asyncio.sleep(self._delay_s)
            self._delay_s = min(2 * self._delay_s, self.restart_delay_s_max)  # reset by the first answered batch
            try:
                return await self._launch()
            except (BadPredictor, PredictorDied, OSError) as error:
                self._down = str(error)
                log.warning("the predictor process did not restart: %s", error)


def worker_command(folder: Path, threads: int) -> list[str]:
    """The child's command. -P keeps modules of the working directory from hiding modules of this package."""
    return [sys.executable, "-P", "-m", "predictor.worker", str(folder), str(threads)]


class _Child:
    """The operating system's process and its two pipes. One batch at a time."""

    exit: asyncio.Task[int]

    def __init__(self, folder: Path, threads: int) -> None:
        self.folder = folder
        self.threads = threads

    async def start(self, timeout_s: float) -> dict[str, Any]:
        """The child's first message, sent after loading. Raises BadPredictor or PredictorDied, and ends the child."""
        path = os.pathsep.join(filter(None, [IMPORT_ROOT, os.environ.get("PYTHONPATH")]))
        self.process = await asyncio.create_subprocess_exec(
            *worker_command(self.folder, self.threads),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=REPLY_BYTES_MAX,
            env={**os.environ, "PYTHONPATH": path, **QUIET_AND_OFFLINE},
        )
        self.exit = asyncio.create_task(self.process.wait())
        try:
            ready = await self._exchange(b"", timeout_s)
        except BaseException:  # also a cancelled start
            await self.end()
            raise
        if "error" in ready:
            await self.end()
            raise BadPredictor(ready["error"])
        return ready

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    async def ask(self, prompts: list[Prompt], timeout_s: float) -> list[Prediction | str]:
        """The prediction for each prompt, or an error text. Raises PredictorDied without an answer."""
        line = json.dumps([astuple(prompt) for prompt in prompts]).encode() + b"\n"
        answers = (await self._exchange(line, timeout_s))["predictions"]
        return [
            answer if isinstance(answer, str) else Prediction(tuple(answer[0]), b64decode(answer[1]))
            for answer in answers
        ]

    async def end(self) -> None:
        """Kill the process, which has nothing to save, and wait for its end."""
        if self.alive:
            self.process.kill()
        await self.exit

    async def _exchange(self, line: bytes, timeout_s: float) -> dict[str, Any]:
        """Send a line (empty for the first message) and return the child's next message. Raises PredictorDied."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                self.process.stdin.write(line)
                await self.process.stdin.drain()
                reply = await self.process.stdout.readline()
            if not reply:
                raise PredictorDied("the predictor process ended without an answer; its standard error says why")
            message: dict[str, Any] = json.loads(reply)
        except TimeoutError:
            raise PredictorDied(f"the predictor process did not answer within {timeout_s:g} s") from None
        except (OSError, ValueError) as error:  # a broken pipe; not a line of JSON
            raise PredictorDied(f"the communication with the predictor process failed: {error}") from error
        return message
