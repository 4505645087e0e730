"""What clients can do to others with bytes alone: attacks on a running server, each for some seconds, on loopback only.

    python scripts/lab attacks
    python scripts/lab attacks --only uploads --seconds 8 --output docs/results/attacks.json

Clients without a key, or with the key of alice, do their worst from a process of their own. Meanwhile GET /health is
asked 50 times a second, in turns on a kept and on a new connection, and bob, who has another key, asks for chats. The
server keeps 64 MiB of bodies, and in the last two cases may open few files. `nothing` is what the machine does to these
figures by itself.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import re
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from kit import client
from kit.arguments import add_results, parser_of
from kit.progress import log
from kit.results import day_and_machine, with_rows, write_text
from kit.rows import Row
from kit.servers import Server, fake_engine, module, running
from kit.tables import cells, show

KEYS = {"alice": "sk-alice-of-the-attacks", "bob": "sk-bob-of-the-attacks"}
BODY = {"model": "fake", "max_tokens": 5, "messages": [{"role": "user", "content": "How long is a piece of string?"}]}
HEALTH_EVERY_S, CHAT_EVERY_S, ANSWER_S = 0.02, 0.25, 30.0
SETTLE_S = 3.5  # after an attack, before the memory is looked at
BUFFERS_BYTES, BATCH_BYTES = 64 << 20, 20 << 20
SEND_BYTES = 64 << 10

Attack = Callable[["Attackers"], None]


# ---- attackers, in a process of their own ---------------------------------------------------------------------------


class Attackers:
    """Connections to the server, until the time is over. got : first lines of answers, by status"""

    def __init__(self, port: int, seconds: float) -> None:
        self.port = port
        self.until_s = time.monotonic() + seconds
        self.sent_bytes = 0
        self.got: Counter[str] = Counter()

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.until_s

    @contextmanager
    def link(self) -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=2.0) as link:
            yield link

    def send(self, link: socket.socket, data: bytes) -> None:
        """Raises OSError."""
        link.sendall(data)
        self.sent_bytes += len(data)

    def hear(self, link: socket.socket) -> bytes:
        """What the server has answered in the next moment; notes its status."""
        link.settimeout(0.2)
        with suppress(OSError):
            data = link.recv(1 << 16)
            if found := re.match(rb"HTTP/1.1 (\d+)", data):
                self.got[found[1].decode()] += 1
            return data
        return b""

    def together(self, count: int, attack: Callable[[], None]) -> None:
        """Run the attack on `count` connections, each again and again."""

        def again() -> None:
            while not self.over:
                with suppress(OSError):
                    attack()

        threads = [threading.Thread(target=again) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def head(line: str, *fields: str, key: str = "") -> bytes:
    lines = (line + " HTTP/1.1", "host: h", *fields, *([f"authorization: Bearer {KEYS[key]}"] if key else []))
    return "\r\n".join((*lines, "", "")).encode()


def chunks(data: bytes, size: int) -> bytes:
    return b"".join(
        [b"%x\r\n%b\r\n" % (len(data[at : at + size]), data[at : at + size]) for at in range(0, len(data), size)]
    )


CHUNKED = "transfer-encoding: chunked"
CHAT = "POST /v1/chat/completions"
FORM = "content-type: multipart/form-data; boundary=x"
FILE = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
TINY = chunks(b"a" * (SEND_BYTES // 6), 1)


def endless(*heads: bytes, piece: bytes, connections: int) -> Attack:
    """After the head the piece without an end."""

    def attack(attackers: Attackers) -> None:
        def once() -> None:
            with attackers.link() as link:
                attackers.send(link, random.choice(heads))
                try:
                    while not attackers.over:
                        attackers.send(link, piece)
                finally:
                    attackers.hear(link)

        attackers.together(connections, once)

    return attack


def repeated(data: bytes, connections: int) -> Attack:
    """The same requests over and over, with the answers read."""

    def attack(attackers: Attackers) -> None:
        def once() -> None:
            with attackers.link() as link:
                while not attackers.over:
                    attackers.send(link, data)
                    if not attackers.hear(link):
                        return

        attackers.together(connections, once)

    return attack


def held(opening: bytes, piece: bytes, size: int, connections: int) -> Attack:
    """Bodies that stop before their end, and stay."""

    def attack(attackers: Attackers) -> None:
        def once() -> None:
            with attackers.link() as link:
                attackers.send(link, opening)
                try:
                    for _ in range(size // len(piece)):
                        attackers.send(link, piece)
                    while not attackers.over:
                        if attackers.hear(link):
                            return
                finally:
                    attackers.hear(link)

        attackers.together(connections, once)

    return attack


def silent(connections: int) -> Attack:
    def attack(attackers: Attackers) -> None:
        links: list[socket.socket] = []
        while not attackers.over:
            with suppress(OSError):
                links.append(socket.create_connection(("127.0.0.1", attackers.port), timeout=1.0))
            for link in links[:-connections]:
                link.close()
            del links[:-connections]
            time.sleep(0.002)
        for link in links:
            attackers.hear(link) if len(attackers.got) < 3 else None
            link.close()

    return attack


def asking(connections: int) -> Attack:
    """Many at once, each of which wants its answer soon."""

    def attack(attackers: Attackers) -> None:
        request = head(CHAT, f"content-length: {len(json.dumps(BODY))}", key="alice") + json.dumps(BODY).encode()

        def once() -> None:
            with attackers.link() as link:
                attackers.send(link, request)
                link.settimeout(ANSWER_S)
                began_s, data = time.monotonic(), link.recv(1 << 16)
                status = data[9:12].decode() or "closed"
                attackers.got[f"{status} within {5 if time.monotonic() - began_s < 5 else 30} s"] += 1

        attackers.together(connections, once)

    return attack


PACKED = head("GET /health", CHUNKED) + chunks(b"a" * 10_000, 1) + b"0\r\n\r\n"
WISH = head("POST /v1/responses/x", "connection: upgrade", "upgrade: h2c", "content-length: 5") + b"hello"
EXPECTING = head(CHAT, "expect: 100-continue", "content-length: 2", key="alice") + b"{}"
ATTACKS: dict[str, Attack] = {
    "nothing": lambda attackers: time.sleep(max(0.0, attackers.until_s - time.monotonic())),
    "uploads in chunks of 1 byte, 2 connections": endless(
        head("POST /v1/files", FORM, CHUNKED, key="alice") + chunks(FILE, 1), piece=TINY, connections=2
    ),
    "uploads in chunks of 60 kB, 2 connections": endless(
        head("POST /v1/files", FORM, CHUNKED, key="alice") + chunks(FILE, 99),
        piece=chunks(b"a" * 60_000, 60_000),
        connections=2,
    ),
    "chats in chunks of 1 byte, 30 connections": endless(head(CHAT, CHUNKED, key="alice"), piece=TINY, connections=30),
    "no key, POST /nothing in chunks of 1 byte, 30 connections": endless(
        head("POST /nothing", CHUNKED), piece=TINY, connections=30
    ),
    "no key, GET /health with bodies in chunks of 1 byte, 30 connections": repeated(PACKED * 4, 30),
    "no key, bodies of 4 MB in chunks of 2 bytes, held, 12 connections": held(
        head("POST /health", CHUNKED), chunks(b"aa" * 5_000, 2), 12_000_000, 12
    ),
    "a key, bodies of 4 MB in chunks of 2 bytes, held, 40 connections": held(
        head(CHAT, CHUNKED, key="alice"), chunks(b"aa" * 5_000, 2), 13_000_000, 40
    ),
    "chunk extensions without an end, 8 connections": endless(
        head(CHAT, CHUNKED, key="alice") + b"1;", piece=b"x" * SEND_BYTES, connections=8
    ),
    "trailers without an end, 8 connections": endless(
        head(CHAT, CHUNKED, key="alice") + b"1\r\na\r\n0\r\n", piece=b"x-t: u\r\n" * 8_000, connections=8
    ),
    "heads without an end, 30 connections": endless(b"GET / HTTP/1.1\r\n", piece=b"x: y\r\n" * 1_000, connections=30),
    "pipelines of upgrades without a key, 8 connections": repeated(WISH * 100, 8),
    "pipelines that expect 100 Continue, 8 connections": repeated(EXPECTING * 100, 8),
    "no HTTP, 30 connections": repeated(b"\x16\x03\x01\n\n\n" * 1_000, 30),
}
FEW_FILES: dict[str, tuple[int, Attack]] = {
    "400 silent connections where 168 may be": (400, silent(400)),
    "200 clients where 16 connections may be": (64, asking(200)),
}


def attack_from_here(name: str, port: int, seconds: float, results: Any) -> None:
    os.nice(10)  # the figures are of the server, not of the shares of this machine's cores
    attackers = Attackers(port, seconds)
    attack = ATTACKS[name] if name in ATTACKS else FEW_FILES[name][1]
    with suppress(OSError):
        attack(attackers)
    results.put((attackers.sent_bytes, dict(attackers.got)))


# ---- what others get meanwhile --------------------------------------------------------------------------------------


async def health_s(port: int, until_s: float) -> list[float]:
    """Times of GET /health, in turns on a kept and on a new connection."""
    times: list[float] = []
    request = b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n"
    kept: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
    number = 0
    while time.monotonic() < until_s:
        number += 1
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = (
                    kept if kept is not None and number % 2 else await asyncio.open_connection("127.0.0.1", port)
                )
                writer.write(request)
                await reader.readuntil(b'"ok"}')
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            kept = None
            continue
        times.append(time.monotonic() - began_s)
        if kept is None:
            kept = reader, writer
        elif writer is not kept[1]:
            writer.close()
        await asyncio.sleep(max(0.0, HEALTH_EVERY_S - times[-1]))
    return times


async def chats_of_bob(url: str, until_s: float) -> tuple[int, int]:
    """Chats that were answered, and those that were asked for."""
    answered = asked = 0
    async with client.session_of() as session:
        while time.monotonic() < until_s:
            asked += 1
            headers = {"authorization": f"Bearer {KEYS['bob']}"}
            with suppress(OSError, TimeoutError, client.aiohttp.ClientError):
                async with asyncio.timeout(ANSWER_S):
                    async with session.post(f"{url}/v1/chat/completions", json=BODY, headers=headers) as answer:
                        await answer.read()
                        answered += answer.status == 200
            await asyncio.sleep(CHAT_EVERY_S)
    return answered, asked


async def slow_body(port: int, seconds: float) -> bool:
    """Whether a chat whose body takes these seconds to come is answered."""
    body = json.dumps(BODY).encode()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head(CHAT, f"content-length: {len(body)}", key="bob"))
        for at in range(len(body)):
            writer.write(body[at : at + 1])
            await asyncio.sleep(seconds / len(body))
        async with asyncio.timeout(ANSWER_S):
            line = await reader.readline()
        writer.close()
    except (OSError, TimeoutError):
        return False
    return b" 200 " in line


def memory_mb(server: Server) -> float:
    top = psutil.Process(server.process.pid)
    return sum(process.memory_info().rss for process in (top, *top.children(recursive=True))) / 2**20


async def measure(name: str, server: Server, seconds: float) -> Row:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    before_mb = memory_mb(server)
    process = context.Process(target=attack_from_here, args=(name, server.port, seconds, results))
    process.start()
    await asyncio.sleep(0.5)  # until it attacks
    until_s = time.monotonic() + seconds
    times, (answered, asked), slow = await asyncio.gather(
        health_s(server.port, until_s), chats_of_bob(server.url, until_s), slow_body(server.port, seconds * 0.8)
    )
    during_mb = memory_mb(server)
    sent_bytes, got = await asyncio.to_thread(results.get)
    await asyncio.to_thread(process.join)
    await asyncio.sleep(SETTLE_S)
    numbers = {
        "sent_mb": sent_bytes / 1e6,
        "health_s_p99": statistics.quantiles(times, n=100)[98] if len(times) > 1 else None,
        "health_s_max": max(times, default=None),
        "chats_answered": answered,
        "chats_asked": asked,
        "slow_body_answered": slow,
        "memory_mb_before": before_mb,
        "memory_mb_during": during_mb,
        "memory_mb_after": memory_mb(server),
        "got": ", ".join(f"{count} x {status}" for status, count in sorted(got.items())),
    }
    log(f"{name}: p99 {numbers['health_s_p99']:.3f} s, {answered} of {asked} chats, {got}")
    return Row({"attack": name}, numbers)


def key_file(folder: Path) -> Path:
    folder.mkdir()
    keys = folder / "keys"
    keys.write_text("".join(f"{name}: {key}\n" for name, key in KEYS.items()))
    keys.chmod(0o600)
    return keys


@asynccontextmanager
async def attacked(engine_url: str, folder: Path, files: int | None = None) -> AsyncIterator[Server]:
    """A server with keys and a store. files : that it may open; None: as many as this process"""
    keys = key_file(folder)
    flags = ("--engine", engine_url, "--predictor", "none", "--log-level", "error", "--api-key-file", str(keys))
    store = ("--state", str(folder / "state"), "--batch-bytes-max", str(BATCH_BYTES))
    serve = module("llmserve", "serve", *flags, *store, "--buffers-bytes-max", str(BUFFERS_BYTES))

    def command(port: int) -> list[str]:
        return serve(port) if files is None else ["bash", "-c", f'ulimit -n {files}; exec "$@"', "-", *serve(port)]

    async with running("the attacked server", command, ready="/ready") as server:
        yield server


async def measure_all(only: str, seconds: float) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        async with fake_engine("fake", "--step-s", "0.001", "--slots", "8") as engine:
            async with attacked(engine.url, Path(folder) / "all") as server:
                await chats_of_bob(server.url, time.monotonic() + 2.0)  # what is made once is in the memory before
                rows += [await measure(name, server, seconds) for name in ATTACKS if only in name]
            for name, (files, _) in FEW_FILES.items():
                if only in name:
                    async with attacked(engine.url, Path(folder) / str(files), files) as server:
                        rows.append(await measure(name, server, seconds))
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each attack")
    parser.add_argument("--only", default="", metavar="WORDS", help="attacks whose name contains these words")
    add_results(parser)
    args = parser.parse_args()
    rows = asyncio.run(measure_all(args.only, args.seconds))
    columns = {
        "attack": ("attack", ""),
        "sent, MB": ("sent_mb", ",.0f"),
        "/health p99, s": ("health_s_p99", ".3f"),
        "longest, s": ("health_s_max", ".3f"),
        "bob's chats": ("chats_answered", ""),
        "of": ("chats_asked", ""),
        "slow body": ("slow_body_answered", ""),
        "MB before": ("memory_mb_before", ",.0f"),
        "during": ("memory_mb_during", ",.0f"),
        "after": ("memory_mb_after", ",.0f"),
        "got": ("got", ""),
    }
    show(f"Attacks of {args.seconds:g} s", list(columns), cells(rows, columns), left=("got",))
    result = {**day_and_machine(), "command": " ".join(["python", *sys.argv]), "seconds": args.seconds}
    records = [
        {name: round(value, 4) if isinstance(value, float) else value for name, value in row.record.items()}
        for row in rows
    ]
    write_text(args.output, with_rows({**result, "attacks": records}, "attacks"))
