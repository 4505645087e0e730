"""A server of several processes, as a user starts it: two relays hold the connections, one process schedules."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from server_process import Server

WITHIN = aiohttp.ClientTimeout(total=60)


@contextlib.contextmanager
def running_engine(*flags: str, slots: int = 64) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The URL of an engine, and its process."""
    command = [sys.executable, "-m", "llmserve.engines.timed", "--port", "0", "--slots", str(slots), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[-1], process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextlib.contextmanager
def started(engine: str, folder: Path, *flags: str, **more: Any) -> Iterator[Server]:
    """A server with two relays. The keys of `keys_in` are in its folder."""
    admin = folder / "admin"
    admin.write_text(f"root: {'r' * 20}\n")
    server = Server(
        *("--workers", "2", "--engine", engine, "--engine-connect-s", "30"),
        *("--api-key-file", str(folder / "keys.toml"), "--admin-key-file", str(admin), *flags),
        **more,
    )
    try:
        yield server
    finally:
        server.stop()
        server.close()


def keys_in(folder: Path, **limits: str) -> Path:
    """A file of the keys ann and bob. limits : lines of TOML, by key"""
    file = folder / "keys.toml"
    file.write_text(
        "".join(f'[keys.{name}]\nkey = "{name[0] * 20}"\n{limits.get(name, "")}\n' for name in ("ann", "bob"))
    )
    return file


def scheduler_and_relays(server: Server) -> tuple[psutil.Process, list[psutil.Process]]:
    children = psutil.Process(server.process.pid).children()
    scheduler = [child for child in children if any(map(_is_requests, child.net_connections(kind="unix")))]
    assert len(scheduler) == 1
    return scheduler[0], [child for child in children if child != scheduler[0]]


def _is_requests(connection: Any) -> bool:
    return str(connection.laddr).endswith("/requests")


def asked(session: aiohttp.ClientSession, server: Server, key: str = "b", **fields: Any) -> Any:
    headers = {"authorization": f"Bearer {key * 20}", **fields.pop("headers", {})}
    body = {"max_tokens": 4, "messages": [{"role": "user", "content": "hello"}], **fields}
    return session.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=WITHIN)


async def metric(session: aiohttp.ClientSession, server: Server, line: str) -> float:
    headers = {"authorization": f"Bearer {'b' * 20}"}
    async with session.get(f"{server.url}/metrics", headers=headers) as response:
        text = await response.text()
    return sum(float(row.rsplit(" ", 1)[1]) for row in text.splitlines() if row.startswith(line))


async def until(true: Callable[[], Any], within_s: float = 30.0) -> None:
    """Wait until an awaitable of the callable is true."""
    async with asyncio.timeout(within_s):
        while not await true():  # noqa: ASYNC110 (of another process)
            await asyncio.sleep(0.05)


def session_of_many() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
