#!/usr/bin/env python
"""What llmserve in front of real vLLM servers costs and gains, beside vLLM alone and vLLM's own priorities.

    python scripts/lab/benchmark_vllm.py --vllm-python .venv-vllm/bin/python --router .venv-router/bin/vllm-router \\
        --trace azure_llm_2023_conv.csv.gz --output docs/results/vllm.json --figures docs/vllm
    python scripts/lab/benchmark_vllm.py --report --output docs/results/vllm.json --figures docs/vllm

The script starts the vLLM servers itself (the demo model, float32, prefix caching off, so that a request costs the same
each time) and asks them the demo model's held-out prompts. Answers are greedy: each prompt's length is learnt in a
first pass and told as a prediction afterwards, to llmserve in a header and to vLLM as the request's priority:

    oracle      the length itself
    predicted   times a lognormal error: Kendall's tau is what the trained predictor reaches on people's prompts
    random      the lengths, shuffled over the prompts

In each round of a part every arrangement gets the same requests at the same times, with the same predictions. Rounds
differ in all three, and each begins with another arrangement. A pass through llmserve or vllm-router has a server of
its own, started for it: nothing that one pass taught it helps the next. llmserve's own forecasts are switched off
(--predictor none --memory-keys 0), for a round asks what the one before asked. vLLM runs with --scheduling-policy
priority throughout; requests that state no priority are first come, first served.

    idle          one request at a time: what llmserve adds
    burst         all requests at once
    poisson-X     Poisson arrivals at X times the requests per second of bursts of the same requests, sent to vLLM
                  directly at the beginning of the round (the best of three); as many arrivals in as much time,
                  whatever the seed
    trace         arrivals and lengths of stretches of a trace (--trace: CSV with arrival_s and output_tokens), both
                  scaled: lengths by one factor, so that the longest is the demo model's longest answer; arrivals to 0.9
    routers       two vLLM servers; llmserve beside vllm-router (--router), Poisson arrivals at 0.9
    barrier       llmserve running batches of 8 to their end, with 8 bins and with none, all at once; lengths are known,
                  and so are the edges of the bins
    memory        all at once, on a server whose KV cache is far too small for its slots: what holding back saves
    kill          two vLLM servers behind llmserve, one killed when half of the requests are answered

A request's service time is a + b n for n output tokens, fitted on requests asked one at a time. Slow-down is latency
over service time. Every request's deadline is 0.5 s and 5 times its service time after its arrival; "deadlines met"
counts all requests. Only `edf` is told deadlines, and drops late requests with 504: they miss their deadline and have
no latency, so read its latencies with that share beside them. In the burst edf's deadlines are ten minutes and 5 times
the predicted service time, so that none is dropped and deadlines are as good as the predictions.

Each part replaces its own section of --output, so parts can be run one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import gzip
import json
import math
import os
import platform
import re
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import aiohttp
import numpy as np
import psutil
import uvloop
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.stats import kendalltau

from bins.edges import equal_mass_edges
from llmserve.config import EngineConfig
from llmserve.engines.embedded import demo_corpus
from llmserve.engines.engine_process import LEASH, free_port
from llmserve.headers import PREDICTED_HEADER, SLO_HEADER

MODEL_FOLDER = Path(demo_corpus.__file__).with_name("model")
MODEL = "llmserve-demo"
# vLLM's engine core and its worker wait for each other by spinning. As two processes they would leave two cores hardly
# any time for its own API server, let alone for what stands before it: a request then waits half a second for its first
# step. Here they are one process with one thread, which leaves the other core to the rest, as a GPU would; and where
# there are more cores than servers, one core is its own, for every process that is woken there would halt its steps.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
ORDERS = ("fffs", "shortest", "edf")
ROUTER_POLICIES = ("round_robin", "power_of_two")
PARTS = ("idle", "burst", "poisson-0.7", "poisson-0.9", "trace", "routers", "barrier", "memory", "kill")
SERVERS = {"routers": 2, "kill": 2}  # else 1
MEMORY_SLOTS = 16
SMALL_CACHE = ["--num-gpu-blocks-override", "40", "--block-size", "32"]  # 1,280 tokens; one answer may need 1,024
REQUESTS = {"idle": 200, "barrier": 400, "memory": 400, "kill": 500}  # of a pass; else REQUESTS_LOAD
REQUESTS_LOAD = 600
ROUNDS = {"idle": 1, "barrier": 3, "memory": 3, "kill": 1}  # else ROUNDS_LOAD
ROUNDS_LOAD = 5
LOADS = {"poisson-0.7": 0.7, "poisson-0.9": 0.9, "trace": 0.9, "routers": 0.9}  # of capacity

KENDALL_TAU = 0.63  # the trained predictor on people's prompts: docs/prediction.md
SLO_S, SLO_SERVICE_TIMES = 0.5, 5.0
SLO_BURST_S = 600.0  # nothing waits so long
CAPACITY_BURSTS = 3
IDLE_TOKENS = 16
WARM_UP_REQUESTS = 16
ANSWER_S_MAX = 900.0  # a request without an answer for so long is lost
START_S, STOP_S = 300.0, 20.0

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


# ---- what is compared ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrangement:
    """How requests reach vLLM, and what is told about their lengths.

    way          "direct", "priority" (vLLM's own), an order of llmserve, a policy of vllm-router ("round_robin",
                 "power_of_two"), or "barrier"
    predictions  "oracle", "predicted", "random", or None: nothing is told
    bins         of a barrier
    bound        False: llmserve does not look at the engine's memory
    """

    way: str
    predictions: str | None = None
    bins: int = 1
    bound: bool = True

    @property
    def name(self) -> str:
        if self.way == "barrier":
            return "llmserve, barrier, " + ("no bins" if self.bins == 1 else f"{self.bins} bins")
        who = {"direct": "vLLM directly", "priority": "vLLM by priority"}
        who |= {policy: f"vllm-router {policy}" for policy in ROUTER_POLICIES}
        told = [self.predictions] if self.predictions else []
        return ", ".join(
            [who.get(self.way, f"llmserve {self.way}"), *told, *([] if self.bound else ["memory ignored"])]
        )


DIRECT = Arrangement("direct")
KINDS = ("oracle", "predicted", "random")


def arrangements_of(part: str, orders: Sequence[str]) -> list[Arrangement]:
    """Those that take turns in a part; orders: llmserve's that are measured."""
    if part == "barrier":
        return [Arrangement("barrier", "oracle", bins) for bins in (1, 8)]
    if part in ("idle", "kill"):
        return [DIRECT, Arrangement("fffs")]
    if part == "memory":
        bound = [Arrangement(order, kind) for order in ("fffs", "shortest") for kind in ("oracle", "predicted")]
        return [DIRECT, *bound, Arrangement("fffs", "oracle", bound=False)]
    told = {"fffs": (None,), "shortest": KINDS, "edf": KINDS if part == "burst" else ("predicted",)}
    if part == "routers":
        beside = [Arrangement(policy) for policy in ROUTER_POLICIES]
        told = {"fffs": (None,), "shortest": ("oracle", "predicted")}
    else:
        kinds = KINDS if part == "burst" else ("oracle", "predicted")
        beside = [DIRECT, *(Arrangement("priority", kind) for kind in kinds)]
    return beside + [Arrangement(order, kind) for order in orders for kind in told.get(order, ())]


def baselines_of(arrangement: Arrangement, names: Sequence[str]) -> dict[str, str]:
    """label -> name of each arrangement, among `names`, that this one is compared with."""
    found = {"direct": DIRECT.name} | {policy: Arrangement(policy).name for policy in ROUTER_POLICIES}
    if arrangement.predictions:
        found["priority"] = Arrangement("priority", arrangement.predictions).name
    found["no bins"] = Arrangement("barrier").name
    return {label: name for label, name in found.items() if name in names and name != arrangement.name}


# ---- lengths, predictions, arrivals -------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServiceTime:
    """Seconds that the idle engine takes for an answer of n tokens: start_s + token_s * n."""

    start_s: float
    token_s: float

    def __call__(self, tokens: Floats | Ints) -> Floats:
        return self.start_s + self.token_s * np.asarray(tokens, float)

    @classmethod
    def fitted(cls, tokens: Sequence[int], seconds: Sequence[float]) -> ServiceTime:
        """Least squares of relative errors: slow-downs of short answers depend on small times."""
        slope, start = np.polyfit(tokens, seconds, deg=1, w=1 / np.asarray(seconds))
        return cls(max(0.0, float(start)), float(slope))


@dataclass(frozen=True)
class Load:
    """The requests of a round. Arrays by request, in the order of arrival.

    told : kind of prediction -> predicted output tokens, >= 1
    """

    prompts: list[str]
    tokens: Ints
    arrivals_s: Floats
    told: Mapping[str, Ints]

    @property
    def taus(self) -> dict[str, float]:
        """Kendall's tau of each kind of prediction that was drawn."""
        return {kind: float(kendalltau(values, self.tokens).statistic) for kind, values in self.told.items()}


def error_sigma(tokens: Ints, tau: float = KENDALL_TAU, *, seed: int = 0) -> float:
    """Standard deviation of the lognormal error with which lengths are predicted with this Kendall's tau."""
    sample = np.tile(tokens, max(1, 4000 // tokens.size))
    errors = np.random.default_rng(seed).standard_normal(sample.size)

    def reached(sigma: float) -> float:
        return float(kendalltau(np.log(sample) + sigma * errors, sample).statistic)

    low, high = 0.0, 20.0  # reached() falls as sigma grows
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if reached(middle) > tau else (low, middle)
    return (low + high) / 2


def predictions(tokens: Ints, rng: np.random.Generator) -> dict[str, Ints]:
    """One draw of every kind, in whole tokens: what vLLM's priorities can say, llmserve is told too."""
    erred = tokens * np.exp(error_sigma(tokens) * rng.standard_normal(tokens.size))
    return {"oracle": tokens, "predicted": np.maximum(1, np.rint(erred)).astype(int), "random": rng.permutation(tokens)}


def poisson_arrivals_s(count: int, rate_per_s: float, rng: np.random.Generator) -> Floats:
    """A Poisson process, given that exactly `count` requests arrive in count / rate seconds: its load is exact."""
    return np.sort(rng.uniform(0.0, count / rate_per_s, count))


def nearest_indices(wanted: Floats, tokens: Ints, rng: np.random.Generator) -> Ints:
    """For each wanted length the index of a prompt of nearest length, any of those that are equally near."""
    lengths = np.unique(tokens)
    nearest = lengths[np.argmin(np.abs(wanted[:, None] - lengths), axis=1)]  # (wanted, lengths)
    return np.array([rng.choice(np.flatnonzero(tokens == length)) for length in nearest])


def read_trace(path: Path) -> tuple[Floats, Floats]:
    """arrival_s and output_tokens of a trace's rows, sorted by arrival."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    rows = [(float(row["arrival_s"]), float(row["output_tokens"])) for row in csv.DictReader(text.splitlines())]
    arrivals_s, tokens = np.array(sorted(rows)).T
    return arrivals_s, tokens


# ---- servers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """A child process that serves HTTP on a loopback port. It is the leader of a process group."""

    name: str
    port: int
    process: asyncio.subprocess.Process
    said: IO[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """End it and all that it has started at once. Harmless when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def until_ready(self, path: str) -> None:
        """Until GET `path` answers 200. Raises RuntimeError with its last words when that never comes."""
        until_s = time.monotonic() + START_S
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while self.process.returncode is None and time.monotonic() < until_s:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                    async with session.get(self.url + path) as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.05)
        self.said.seek(0)
        raise RuntimeError(f"{self.name} did not start:\n{self.said.read()[-3000:].decode(errors='replace')}")


@asynccontextmanager
async def running(
    name: str, command: Callable[[int], list[str]], *, ready: str, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Server]:
    """command(port) as a server that ends with this script, however that ends; ready: see Server.until_ready.

    Unlike an EngineProcess it is not restarted when it ends.
    """
    port = free_port()
    with tempfile.TemporaryFile() as said:
        process = await asyncio.create_subprocess_exec(
            *LEASH,
            *command(port),
            stdin=asyncio.subprocess.PIPE,
            stdout=said,
            stderr=said,
            env={**os.environ, **(environment or {})},
        )
        server = Server(name, port, process, said)
        try:
            await server.until_ready(ready)
            yield server
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), STOP_S)
            server.kill()
            await process.wait()


@asynccontextmanager
async def vllm_server(
    args: argparse.Namespace, name: str, slots: int, more: Sequence[str] = ()
) -> AsyncIterator[Server]:
    """A vLLM server with the demo model. more: further arguments of vLLM's."""

    def command(port: int) -> list[str]:
        words = [args.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL_FOLDER)]
        words += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
        words += ["--max-num-seqs", str(slots), "--max-model-len", "1024", "--enforce-eager", "--dtype", "float32"]
        words += ["--distributed-executor-backend", "uni", "--no-enable-prefix-caching"]
        return [*words, "--scheduling-policy", "priority", *more]

    async with running(name, command, ready="/health", environment=ENVIRONMENT) as server:
        yield server


@dataclass(frozen=True)
class Engines:
    """vLLM servers that are up, and what they do. tokens : of the answer to each prompt."""

    servers: list[Server]
    slots: int
    prompts: list[str]
    tokens: Ints
    service: ServiceTime
    requests_per_s: float
    vllm: str

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]


@asynccontextmanager
async def front(args: argparse.Namespace, arrangement: Arrangement, engines: Engines) -> AsyncIterator[str]:
    """The URL to which the arrangement's requests go; what answers there lives as long as the context."""
    if arrangement.way in ("direct", "priority"):
        yield engines.urls[0]
        return

    def llmserve(port: int) -> list[str]:
        words = [sys.executable, "-m", "llmserve", "serve", "--port", str(port), "--predictor", "none"]
        words += ["--memory-keys", "0", "--log-level", "warning"]
        for url in engines.urls:
            words += ["--engine", url]
        if arrangement.way == "barrier":
            # Without a predictor there are no bins before 256 requests have come, unless their edges are given.
            edges = ",".join(f"{edge:g}" for edge in equal_mass_edges(engines.tokens, arrangement.bins))
            words += ["--barrier", "--batch-size", str(engines.slots), "--bins", str(arrangement.bins)]
            return [*words, *(["--edges", edges] if edges else [])]
        words += ["--slots", str(engines.slots), "--order", arrangement.way]
        words += [] if arrangement.bound else ["--no-memory-bound"]
        return words if args.look_ahead is None else [*words, "--look-ahead", str(args.look_ahead)]

    def router(port: int) -> list[str]:
        words = [args.router, "--host", "127.0.0.1", "--port", str(port), "--policy", arrangement.way]
        words += ["--prometheus-port", str(free_port()), "--log-level", "warning"]
        return [*words, "--worker-urls", *engines.urls]

    command, ready = (router, "/health") if arrangement.way in ROUTER_POLICIES else (llmserve, "/ready")
    async with running(arrangement.name, command, ready=ready) as server:
        yield server.url


# ---- asking -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Question:
    body: bytes
    headers: Mapping[str, str]
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request. Times are seconds after its arrival; tokens is 0 and failure is said when it failed."""

    arrival_s: float
    first_s: float
    latency_s: float
    tokens: int
    failure: str | None = None


def body_of(prompt: str, priority: int | None = None, *, stream: bool = True) -> bytes:
    """No max_tokens: it would tell llmserve the length."""
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(body if priority is None else body | {"priority": priority}).encode()


def questions_of(arrangement: Arrangement, load: Load, service: ServiceTime, *, burst: bool) -> list[Question]:
    """burst: edf's deadlines are long, and come from the predictions."""
    told = None if arrangement.predictions is None else load.told[arrangement.predictions]
    slos_s = SLO_S + SLO_SERVICE_TIMES * service(load.tokens)
    if burst and told is not None:
        slos_s = SLO_BURST_S + SLO_SERVICE_TIMES * service(told)
    questions = []
    for index, prompt in enumerate(load.prompts):
        headers = {"content-type": "application/json"}
        priority = None
        if told is not None and arrangement.way == "priority":
            priority = int(told[index])
        elif told is not None:
            headers[PREDICTED_HEADER] = str(told[index])
        if arrangement.way == "edf":
            headers[SLO_HEADER] = f"{1e3 * slos_s[index]:.0f}"
        questions.append(Question(body_of(prompt, priority), headers, float(load.arrivals_s[index])))
    return questions


PREEMPTIONS = re.compile(r"^vllm:num_preemptions_total\{.*\} (\S+)$", re.M)
USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
TAIL_BYTES = 1024  # hold the usage event and what follows it


def client_session() -> aiohttp.ClientSession:
    """A connection for each request: a server may close one that has rested, just when it is used again."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=ANSWER_S_MAX))


async def ask(session: aiohttp.ClientSession, url: str, question: Question, due_s: float) -> Outcome:
    """due_s: when it should have been sent, on the clock of perf_counter; everything is counted from then."""

    def failed(why: str) -> Outcome:
        return Outcome(question.arrival_s, math.nan, time.perf_counter() - due_s, 0, why)

    head, tail, first_s = b"", b"", 0.0
    try:
        async with session.post(f"{url}/v1/chat/completions", data=question.body, headers=question.headers) as response:
            if response.status != 200:
                return failed(f"{response.status} {code_of(await response.read())}")
            async for chunk in response.content.iter_any():
                if not first_s:  # the first event only opens the answer
                    head += chunk
                    if head.count(b"data: ") > 1:
                        first_s = time.perf_counter() - due_s
                tail = (tail + chunk)[-TAIL_BYTES:]
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return failed(f"{type(error).__name__}")
    latency_s = time.perf_counter() - due_s
    usage = USAGE.search(tail)
    if usage is None or b"data: [DONE]" not in tail:
        return failed("the stream ended too early")
    return Outcome(question.arrival_s, first_s, latency_s, int(usage[1]))


def code_of(body: bytes) -> str:
    """The code (or type) of an error in OpenAI's shape; "unclear" for anything else."""
    try:
        error = json.loads(body)["error"]
        return str(error.get("code") or error["type"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return "unclear"


async def send(urls: Sequence[str], questions: Sequence[Question]) -> list[Outcome]:
    """Ask each question at its time, at the URL beside it."""
    async with client_session() as session:
        begin_s = time.perf_counter() + 0.1

        async def ask_in_time(url: str, question: Question) -> Outcome:
            due_s = begin_s + question.arrival_s
            if (wait_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            return await ask(session, url, question, due_s)

        return await asyncio.gather(*(ask_in_time(*pair) for pair in zip(urls, questions, strict=True)))


def all_at_once(prompts: Sequence[str]) -> list[Question]:
    return [Question(body_of(prompt), {"content-type": "application/json"}) for prompt in prompts]


def shares(tokens: Ints, count: int) -> list[int]:
    """For each request which of `count` servers gets it, so that all get about the same number of tokens."""
    totals = [0] * count
    placed = [0] * tokens.size
    for index in np.argsort(-tokens, kind="stable"):
        placed[index] = int(np.argmin(totals))
        totals[placed[index]] += int(tokens[index])
    return placed


async def capacity_per_s(engines: Engines, load: Load) -> float:
    """Requests of such a load that the engines do in a second: bursts, sent directly, an equal share to each.

    The best of them: whatever else happens on a machine only ever makes it slower.
    """
    placed = shares(load.tokens, len(engines.urls))
    rates = []
    for _ in range(CAPACITY_BURSTS):
        outcomes = await send([engines.urls[place] for place in placed], all_at_once(load.prompts))
        rates.append(summary(outcomes, load, engines.service)["tokens_per_s_saturated"])
    return max(rates) / float(load.tokens.mean())


# ---- cores --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def kept_off_the_first_core(apart: bool) -> Iterator[None]:
    """We, and all that we start from here on, leave the first core to an engine, as if it were its GPU."""
    cores = os.sched_getaffinity(0)
    if apart:
        os.sched_setaffinity(0, cores - {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def move_engine_to_the_first_core(server: Server, core: int) -> None:
    """The thread of the server's engine core that computes; its API server stays with the others."""
    processes = psutil.Process(server.process.pid).children(recursive=True)
    (engine_core,) = [process for process in processes if process.name().startswith("VLLM::EngineC")]
    os.sched_setaffinity(engine_core.pid, {core})  # the process's number is that of its first thread, which steps


# ---- getting to know the engines ----------------------------------------------------------------------------------


@asynccontextmanager
async def started(args: argparse.Namespace, count: int, requests: int, *, small: bool) -> AsyncIterator[Engines]:
    """`count` vLLM servers, the lengths of `requests` answers and what lengths take there. small: of little memory."""
    slots = MEMORY_SLOTS if small else args.slots if count == 1 else args.slots_each
    cores = os.sched_getaffinity(0)
    apart = count < (os.cpu_count() or 1)
    async with AsyncExitStack() as stack:
        say(f"starting {count} vLLM server{'s' * (count > 1)}")
        stack.enter_context(kept_off_the_first_core(apart))
        servers = []
        for index in range(count):
            servers.append(
                await stack.enter_async_context(vllm_server(args, f"vLLM {index}", slots, SMALL_CACHE if small else ()))
            )
        if apart:
            move_engine_to_the_first_core(servers[0], min(cores))
        urls = [server.url for server in servers]
        prompts = [drawn.prompt for drawn in demo_corpus.examples(requests, seed=args.seed, held_out=True)]
        placed = [urls[index % count] for index in range(requests)]
        await send(placed[:64], all_at_once(prompts[:64]))  # the first answers of a fresh server are slow
        outcomes = await send(placed, all_at_once(prompts))
        for outcome in outcomes:
            if outcome.failure:
                raise RuntimeError(f"vLLM itself failed: {outcome.failure}")
        tokens = np.array([outcome.tokens for outcome in outcomes])
        rate = len(outcomes) / max(outcome.latency_s for outcome in outcomes)
        service = await fit_service_time(urls[0], prompts, tokens)
        async with client_session() as session, session.get(f"{urls[0]}/version") as response:
            version = (await response.json())["version"]
        say(
            f"{requests} prompts, {tokens.mean():.0f} tokens in the mean, {tokens.max()} at most; {rate:.1f} requests/s"
        )
        say(f"service time: {1e3 * service.start_s:.1f} ms + {1e3 * service.token_s:.2f} ms a token")
        yield Engines(servers, slots, prompts, tokens, service, rate, version)


async def fit_service_time(url: str, prompts: list[str], tokens: Ints, count: int = 16) -> ServiceTime:
    """From prompts spread evenly over the lengths, each asked three times, one at a time."""
    chosen = np.argsort(tokens, kind="stable")[np.linspace(0, tokens.size - 1, min(count, tokens.size)).astype(int)]
    seconds: dict[int, list[float]] = {int(index): [] for index in chosen}
    async with client_session() as session:
        for _ in range(3):
            for index, these in seconds.items():
                question = all_at_once([prompts[index]])[0]
                these.append((await ask(session, url, question, time.perf_counter())).latency_s)
    medians = [statistics.median(these) for these in seconds.values()]
    return ServiceTime.fitted([int(tokens[index]) for index in seconds], medians)


# ---- what a pass has shown ----------------------------------------------------------------------------------------


def saturated_tokens_per_s(began_s: Floats, ended_s: Floats, tokens: Ints) -> float:
    """Tokens per second until the last answer began, that is, while something waited. Seconds after the first arrival.

    A burst's makespan also holds the time in which slots run empty: with the longest answers last that is the longest,
    although none of it is lost where requests keep coming. An answer's tokens are taken to come evenly.
    """
    until_s = began_s.max()
    shares = np.clip((until_s - began_s) / np.maximum(ended_s - began_s, 1e-9), 0.0, 1.0)
    return float((shares * tokens).sum() / until_s)


def summary(outcomes: Sequence[Outcome], load: Load, service: ServiceTime) -> dict[str, float]:
    """Of one pass. Latencies and slow-downs are of answered requests, deadlines_met of all.

    tokens_per_s: from the first arrival to the end of the last answer. dropped: refused with 504; failed: any other
    way of not being answered. other_length: answered with another length than in the first pass. Raises RuntimeError
    when no request was answered.
    """
    answered = [(index, outcome) for index, outcome in enumerate(outcomes) if outcome.failure is None]
    if not answered:
        raise RuntimeError(f"no request was answered; the first says: {outcomes[0].failure}")
    tokens = np.array([outcome.tokens for _, outcome in answered])
    first_s = np.array([outcome.first_s for _, outcome in answered])
    latency_s = np.array([outcome.latency_s for _, outcome in answered])
    wanted = load.tokens[[index for index, _ in answered]]
    taken_s = service(wanted)
    slowdown = latency_s / taken_s
    dropped = sum((outcome.failure or "").startswith("504 ") for outcome in outcomes)
    since_s = np.array([o.arrival_s for _, o in answered]) - min(o.arrival_s for o in outcomes)
    found = {
        "tokens_per_s": tokens.sum() / (since_s + latency_s).max(),
        "tokens_per_s_saturated": saturated_tokens_per_s(since_s + first_s, since_s + latency_s, tokens),
        "first_token_s_mean": first_s.mean(),
        "first_token_s_p50": np.percentile(first_s, 50),
        "first_token_s_p95": np.percentile(first_s, 95),
        "latency_s_mean": latency_s.mean(),
        "latency_s_p50": np.percentile(latency_s, 50),
        "latency_s_p95": np.percentile(latency_s, 95),
        "latency_s_p99": np.percentile(latency_s, 99),
        "slowdown_mean": slowdown.mean(),
        "slowdown_p95": np.percentile(slowdown, 95),
        "deadlines_met": (latency_s <= SLO_S + SLO_SERVICE_TIMES * taken_s).sum() / len(outcomes),
        "dropped": dropped,
        "failed": len(outcomes) - len(answered) - dropped,
        "other_length": (tokens != wanted).sum(),
    }
    return {name: float(value) for name, value in found.items()}


RATIOS = (
    "tokens_per_s",
    "tokens_per_s_saturated",
    "first_token_s_mean",
    "latency_s_mean",
    "latency_s_p95",
    "latency_s_p99",
    "slowdown_mean",
)


def rows(arrangements: Sequence[Arrangement], rounds: Mapping[str, Sequence[dict[str, float]]]) -> list[dict[str, Any]]:
    """Medians over the rounds; ratios round by round, then their median: a machine that slows down slows both sides."""
    made = []
    for arrangement in arrangements:
        these = rounds[arrangement.name]
        row: dict[str, Any] = {
            "arrangement": arrangement.name,
            "way": arrangement.way,
            "predictions": arrangement.predictions,
            "bins": arrangement.bins,
        }
        row |= {name: round(statistics.median(one[name] for one in these), 5) for name in these[0]}
        row["ratios"] = {
            label: {
                name: round(statistics.median(a[name] / b[name] for a, b in zip(these, rounds[base], strict=True)), 4)
                for name in RATIOS
            }
            for label, base in baselines_of(arrangement, list(rounds)).items()
        }
        made.append(row)
    return made


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- the parts ----------------------------------------------------------------------------------------------------


@dataclass
class Rounds:
    """A part in the making: what each pass has shown, by arrangement; and of each round's load what it was like."""

    arrangements: list[Arrangement]
    shown: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    taus: list[dict[str, float]] = field(default_factory=list)
    mean_tokens: list[float] = field(default_factory=list)
    capacity_per_s: list[float] = field(default_factory=list)

    def section(self) -> dict[str, Any]:
        taus = {kind: statistics.median(these[kind] for these in self.taus) for kind in self.taus[0]}
        found: dict[str, Any] = {
            "mean_tokens": round(statistics.median(self.mean_tokens), 1),
            "kendall_tau": {kind: round(tau, 3) for kind, tau in taus.items()},
            "rows": rows(self.arrangements, self.shown),
            "passes": self.shown,
        }
        if self.capacity_per_s:
            found["capacity_requests_per_s"] = round(statistics.median(self.capacity_per_s), 2)
        return found


async def take_turns(
    args: argparse.Namespace,
    part: str,
    engines: Engines,
    make: Callable[[np.random.Generator], Load],
    timed: Callable[[Load, float, np.random.Generator], Load] | None = None,
) -> dict[str, Any]:
    """Round after round, the arrangements of a part over the same load.

    make : the requests of a round.  timed : gives them their arrivals, from the requests a second that engines can do;
    without it all come at once.
    """
    these = Rounds(arrangements_of(part, args.orders))
    count = rounds_of(args, part)
    for number in range(count):
        rng = np.random.default_rng([args.seed, PARTS.index(part), number])
        load = make(rng)
        if timed is not None:
            capacity = await capacity_per_s(engines, load)
            these.capacity_per_s.append(capacity)
            load = timed(load, capacity, rng)
            say(f"{part} round {number + 1}/{count}: vLLM's capacity is {capacity:.2f} requests/s")
        these.taus.append(load.taus)
        these.mean_tokens.append(float(load.tokens.mean()))
        start = number % len(these.arrangements)
        for arrangement in these.arrangements[start:] + these.arrangements[:start]:
            before = await preemptions(engines)
            outcomes = await one_pass(args, arrangement, engines, load, burst=timed is None)
            found = summary(outcomes, load, engines.service) | {"preemptions": await preemptions(engines) - before}
            these.shown.setdefault(arrangement.name, []).append(found)
            say(f"{part} round {number + 1}/{count}: {arrangement.name}: {in_words(found)}")
    return these.section()


async def preemptions(engines: Engines) -> float:
    """Times so far that vLLM has evicted a request from its cache, to compute it again later."""
    count = 0.0
    async with client_session() as session:
        for url in engines.urls:
            async with session.get(f"{url}/metrics") as response:
                count += sum(float(number) for number in PREEMPTIONS.findall(await response.text()))
    return count


async def one_pass(
    args: argparse.Namespace, arrangement: Arrangement, engines: Engines, load: Load, *, burst: bool
) -> list[Outcome]:
    async with front(args, arrangement, engines) as url:
        some = engines.prompts[:WARM_UP_REQUESTS]
        await send([url] * len(some), all_at_once(some))
        return await send([url] * len(load.prompts), questions_of(arrangement, load, engines.service, burst=burst))


def in_words(found: Mapping[str, float]) -> str:
    text = (
        f"{found['tokens_per_s']:,.0f} tokens/s, latency {found['latency_s_mean']:.2f} s mean, "
        f"{found['latency_s_p99']:.2f} s p99, slow-down {found['slowdown_mean']:.2f}"
    )
    odd = {name: int(found[name]) for name in ("dropped", "failed", "other_length", "preemptions") if found[name]}
    return text + "".join(f", {count} {name.replace('_', ' ')}" for name, count in odd.items())


def some_requests(engines: Engines, count: int) -> Callable[[np.random.Generator], Load]:
    """Makes loads of the first `count` prompts, in another order each time, all arriving at once."""

    def make(rng: np.random.Generator) -> Load:
        order = rng.permutation(count)
        tokens = engines.tokens[order]
        return Load([engines.prompts[index] for index in order], tokens, np.zeros(count), predictions(tokens, rng))

    return make


def at_poisson_times(share: float) -> Callable[[Load, float, np.random.Generator], Load]:
    def timed(load: Load, capacity: float, rng: np.random.Generator) -> Load:
        arrivals_s = poisson_arrivals_s(load.tokens.size, share * capacity, rng)
        return Load(load.prompts, load.tokens, arrivals_s, load.told)

    return timed


async def at_once_or_poisson(args: argparse.Namespace, part: str, engines: Engines) -> dict[str, Any]:
    make = some_requests(engines, requests_of(args, part))
    return await take_turns(args, part, engines, make, at_poisson_times(LOADS[part]) if part in LOADS else None)


async def trace(args: argparse.Namespace, part: str, engines: Engines) -> dict[str, Any]:
    """Each round another stretch of the trace."""
    all_arrivals_s, all_tokens = read_trace(args.trace)
    count = min(requests_of(args, part), all_tokens.size)
    factor = float(engines.tokens.max() / all_tokens.max())

    def make(rng: np.random.Generator) -> Load:
        start = int(rng.integers(all_tokens.size - count + 1))
        chosen = nearest_indices(factor * all_tokens[start : start + count], engines.tokens, rng)
        tokens = engines.tokens[chosen]
        arrivals_s = all_arrivals_s[start : start + count] - all_arrivals_s[start]
        return Load([engines.prompts[index] for index in chosen], tokens, arrivals_s, predictions(tokens, rng))

    def timed(load: Load, capacity: float, rng: np.random.Generator) -> Load:
        # The stretch's own mean rate becomes the wanted one; the shape of its arrivals stays.
        scale = load.tokens.size / (LOADS[part] * capacity) / load.arrivals_s[-1]
        return Load(load.prompts, load.tokens, scale * load.arrivals_s, load.told)

    found = await take_turns(args, part, engines, make, timed)
    return {"trace": args.trace.name, "length_factor": round(factor, 3), **found}


async def idle(args: argparse.Namespace, part: str, engines: Engines) -> dict[str, Any]:
    """Pairs of one request through llmserve and one to vLLM, in turns."""
    pairs = requests_of(args, part)
    near = np.argsort(np.abs(engines.tokens - IDLE_TOKENS), kind="stable")[:16]
    ways = arrangements_of(part, args.orders)
    seen: dict[str, list[Outcome]] = {arrangement.name: [] for arrangement in ways}
    timeout = aiohttp.ClientTimeout(total=ANSWER_S_MAX)
    async with (
        front(args, ways[1], engines) as through,
        aiohttp.ClientSession(timeout=timeout) as session,  # one connection to each side, kept: the cheapest for both
    ):
        urls = {DIRECT.name: engines.urls[0], ways[1].name: through}
        warm_up = 10
        for number in range(warm_up + pairs):
            question = all_at_once([engines.prompts[near[number % near.size]]])[0]
            for name in sorted(urls, reverse=bool(number % 2)):
                outcome = await ask(session, urls[name], question, time.perf_counter())
                if outcome.failure:
                    raise RuntimeError(f"{name}: {outcome.failure}")
                if number >= warm_up:
                    seen[name].append(outcome)
    found: dict[str, Any] = {"tokens": int(np.median(engines.tokens[near])), "rows": []}
    for name, outcomes in seen.items():
        row: dict[str, Any] = {"arrangement": name}
        for what, values in (
            ("latency_ms", [outcome.latency_s for outcome in outcomes]),
            ("first_token_ms", [outcome.first_s for outcome in outcomes]),
        ):
            row |= {f"{what}_{f'p{q}'}": round(1e3 * float(np.percentile(values, q)), 3) for q in (50, 95)}
        found["rows"].append(row)
    direct, llmserve = found["rows"]
    found["added_latency_ms"] = round(llmserve["latency_ms_p50"] - direct["latency_ms_p50"], 3)
    found["added_first_token_ms"] = round(llmserve["first_token_ms_p50"] - direct["first_token_ms_p50"], 3)
    say(f"idle: {found['added_latency_ms']:.2f} ms added, {found['added_first_token_ms']:.2f} ms to the first token")
    return found


# ---- one of two killed --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reply:
    """All that came back for a request. status 0: nothing, or a broken connection; body : bytes until then."""

    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Verdict:
    """kind : "answer", "error" (a clear one), "lost" (neither), or "twice" (more than one answer or error)."""

    kind: str
    code: str = ""
    text: str = ""


def judge(reply: Reply, *, stream: bool) -> Verdict:
    """What a client has to make of a reply to a request with one choice."""
    if reply.status not in (0, 200):
        code = code_of(reply.body)
        return Verdict("error", f"{reply.status} {code}") if code != "unclear" else Verdict("lost", "an unclear error")
    try:
        events = list(_events(reply.body)) if stream else [json.loads(reply.body)]
    except ValueError:
        return Verdict("lost", "cut off")
    choices = [choice for event in events for choice in event.get("choices", ())]
    errors = [event for event in events if "error" in event]
    finishes = sum(choice.get("finish_reason") is not None for choice in choices)
    text = "".join((choice.get("delta") or choice.get("message") or {}).get("content") or "" for choice in choices)
    if finishes + len(errors) > 1:
        return Verdict("twice", text=text)
    if errors:
        return Verdict("error", f"event {code_of(json.dumps(errors[0]).encode())}", text)
    if not finishes or (stream and not reply.body.rstrip().endswith(b"data: [DONE]")):
        return Verdict("lost", "cut off", text)
    return Verdict("answer", text=text)


def _events(body: bytes) -> Iterator[dict[str, Any]]:
    """The JSON of a stream's events. Raises ValueError where one is cut off."""
    for line in body.splitlines():
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield json.loads(line[6:])


async def whole_reply(session: aiohttp.ClientSession, url: str, prompt: str, *, stream: bool) -> Reply:
    headers = {"content-type": "application/json"}
    body, status = b"", 0
    try:
        async with session.post(
            f"{url}/v1/chat/completions", data=body_of(prompt, stream=stream), headers=headers
        ) as response:
            async for chunk in response.content.iter_any():
                body += chunk
            status = response.status
    except (aiohttp.ClientError, TimeoutError, OSError):
        pass
    return Reply(status, body)


async def kill(args: argparse.Namespace, part: str, engines: Engines) -> dict[str, Any]:
    """Every second request streams. The victim and all its processes die at once and stay dead."""
    count = requests_of(args, part)
    prompts = engines.prompts[:count]
    arrangement = arrangements_of(part, args.orders)[1]
    done = 0
    half_done = asyncio.Event()
    async with client_session() as session, front(args, arrangement, engines) as url:

        async def expected(index: int) -> str:
            reply = await whole_reply(session, engines.urls[index % 2], prompts[index], stream=False)
            return judge(reply, stream=False).text

        async def verdict(index: int) -> Verdict:
            nonlocal done
            reply = await whole_reply(session, url, prompts[index], stream=bool(index % 2))
            done += 1
            if 2 * done >= count:
                half_done.set()
            return judge(reply, stream=bool(index % 2))

        texts = await asyncio.gather(*(expected(index) for index in range(count)))
        asked = asyncio.gather(*(verdict(index) for index in range(count)))
        await half_done.wait()
        engines.servers[0].kill()
        answered_before = done
        await engines.servers[0].process.wait()
        verdicts = await asked
    kinds = Counter(verdict.kind for verdict in verdicts)
    found: dict[str, Any] = {kind: kinds[kind] for kind in ("answer", "error", "lost", "twice")}
    found["answered_before_the_kill"] = answered_before
    found["errors"] = dict(Counter(verdict.code for verdict in verdicts if verdict.kind in ("error", "lost")))
    found["other_text"] = sum(
        verdict.kind == "answer" and verdict.text != text for verdict, text in zip(verdicts, texts, strict=True)
    )
    say(f"kill: {found}")
    return found


# ---- measuring ----------------------------------------------------------------------------------------------------

MEASURES = {"idle": idle, "trace": trace, "kill": kill}  # else at_once_or_poisson


def requests_of(args: argparse.Namespace, part: str) -> int:
    return int(args.requests or REQUESTS.get(part, REQUESTS_LOAD))


def rounds_of(args: argparse.Namespace, part: str) -> int:
    return int(args.rounds or ROUNDS.get(part, ROUNDS_LOAD))


def estimate_s(args: argparse.Namespace, part: str, requests_per_s: float) -> float:
    """Wall time of a part, roughly. requests_per_s: of a burst."""
    requests = requests_of(args, part)
    if part == "idle":
        return requests * 0.2
    share_of_burst = {**LOADS, "barrier": 0.6}.get(part, 1.0)
    pass_s = requests / requests_per_s / share_of_burst + 5
    return rounds_of(args, part) * pass_s * (len(arrangements_of(part, args.orders)) + (part in LOADS))


def runnable(args: argparse.Namespace) -> list[str]:
    """The parts that were asked for and have what they need, in their order."""
    parts = [part for part in PARTS if part in args.parts]
    for part, needed, what in (("trace", args.trace, "--trace FILE"), ("routers", args.router, "--router PATH")):
        if part in parts and not needed:
            say(f"{part} is skipped: it needs {what}")
            parts.remove(part)
    return parts


async def measure(args: argparse.Namespace) -> None:
    parts = runnable(args)
    told = False
    for count, small in ((1, False), (1, True), (2, False)):
        these = [part for part in parts if SERVERS.get(part, 1) == count and (part == "memory") == small]
        if not these:
            continue
        requests = max(64, *(requests_of(args, part) for part in these))
        async with started(args, count, requests, small=small) as engines:
            if not told:
                for part in parts:
                    say(f"{part}: about {estimate_s(args, part, engines.requests_per_s) / 60:.1f} min")
                told = True
            for part in these:
                began_s = time.monotonic()
                found = await MEASURES.get(part, at_once_or_poisson)(args, part, engines)
                say(f"{part} took {(time.monotonic() - began_s) / 60:.1f} min")
                write(args.output, part, about(args, part, engines) | found)


def about(args: argparse.Namespace, part: str, engines: Engines) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "vllm": engines.vllm,
        "servers": len(engines.servers),
        "load": LOADS.get(part),
        "slots": engines.slots,
        "look_ahead": EngineConfig().look_ahead if args.look_ahead is None else args.look_ahead,
        "engine_core_apart": len(engines.servers) < (os.cpu_count() or 1),
        "requests": requests_of(args, part),
        "rounds": rounds_of(args, part),
        "seed": args.seed,
        "service_time": {"start_s": round(engines.service.start_s, 5), "token_s": round(engines.service.token_s, 6)},
    }


def write(path: Path, part: str, section: dict[str, Any]) -> None:
    """Replace the part's section; the others stay, in the order of the parts."""
    results = json.loads(path.read_text()) if path.exists() else {}
    results[part] = section
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({name: results[name] for name in PARTS if name in results}, indent=1) + "\n")


# ---- what the results say -----------------------------------------------------------------------------------------

TITLES = {
    "burst": "all at once",
    "poisson-0.7": "Poisson arrivals at 0.7 of capacity",
    "poisson-0.9": "Poisson arrivals at 0.9 of capacity",
    "trace": "a trace's arrivals and lengths, scaled to 0.9",
    "routers": "two vLLM servers, Poisson arrivals at 0.9",
    "barrier": "batches run to their end, all at once",
    "memory": "all at once, a KV cache of 1,280 tokens",
}


def row_of(
    results: Mapping[str, Any], part: str, way: str, predictions: str | None = None, bins: int = 1
) -> dict[str, Any] | None:
    for row in results.get(part, {}).get("rows", ()):
        if (row["way"], row["predictions"], row["bins"]) == (way, predictions, bins):
            return dict(row)
    return None


def ratio_of(row: Mapping[str, Any] | None, baseline: str, name: str) -> float | None:
    """None when the row, or the baseline beside it, was not measured, or some of its requests were not answered."""
    if row and (row["failed"] or row["dropped"]):
        return None
    value = (row or {}).get("ratios", {}).get(baseline, {}).get(name)
    return None if value is None else float(value)


@dataclass(frozen=True, slots=True)
class Goal:
    """One number to reach. value : None while it has not been measured."""

    what: str
    value: float | None
    limit: float
    at_least: bool = False
    unit: str = ""

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def goals(results: Mapping[str, Any]) -> list[Goal]:
    """The numbers to reach, beside what was measured."""
    found = []
    ordered = [row for row in results.get("burst", {}).get("rows", ()) if row["way"] in ORDERS]
    for name, what in (("tokens_per_s_saturated", "while requests wait"), ("tokens_per_s", "to the last answer")):
        least, where = None, "the least"
        if ordered:
            least, where = min((row["ratios"]["direct"][name], row["arrangement"]) for row in ordered)
        found.append(Goal(f"burst: throughput to direct {what}, {where}", least, 0.98, at_least=True))
    added = results.get("idle", {}).get("added_latency_ms")
    found.append(Goal("idle: added median latency", added, 3.0, unit=" ms"))
    for kind, limit in (("oracle", 0.60), ("predicted", 0.75)):
        value = ratio_of(row_of(results, "burst", "shortest", kind), "direct", "latency_s_mean")
        found.append(Goal(f"burst: mean latency to direct, shortest, {kind}", value, limit))
    for kind in ("oracle", "predicted"):
        row = row_of(results, "poisson-0.9", "shortest", kind)
        slowdown, p99 = ratio_of(row, "direct", "slowdown_mean"), ratio_of(row, "direct", "latency_s_p99")
        found.append(Goal(f"poisson-0.9: mean slow-down to direct, shortest, {kind}", slowdown, 0.6))
        found.append(Goal(f"poisson-0.9: p99 latency to direct, shortest, {kind}", p99, 1.1))
    for part in ("burst", "poisson-0.7", "poisson-0.9", "trace"):
        for kind in ("oracle", "predicted"):
            row = row_of(results, part, "shortest", kind)
            for name, what in (("latency_s_mean", "mean"), ("latency_s_p99", "p99")):
                value = ratio_of(row, "priority", name)
                found.append(Goal(f"{part}: {what} latency to vLLM's priorities, shortest, {kind}", value, 1.0))
    for arrangement in arrangements_of("routers", ("fffs", "shortest"))[len(ROUTER_POLICIES) :]:
        row = row_of(results, "routers", arrangement.way, arrangement.predictions)
        who = arrangement.name.removeprefix("llmserve ")
        for policy, limit in (("round_robin", 0.85), ("power_of_two", 1.0)):
            found.append(
                Goal(f"routers: p95 latency to {policy}, {who}", ratio_of(row, policy, "latency_s_p95"), limit)
            )
    bins = ratio_of(row_of(results, "barrier", "barrier", "oracle", 8), "no bins", "tokens_per_s")
    found.append(Goal("barrier: throughput of 8 bins to none", bins, 1.4, at_least=True))
    killed = results.get("kill", {})
    ended = killed["answer"] + killed["error"] if killed else None
    found.append(Goal("kill: answers and clear errors", ended, killed.get("requests", 500), at_least=True))
    found += [Goal(f"kill: requests that were {kind}", killed.get(kind), 0) for kind in ("lost", "twice")]
    return found


def print_report(results: Mapping[str, Any]) -> None:
    console = Console(width=180)
    for part, title in TITLES.items():
        if part in results:
            print_part(console, results[part], f"{part}: {title}")
    if "idle" in results:
        print_idle(console, results["idle"])
    if "kill" in results:
        print_kill(console, results["kill"])
    table = Table(title="Reach", title_justify="left")
    for column in ("", "measured", "wanted", ""):
        table.add_column(column, justify="right" if column else "left")
    for goal in goals(results):
        sign = "at least" if goal.at_least else "at most"
        value = "not measured" if goal.value is None else f"{goal.value:.4g}{goal.unit}"
        met = {None: "", True: "met", False: "not met"}[goal.met]
        table.add_row(goal.what, value, f"{sign} {goal.limit:g}{goal.unit}", met)
    console.print(table)


def print_part(console: Console, section: Mapping[str, Any], title: str) -> None:
    setting = (
        f"{section['requests']} requests of {section['mean_tokens']:.0f} tokens in the mean, "
        f"{section['rounds']} rounds, {section['slots']} slots a server"
    )
    table = Table(title=f"{title}\n{setting}", title_justify="left")
    table.add_column("arrangement")
    for column in (
        "tokens/s", "while\nsome wait", "first token (s)\nmean", "\np50", "\np95",
        "latency (s)\nmean", "\np50", "\np95", "\np99", "slow-down\nmean", "\np95", "deadlines\nmet",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for row in section["rows"]:
        times = [row[f"{name}_{which}"] for name, which in (
            ("first_token_s", "mean"), ("first_token_s", "p50"), ("first_token_s", "p95"),
            ("latency_s", "mean"), ("latency_s", "p50"), ("latency_s", "p95"), ("latency_s", "p99"),
        )]  # fmt: skip
        slow = [f"{row[name]:.2f}" for name in ("slowdown_mean", "slowdown_p95")]
        met = f"{100 * row['deadlines_met']:.1f} %"
        # Where requests come one by one, the last one seldom waits.
        waiting = f"{row['tokens_per_s_saturated']:,.0f}" if section["load"] is None else ""
        table.add_row(
            row["arrangement"], f"{row['tokens_per_s']:,.0f}", waiting, *(f"{s:.2f}" for s in times), *slow, met
        )
    console.print(table)
    labels = list(dict.fromkeys(label for row in section["rows"] for label in row["ratios"]))
    shown = {"tokens_per_s": "tokens/s", "latency_s_mean": "mean", "latency_s_p95": "p95", "latency_s_p99": "p99"}
    shown |= {"slowdown_mean": "slow-down"}
    if section["load"] is None:
        shown = {"tokens_per_s_saturated": "while some wait"} | shown
    ratios = Table(title="ratios, round by round (medians); latencies unless said otherwise", title_justify="left")
    ratios.add_column("arrangement")
    for label in labels:
        for place, name in enumerate(shown.values()):
            ratios.add_column(f"{f'to {label}' if not place else ''}\n{name}", justify="right")
    for row in section["rows"]:
        values = [row["ratios"].get(label, {}).get(name) for label in labels for name in shown]
        if any(value is not None for value in values):
            ratios.add_row(row["arrangement"], *("" if value is None else f"{value:.3f}" for value in values))
    console.print(ratios)
    for note in notes(section):
        console.print(note)
    console.print()


def notes(section: Mapping[str, Any]) -> list[str]:
    taus = ", ".join(f"{kind} {tau:.2f}" for kind, tau in section["kendall_tau"].items())
    found = [f"Kendall's tau of the predictions: {taus}."]
    for row in section["rows"]:
        if row["dropped"]:
            found.append(
                f"{row['arrangement']}: {row['dropped']:.0f} of {section['requests']} requests were dropped with 504; "
                "they have no latency, and missed their deadline."
            )
        if row.get("preemptions"):
            found.append(f"{row['arrangement']}: vLLM evicted a request {row['preemptions']:.0f} times.")
        if row["failed"]:
            found.append(f"{row['arrangement']}: {row['failed']:.0f} of {section['requests']} requests failed.")
    return found


def print_idle(console: Console, section: Mapping[str, Any]) -> None:
    title = f"idle: one request at a time, {section['tokens']} tokens, {section['requests']} pairs"
    table = Table(title=title, title_justify="left")
    table.add_column("arrangement")
    for column in ("latency (ms)\np50", "\np95", "first token (ms)\np50", "\np95"):
        table.add_column(column, justify="right")
    for row in section["rows"]:
        names = ("latency_ms_p50", "latency_ms_p95", "first_token_ms_p50", "first_token_ms_p95")
        table.add_row(row["arrangement"], *(f"{row[name]:.2f}" for name in names))
    table.add_row("added", f"{section['added_latency_ms']:.2f}", "", f"{section['added_first_token_ms']:.2f}", "")
    console.print(table)


def print_kill(console: Console, section: Mapping[str, Any]) -> None:
    console.print(
        f"kill: of {section['requests']} requests {section['answer']} were answered, {section['error']} ended with a "
        f"clear error, {section['lost']} were lost, {section['twice']} came twice; "
        f"{section['answered_before_the_kill']} had ended before the kill. Errors: {section['errors'] or 'none'}. "
        f"Answers with another text than vLLM's own: {section['other_text']}.\n"
    )


# ---- figures ------------------------------------------------------------------------------------------------------

COLORS = {
    "direct": "#8c8c8c", "priority": "#d98a3d", "fffs": "#9dbfe8", "shortest": "#2f6fc4", "edf": "#2a9d5c",
    "round_robin": "#8c8c8c", "power_of_two": "#b5a642",
}  # fmt: skip
SIZE = {"fontsize": 9}


def draw_bars(axes: Any, section: Mapping[str, Any], values: Mapping[str, float], shape: str, label: str) -> None:
    """One bar for each arrangement of the section, the first on top. shape: how a value is written beside its bar."""
    drawn = [row for row in section["rows"] if row["arrangement"] in values]
    places = range(len(drawn))
    lengths = [values[row["arrangement"]] for row in drawn]
    axes.barh(places, lengths, color=[COLORS[row["way"]] for row in drawn], height=0.72)
    for place, length in zip(places, lengths, strict=True):
        text = axes.text(length + 0.015 * max(lengths), place, format(length, shape), va="center", **SIZE)
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # a line may pass behind it
    axes.set_yticks(places, [row["arrangement"] for row in drawn], **SIZE)
    axes.set_ylim(len(drawn) - 0.4, -0.6)
    axes.set_xlim(0, 1.17 * max(lengths))
    axes.set_xlabel(label, **SIZE)
    axes.tick_params(axis="x", labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def ratios_to(section: Mapping[str, Any], baseline: str, name: str) -> dict[str, float]:
    """By arrangement; the baseline itself is 1."""
    return {row["arrangement"]: row["ratios"].get(baseline, {}).get(name, 1.0) for row in section["rows"]}


def column_of(section: Mapping[str, Any], name: str) -> dict[str, float]:
    return {row["arrangement"]: row[name] for row in section["rows"]}


def draw_burst(section: Mapping[str, Any], path: Path) -> None:
    figure, (left, right) = panels(1, 2, height=0.32 * len(section["rows"]) + 1.5)
    draw_bars(
        left, section, ratios_to(section, "direct", "latency_s_mean"), ".2f", "mean latency, ratio to vLLM directly"
    )
    draw_bars(right, section, ratios_to(section, "direct", "tokens_per_s"), ".2f", "throughput, ratio to vLLM directly")
    for axes in (left, right):
        axes.axvline(1, color="#555555", lw=1, ls="--")
    right.set_yticklabels([])
    figure.suptitle(f"{section['requests']} requests at once, {section['slots']} slots", fontsize=11)
    save(figure, path)


def draw_load(results: Mapping[str, Any], path: Path) -> None:
    """Rows: slow-down, p99 latency. Columns: the loads that were measured."""
    titles = {
        "poisson-0.7": "Poisson, 0.7 of capacity",
        "poisson-0.9": "Poisson, 0.9",
        "trace": "conversation trace, 0.9",
    }
    parts = [part for part in titles if part in results]
    height = 2 * (0.27 * len(results[parts[0]]["rows"]) + 0.8)
    figure, grid = panels(2, len(parts), height=height)
    for column, part in enumerate(parts):
        section = results[part]
        for axes, name, shape, label in (
            (grid[0][column], "slowdown_mean", ".2f", "mean slow-down"),
            (grid[1][column], "latency_s_p99", ".1f", "p99 latency (s)"),
        ):
            draw_bars(axes, section, column_of(section, name), shape, label)
            if column:
                axes.set_yticklabels([])
        grid[0][column].set_title(titles[part], fontsize=10)
    figure.suptitle("Slow-down is latency over the service time of the request on an idle server", fontsize=10)
    save(figure, path)


def draw_routers(section: Mapping[str, Any], path: Path) -> None:
    figure, (left, right) = panels(1, 2, height=0.34 * len(section["rows"]) + 1.5)
    draw_bars(left, section, column_of(section, "latency_s_p95"), ".2f", "p95 latency (s)")
    draw_bars(right, section, column_of(section, "latency_s_mean"), ".2f", "mean latency (s)")
    right.set_yticklabels([])
    figure.suptitle(
        f"Two vLLM servers of {section['slots']} slots, Poisson arrivals at {section['load']:g}", fontsize=11
    )
    save(figure, path)


def panels(high: int, wide: int, *, height: float) -> tuple[Any, Any]:
    """A figure that reads well at 900 pixels, and its axes: (wide,), or (high, wide) when there are several rows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, height), layout="constrained", dpi=140)
    grid = figure.subplots(high, wide, squeeze=False)
    return figure, grid if high > 1 else grid[0]


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def draw_figures(results: Mapping[str, Any], prefix: str) -> None:
    """prefix-burst.png, prefix-load.png, prefix-routers.png; those whose parts were measured."""
    if "burst" in results:
        draw_burst(results["burst"], Path(f"{prefix}-burst.png"))
    if any(part in results for part in ("poisson-0.7", "poisson-0.9", "trace")):
        draw_load(results, Path(f"{prefix}-load.png"))
    if "routers" in results:
        draw_routers(results["routers"], Path(f"{prefix}-routers.png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--vllm-python", help="interpreter of an environment with vLLM in it")
    add("--router", help="the executable vllm-router, for the part routers")
    add("--trace", type=Path, help="CSV (or .csv.gz) with arrival_s and output_tokens, for the part trace")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(default: all)")
    add("--orders", nargs="+", choices=ORDERS, default=list(ORDERS), help="llmserve's orders (default: all)")
    add("--requests", type=int, help=f"of every pass (default: {REQUESTS}, else {REQUESTS_LOAD})")
    add("--rounds", type=int, help=f"of every part (default: {ROUNDS}, else {ROUNDS_LOAD})")
    add("--slots", type=int, default=8, help="requests that a vLLM server runs at once (%(default)s)")
    add("--slots-each", type=int, default=4, help="the same where there are two of them (%(default)s)")
    add("--look-ahead", type=int, help="llmserve's --look-ahead (default: its own)")
    add("--seed", type=int, default=2028, help="draws prompts, their order, arrivals and predictions")
    add("--output", type=Path, help="the results as JSON; sections of other parts stay as they are")
    add("--figures", metavar="PREFIX", help="draw PREFIX-burst.png, PREFIX-load.png, PREFIX-routers.png")
    add("--report", action="store_true", help="measure nothing: tables and figures from --output")
    args = parser.parse_args()
    if not args.report and not args.vllm_python:
        parser.error("--vllm-python is needed to measure")
    if args.output is None:
        parser.error("--output is needed")
    if not args.report:
        run(measure(args))
    results = json.loads(args.output.read_text()) if args.output.exists() else {}
    print_report(results)
    if args.figures:
        draw_figures(results, args.figures)


def run(work: Coroutine[Any, Any, None]) -> None:
    """On uvloop where there is one: the load must not take much of the machine from what it measures."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


if __name__ == "__main__":
    main()
