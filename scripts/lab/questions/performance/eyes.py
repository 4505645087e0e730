"""What it costs a request to be seen: processor time of the front-end with the access log and with traces.

    python scripts/lab performance.eyes --output docs/results/eyes.json
    python scripts/lab performance.eyes --before TREE    # the hop beside that of another checkout, and nothing else

The whole way of a request, from the bytes of a client's connection to the bytes of its answer, in one process without
sockets: the engine is a stub that answers at once, every second time with a stream of 16 tokens. Each turn is a process
of its own, and its time is the least of its repetitions, in processor time; the turns of all variants alternate. So
other work on the machine changes a time little. Medians over the rounds; a ratio is the median of each round's ratio
to `off`. With callgrind the instructions of a turn can be counted instead, see --turn.

With --before the way is whole: sockets, a trivial upstream and --clients in the one process (bench/whole_hop.py), for
another checkout may have other seams. Each round has the least time and the tenth percentile of its batches.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from kit.arguments import add_results, parser_of
from kit.progress import log
from kit.results import in_turn, machine, write_json
from kit.rows import Row
from kit.tables import cells, show

from llmserve.engines.engine import Health, ServedModel
from llmserve.gateway.app import App
from llmserve.http.accepting import listening_socket
from llmserve.http.connection import Connection
from llmserve.http.limits import ServerLimits
from llmserve.http.server import Server
from llmserve.live.cluster import LiveCluster
from llmserve.live.fleet import Fleet
from llmserve.live.journal import Header, Journal
from llmserve.observe.metrics import Metrics
from llmserve.observe.part import Followers
from llmserve.request import EngineInfo
from llmserve.settings.policies import SchedulingConfig
from llmserve.settings.tree import ApiConfig
from llmserve.tenants.key_file import KeyFile
from llmserve.tenants.limits import KeyLimits

VARIANTS = ("off", "access log", "traces, 1 %", "traces, all")
ROOT = Path(__file__).resolve().parents[2]
HOP = Path(__file__).with_name("bench") / "whole_hop.py"
TOKENS = 16
CHUNK = b'data: {"id":"a","model":"m","choices":[{"index":0,"delta":{"content":"word "},"finish_reason":null}]}\n\n'
LAST = CHUNK.replace(b"null", b'"stop"')
USAGE = b'"usage":{"prompt_tokens":9,"completion_tokens":16,"total_tokens":25}'
STREAM = [*[CHUNK] * (TOKENS - 1), LAST, b'data: {"id":"a","choices":[],%b}\n\ndata: [DONE]\n\n' % USAGE]
WHOLE = b'{"id":"a","choices":[{"index":0,"message":{"content":"words"},"finish_reason":"stop"}],%b}' % USAGE


class StubAnswer:
    """An answer whose parts come one with each turn of the event loop."""

    status, retry_after, headers = 200, None, ()

    def __init__(self, parts: list[bytes], on_change: Any) -> None:
        self.content_type = "text/event-stream" if len(parts) > 1 else "application/json"
        self._parts, self._on_change, self._closed = deque(parts), on_change, False
        self._part = b""
        asyncio.get_running_loop().call_soon(self._come)

    def _come(self) -> None:
        if not self._closed:
            self._part = self._parts.popleft()
            if self._parts:
                asyncio.get_running_loop().call_soon(self._come)
            self._on_change()

    @property
    def complete(self) -> bool:
        return not self._parts

    def arrived(self) -> bool:
        return True

    def body(self) -> bytes:
        return self._part

    def take(self) -> bytes:
        part, self._part = self._part, b""
        return part

    def stalled(self) -> None:
        pass

    def drain(self) -> None:
        self._closed = True

    def close(self) -> None:
        self._closed = True


class StubEngine:
    info = EngineInfo("stub", 64, False)
    restart = None

    def ask(self, call: Any, batch: Any, on_change: Any) -> StubAnswer:
        return StubAnswer(STREAM if call.stream else [WHOLE], on_change)

    async def probe(self) -> Health:
        return Health((ServedModel("m"),))

    async def close(self) -> None:
        pass


class Client(asyncio.Transport):
    """The client's side of a connection: counts answers."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: Any) -> None:
        self.last = data


def request(*, stream: bool) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": "How long is a piece of string?"}], "stream": stream}
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


def traces_of(variant: str, cluster: LiveCluster, metrics: Metrics) -> Any:
    if not variant.startswith("traces"):
        return None
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from llmserve.observe.traces import Traces

    class Forgetting(InMemorySpanExporter):
        def export(self, spans: Any) -> Any:
            result = super().export(spans)
            self.clear()
            return result

    sample = 0.01 if variant.endswith("1 %") else 1.0
    return Traces(sample, lambda: metrics.order, cluster.now_s, BatchSpanProcessor(Forgetting()))


async def one_turn(variant: str, requests: int, repetitions: int) -> float:
    """Least processor microseconds of a request, over the repetitions."""
    header = Header(SchedulingConfig().resolved(barrier=False))
    cluster = LiveCluster(header.scheduler(), Fleet([StubEngine()]), Journal(header))
    metrics = Metrics(cluster, 8)
    traces = traces_of(variant, cluster, metrics)
    more = {"traces": traces} if traces is not None else {}
    app = App(cluster, metrics, KeyLimits(KeyFile(keys={})), ApiConfig(), **more)
    server = Server(app, listening_socket("127.0.0.1", 0), ServerLimits(1 << 20, 1 << 20, 1 << 30, 60.0))
    followers = Followers([traces.ended] if traces is not None else [])
    if variant == "access log":
        from llmserve.observe import access_log
        from llmserve.runtime import logs

        access_log.enable()
        handler = logging.StreamHandler(open(os.devnull, "w"))  # noqa: ASYNC230, SIM115 (as standard error)
        handler.setFormatter(logs.TextLines())
        logging.getLogger().addHandler(handler)
        followers.append(access_log.write)
    if followers:
        server.on_ended(followers.tell)
    cluster.start()
    while not all(cluster.engines_ready.values()):  # noqa: ASYNC110 (once)
        await asyncio.sleep(0.01)
    connection = Connection(server.shared, Client(), ("127.0.0.1", 1))
    data = [memoryview(request(stream=stream)) for stream in (False, True)]
    times_us = []
    for _ in range(repetitions):
        gc.collect()
        began_s = time.process_time()
        for number in range(requests):
            connection.received(data[number % 2])
            while connection not in server.shared.connections.idle:  # noqa: ASYNC110 (the turns of the event loop are what is measured)
                await asyncio.sleep(0)
        times_us.append(1e6 * (time.process_time() - began_s) / requests)
    await cluster.close()
    return min(times_us)


def child(tree: Path, *words: str) -> Any:
    """What a process of its own prints, as JSON, with the llmserve of this checkout."""
    environment = {**os.environ, "PYTHONPATH": str(tree.resolve())}
    command = [sys.executable, *words]
    return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def measure(rounds: int, requests: int, repetitions: int) -> list[Row]:
    times_us: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    sizes = "--requests", str(requests), "--repetitions", str(repetitions)
    for number in range(rounds):
        for variant in in_turn(list(VARIANTS), number):
            times_us[variant].append(float(child(ROOT, __file__, "--turn", variant, *sizes)))
        log(f"round {number + 1}/{rounds}")
    rows = []
    for variant, own in times_us.items():
        ratios = [time_us / off_us for time_us, off_us in zip(own, times_us["off"], strict=True)]
        numbers = {"cpu_us_per_request": statistics.median(own), "ratio_to_off": statistics.median(ratios)}
        rows.append(Row({"front-end": variant}, numbers))
    return rows


def measure_hop(before: Path, rounds: int, requests: int, batches: int, clients: int) -> list[Row]:
    """The whole hop of this checkout and of another one, in turn."""
    trees = {"before": before, "now": ROOT}
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in trees}
    for number in range(rounds):
        for name in in_turn(list(trees), number):
            times_us = sorted(child(trees[name], str(HOP), str(requests), str(batches), str(clients)))
            turns[name].append((times_us[0], times_us[len(times_us) // 10]))
        log(f"round {number + 1}/{rounds}")
    rows = []
    for name, own in turns.items():
        ratios = [
            [mine / its for mine, its in zip(*pair, strict=True)] for pair in zip(own, turns["before"], strict=True)
        ]
        least, p10 = zip(*own, strict=True)
        ratio_least, ratio_p10 = zip(*ratios, strict=True)
        numbers = {
            "cpu_us_least": min(least),
            "cpu_us_p10": statistics.median(p10),
            "ratio_least": statistics.median(ratio_least),
            "ratio_p10": statistics.median(ratio_p10),
        }
        rows.append(Row({"front-end": name}, numbers))
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=500, help="in a repetition, or a batch")
    parser.add_argument("--repetitions", type=int, default=5, help="in a turn")
    parser.add_argument("--before", type=Path, metavar="TREE", help="measure the hop beside that of another checkout")
    parser.add_argument("--clients", type=int, default=32, help="connections at once, with --before (%(default)s)")
    parser.add_argument("--turn", help="print the time of one turn of this variant, and nothing else")
    add_results(parser)
    args = parser.parse_args()
    if args.turn:
        print(asyncio.run(one_turn(args.turn, args.requests, args.repetitions)))
        return
    columns = {"front-end": ("front-end", "")}
    if args.before is not None:
        rows = measure_hop(args.before, args.rounds, args.requests, args.repetitions, args.clients)
        columns |= {"processor us of a request, least": ("cpu_us_least", ".0f"), "p10": ("cpu_us_p10", ".0f")}
        columns |= {"of before, least": ("ratio_least", ".3f"), "of before, p10": ("ratio_p10", ".3f")}
    else:
        rows = measure(args.rounds, args.requests, args.repetitions)
        columns |= {"processor us of a request": ("cpu_us_per_request", ".0f"), "of `off`": ("ratio_to_off", ".3f")}
    show("What it costs to be seen", list(columns), cells(rows, columns))
    written = [{**row.case, **row.numbers} for row in rows]
    setting = {"rounds": args.rounds, "requests": args.requests, "repetitions": args.repetitions}
    write_json(args.output, {**machine(), **setting, "rows": written}, indent=2)
