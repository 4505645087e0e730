"""kill -9 of relays and of the scheduler process, at random, while requests are in flight.

    python scripts/lab scale.kills --relays 100 --scheduler 0 --name relays
    python scripts/lab scale.kills --relays 0 --scheduler 50 --name scheduler

Each client asks again when it has its answer, streamed or whole in turn, on a connection of its own, and reads all that
comes. The engine counts how often it was asked for each request. Of every request must hold:

* it is answered once, as a whole, with exactly the tokens that it asked for; or its relay died: the connections of a
  relay are looked at while it stands still (SIGSTOP), just before it is killed
* the engine was asked for it once, where the scheduler process lives. Its successor may start a request again that had
  no byte of an answer

At the end no request waits or runs, no reserve of the budget is left, the budget has been charged with the tokens of
the answers, and SIGTERM ends every process with success.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import shlex
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from kit.arguments import parser_of, positive, whole
from kit.client import get_text, session_of
from kit.progress import counted, log
from kit.results import day_and_machine, read_parts
from kit.servers import Server, module, running

from llmserve.engines.timed.answer import WORD
from llmserve.engines.timed.server import FakeEngine
from questions.scale.page import OUTPUT, PAGE, save
from questions.scale.sides import by_kind

KEY = "key-of-the-clients"
ADMIN = "key-of-the-operator"
BUDGET_TOKENS = 10**9
TOKENS = (2, 40)  # of an answer, at least and at most
SLOTS_SHARE = 0.4  # of the requests in flight that run, while the others wait
PAUSE_S = (0.2, 1.5)  # between a process's return and the next kill, at least and at most
WHILE_IT_STARTS = 0.25  # share of kills that come before all processes serve again
ANSWER_S, BACK_S, REST_S = 90.0, 60.0, 30.0
GAUGES = ("llmserve_bin_requests", "llmserve_formed_requests", "llmserve_engine_running")
NUMBER = re.compile(rb"request number (\d+)")
TOTAL = re.compile(rb'"total_tokens":(\d+)')


class CountingEngine(FakeEngine):
    """Counts how often it was asked for each request."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.asked: Counter[int] = Counter()
        self.bodies = self  # type: ignore[assignment]

    def append(self, body: bytes) -> None:
        if (match := NUMBER.search(body)) is not None:
            self.asked[int(match[1])] += 1


# ---- clients --------------------------------------------------------------------------------------------------------


@dataclass
class Asked:
    """A request. port : of its client.  end : "answered", "broken", or what is wrong.  used : tokens, by the answer"""

    number: int
    tokens: int
    stream: bool
    port: int = 0
    begun: bool = False
    end: str = ""
    used: int = 0

    @property
    def body(self) -> bytes:
        message = {"role": "user", "content": f"request number {self.number} of many"}
        options = {"stream_options": {"include_usage": True}} if self.stream else {}
        asked = {"model": "fake", "messages": [message], "max_tokens": self.tokens, "stream": self.stream, **options}
        return json.dumps(asked).encode()


async def ask(port: int, asked: Asked) -> None:
    """Ask on a new connection, and judge all that comes until it is closed."""
    data = b""
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            asked.port = writer.get_extra_info("sockname")[1]
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nauthorization: Bearer {KEY}\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(asked.body)}\r\nconnection: close\r\n\r\n"
            writer.write(head.encode() + asked.body)
            with contextlib.suppress(ConnectionError):
                while piece := await reader.read(65536):
                    data += piece
                    asked.begun = True
            writer.close()
    except TimeoutError:
        asked.end = f"no end within {ANSWER_S:.0f} s"
        return
    except ConnectionError as error:
        asked.end = f"no connection: {error}"
        return
    asked.end = judged(asked, data)


def judged(asked: Asked, data: bytes) -> str:
    try:
        status, body = answer_of(data)
    except EOFError:
        return "broken"
    except ValueError as error:
        return str(error)
    if status != 200:
        return f"status {status}: {body[:120]!r}"
    total = TOTAL.findall(body)
    asked.used = int(total[-1]) if total else 0
    if asked.stream:
        tokens, ends = body.count(b'"content":"%b"' % WORD.encode()), body.count(b"data: [DONE]")
        right = (tokens, ends, b'"error"' in body) == (asked.tokens, 1, False)
    else:
        right = json.loads(body)["choices"][0]["message"]["content"] == WORD * asked.tokens
    return "answered" if right and len(total) == 1 else f"not what was asked for ({asked.tokens}): {body[-200:]!r}"


def answer_of(data: bytes) -> tuple[int, bytes]:
    """Status and body of the one answer. Raises EOFError where it is cut, ValueError where more follows."""
    head, found, rest = data.partition(b"\r\n\r\n")
    if not found:
        raise EOFError
    told, body = head.lower(), b""
    if b"transfer-encoding: chunked" in told:
        size = -1
        while size:
            line, found, rest = rest.partition(b"\r\n")
            size = int(line, 16) if found else 1
            if not found or len(rest) < size + 2:
                raise EOFError
            body, rest = body + rest[:size], rest[size + 2 :]
    else:
        size = int(told.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        if len(rest) < size:
            raise EOFError
        body, rest = rest[:size], rest[size:]
    if rest:
        raise ValueError(f"a second answer: {rest[:120]!r}")
    return int(head.split()[1]), body


class Clients:
    """Clients that ask until they are to end. broken_ports : of the connections of relays that were killed"""

    def __init__(self, port: int, count: int, rng: random.Random) -> None:
        self.asked: list[Asked] = []
        self.broken_ports: set[int] = set()
        self._port, self._rng = port, rng
        self._ending = False
        self._tasks = [asyncio.create_task(self._keep_asking()) for _ in range(count)]

    async def _keep_asking(self) -> None:
        while not self._ending:
            number = len(self.asked)
            one = Asked(number, self._rng.randint(*TOKENS), stream=number % 2 == 0)
            self.asked.append(one)
            await ask(self._port, one)
            if one.end != "answered":
                await asyncio.sleep(0.05)

    async def end(self) -> None:
        """Wait for the last answers."""
        self._ending = True
        await asyncio.gather(*self._tasks)


# ---- kills ----------------------------------------------------------------------------------------------------------


class Killer:
    """Kills processes of a server, and waits until they are back."""

    def __init__(self, server: Server, clients: Clients, rng: random.Random) -> None:
        self._server, self._clients, self._rng = server, clients, rng

    async def kill(self, kind: str) -> float:
        """Kill a relay or the scheduler process. Returns the seconds until there is another in its place.

        Mostly until that one serves, too.
        """
        processes = by_kind(self._server)
        victim = self._rng.choice(processes[kind])
        count = {name: len(of) for name, of in processes.items()}
        victim.suspend()
        if kind == "relays":
            self._clients.broken_ports |= {one.raddr.port for one in victim.net_connections(kind="tcp") if one.raddr}
        victim.kill()
        killed_s = time.monotonic()
        while time.monotonic() < killed_s + BACK_S:
            await asyncio.sleep(0.05)
            with contextlib.suppress(psutil.Error):
                now = by_kind(self._server)
                if victim not in now.get(kind, ()) and {name: len(of) for name, of in now.items()} == count:
                    break
        else:
            raise AssertionError(f"no {kind} is back after {BACK_S:.0f} s")
        if self._rng.random() >= WHILE_IT_STARTS:
            await self._until_served(len(processes["relays"]), killed_s + BACK_S)
        return time.monotonic() - killed_s

    async def _until_served(self, relays: int, until_s: float) -> None:
        """Wait until all relays have told the scheduler process of themselves."""
        while time.monotonic() < until_s:
            async with session_of(5.0, connections_kept=False) as session:
                session.headers.update({"authorization": f"Bearer {KEY}"})
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    if f"llmserve_relays {relays}.0" in await get_text(session, f"{self._server.url}/metrics"):
                        return
            await asyncio.sleep(0.1)
        raise AssertionError("not all relays are back")


# ---- a campaign -----------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """What a campaign found. faults : what is wrong, with counts"""

    answered: int = 0
    broken: int = 0
    broken_before_a_byte: int = 0
    asked_again: int = 0
    back_s: list[float] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    tokens_answered: int = 0
    tokens_charged: int = 0
    tokens_unknown: int = 0


async def campaign(
    relays: int, scheduler: int, flight: int, *, workers: int = 2, seed: int = 0, step_s: float = 0.05
) -> Found:
    """So many kills of each kind, with `flight` requests in flight."""
    rng, found = random.Random(seed), Found()
    kinds = ["relays"] * relays + ["scheduler"] * scheduler
    rng.shuffle(kinds)
    slots = max(1, int(SLOTS_SHARE * flight))
    async with CountingEngine(slots=4 * slots, step_s=step_s) as engine:
        with tempfile.TemporaryDirectory(prefix="llmserve-kills-") as folder:
            usage = Path(folder) / "usage.sqlite"
            async with _server(engine.url, Path(folder), slots, flight, workers) as server:
                clients = Clients(server.port, flight, rng)
                killer = Killer(server, clients, rng)
                with counted(len(kinds)) as done:
                    for kind in kinds:
                        await asyncio.sleep(rng.uniform(*PAUSE_S))
                        found.back_s.append(await killer.kill(kind))
                        done(kind)
                await clients.end()
                found.faults.update(await _left(server))
                processes = psutil.Process(server.process.pid).children(recursive=True)
                server.process.terminate()
                if await asyncio.wait_for(server.process.wait(), REST_S):
                    found.faults["the server ended without success"] += 1
                found.faults["processes that stay"] += len([one for one in processes if one.is_running()])
            found.tokens_charged = _charged(usage)
    _judge(found, clients, engine.asked, scheduler_lives=not scheduler)
    found.faults = +found.faults
    return found


def _judge(found: Found, clients: Clients, executed: Mapping[int, int], *, scheduler_lives: bool) -> None:
    prompt_tokens = max([one.used - one.tokens for one in clients.asked if one.end == "answered"], default=0)
    for one in clients.asked:
        times = executed.get(one.number, 0)
        if one.end == "answered":
            found.answered += 1
            found.tokens_answered += one.used
            if not times:
                found.faults["answered by nobody"] += 1
        elif one.end == "broken" and one.port in clients.broken_ports:
            found.broken += 1
            found.broken_before_a_byte += not one.begun
            found.tokens_unknown += one.tokens + prompt_tokens if times else 0
        else:
            found.faults["broken without a reason" if one.end == "broken" else one.end] += 1
        if times > 1:
            found.asked_again += 1
            if scheduler_lives:
                found.faults["sent to the engine again"] += 1
    if not 0 <= found.tokens_charged - found.tokens_answered <= found.tokens_unknown:
        found.faults["charged is not answered"] += 1


async def _left(server: Server) -> Mapping[str, int]:
    """What has not come back to zero."""
    left: dict[str, int] = {}
    headers = {"authorization": f"Bearer {ADMIN}"}
    until_s = time.monotonic() + REST_S
    while time.monotonic() < until_s:
        async with session_of(connections_kept=False) as session:
            session.headers.update({"authorization": f"Bearer {KEY}"})
            rows = [line.rsplit(" ", 1) for line in (await get_text(session, f"{server.url}/metrics")).splitlines()]
            left = {name: int(float(value)) for name, value in rows if name.startswith(GAUGES) and float(value)}
            async with session.get(f"{server.url}/admin/usage", headers=headers) as response:
                budgets = (await response.json())["budgets"]
        if reserved := sum(budget["reserved"] for budget in budgets):
            left["tokens reserved"] = round(reserved)
        if not left:
            return {}
        await asyncio.sleep(0.2)
    return left


def _charged(usage: Path) -> int:
    with contextlib.closing(sqlite3.connect(usage)) as connection:
        return round(connection.execute("SELECT sum(amount) FROM spent WHERE unit = 'tokens'").fetchone()[0] or 0)


@asynccontextmanager
async def _server(engine: str, folder: Path, slots: int, flight: int, workers: int) -> AsyncIterator[Server]:
    keys, admin = folder / "keys.toml", folder / "admin"
    most = f"concurrent = {2 * flight}\ntokens_per_day = {BUDGET_TOKENS}\n"
    keys.write_text(f'[keys.clients]\nkey = "{KEY}"\n{most}', encoding="utf-8")
    admin.write_text(f"root: {ADMIN}\n", encoding="utf-8")
    for file in (keys, admin):
        file.chmod(0o600)
    flags = ["--workers", str(workers), "--engine", engine, "--slots", str(slots), "--log-level", "error"]
    flags += ["--api-key-file", str(keys), "--admin-key-file", str(admin), "--usage-file", str(folder / "usage.sqlite")]
    async with running("llmserve", module("llmserve", "serve", *flags), ready="/health") as server:
        yield server


def row_of(found: Found, kills: Mapping[str, int], flight: int) -> dict[str, Any]:
    back_s = sorted(found.back_s)
    return {
        **kills,
        "in_flight": flight,
        "answered": found.answered,
        "broken": found.broken,
        "broken_before_a_byte": found.broken_before_a_byte,
        "asked_again": found.asked_again,
        "back_s_median": back_s[len(back_s) // 2] if back_s else 0.0,
        "tokens_answered": found.tokens_answered,
        "tokens_charged": found.tokens_charged,
        "faults": dict(found.faults),
    }


def main() -> object:
    parser = parser_of(__doc__)
    parser.add_argument("--relays", type=whole(0), default=100, help="kills of relays")
    parser.add_argument("--scheduler", type=whole(0), default=50, help="kills of the scheduler process")
    parser.add_argument("--flight", type=whole(1), default=200, help="requests in flight")
    parser.add_argument("--workers", type=whole(2), default=2)
    parser.add_argument("--seed", type=whole(0), default=0)
    parser.add_argument("--step-s", type=positive, default=0.05, help="the engine's time for a token")
    parser.add_argument("--name", default="both", help="of the row on the page")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="FILE")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE")
    args = parser.parse_args()
    found = asyncio.run(
        campaign(args.relays, args.scheduler, args.flight, workers=args.workers, seed=args.seed, step_s=args.step_s)
    )
    row = row_of(found, {"relays": args.relays, "scheduler": args.scheduler}, args.flight)
    log(json.dumps(row, indent=1))
    rows = [one for one in read_parts(args.output).get("kills", {}).get("rows", ()) if one["name"] != args.name]
    command = f"python scripts/lab scale.kills {shlex.join(sys.argv[1:])}"
    part = {**day_and_machine(), "rows": [*rows, {"name": args.name, "command": command, **row}]}
    save("kills", part, args.output, args.page)
    return f"faults: {dict(found.faults)}" if found.faults else 0
