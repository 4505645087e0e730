"""How long a scrape of /metrics keeps the event loop, by the number of streams and of engines.

    python scripts/lab performance.scrape --output docs/results/scrape.json

Each stream has had requests, and each engine has run some of them, so that all of their series exist. Processor time of
this process, median over scrapes; between two scrapes requests go on, as in a server.
"""

from __future__ import annotations

import statistics
import time

from kit.arguments import add_results, parser_of
from kit.results import machine, write_json
from kit.rows import Row
from kit.tables import cells, show

from llmserve.live.cluster import LiveCluster
from llmserve.live.fleet import Fleet
from llmserve.live.journal import Header, Journal
from llmserve.observe.metrics import Metrics
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import EngineReady, RequestArrived, RequestEnded, StartBatch
from llmserve.settings.policies import SchedulingConfig

CASES = ((1, 1), (100, 1), (100, 10), (1_000, 1), (100, 100))  # streams, engines
MODEL = "some-organisation/a-model-8B-instruct"


class Server:
    """The metrics of a server with so many streams and engines, without its sockets."""

    def __init__(self, streams: int, engines: int) -> None:
        header = Header(SchedulingConfig().resolved(barrier=False))
        self._cluster = LiveCluster(header.scheduler(), Fleet([]), Journal(header), clock=time.monotonic)
        self.metrics = Metrics(self._cluster, 8)
        self._streams, self._next_id = streams, 0
        self._running: list[tuple[str, int]] = []  # engine and request
        for name in [f"10.0.0.{n}:8000" for n in range(engines)]:
            self._step(EngineReady(EngineInfo(name, 64, False, models=(MODEL,))))

    def _step(self, event: EngineReady | RequestArrived | RequestEnded) -> None:
        now_s = self._cluster.now_s()
        actions = self._cluster.scheduler.handle(event, now_s)
        self._cluster.journal.append(now_s, event, actions)
        for action in actions:
            if isinstance(action, StartBatch):
                self._running += [(action.engine, request.id) for request in action.batch.requests]

    def serve(self, requests: int) -> None:
        """Serve so many requests at once: they run on all engines."""
        for _ in range(requests):
            self._next_id += 1
            stream = f"key-{self._next_id % self._streams}/application"
            self._step(RequestArrived(Request(self._next_id, 100.0, model=MODEL, stream=stream)))
        while self._running:
            engine, id_ = self._running.pop()
            self._step(RequestEnded(engine, id_, "completed", 20.0 + id_ % 300))


def measure(streams: int, engines: int, scrapes: int) -> Row:
    server = Server(streams, engines)
    server.serve(2 * max(streams, engines))
    times_ms, text = [], b""
    for _ in range(scrapes):
        server.serve(10)
        began_s = time.process_time()
        text = server.metrics.render()
        times_ms.append(1e3 * (time.process_time() - began_s))
    numbers = {"scrape_ms": statistics.median(times_ms), "lines": float(text.count(b"\n"))}
    return Row({"streams": streams, "engines": engines}, numbers)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--scrapes", type=int, default=51)
    add_results(parser)
    args = parser.parse_args()
    rows = [measure(streams, engines, args.scrapes) for streams, engines in CASES]
    columns = {
        "streams": ("streams", ""),
        "engines": ("engines", ""),
        "ms of the event loop": ("scrape_ms", ".1f"),
        "lines": ("lines", ",.0f"),
    }
    show("A scrape of /metrics", list(columns), cells(rows, columns))
    written = [{**row.case, **row.numbers} for row in rows]
    write_json(args.output, {**machine(), "scrapes": args.scrapes, "rows": written}, indent=2)
