"""Connections that relays pass to each other."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import psutil
from many_processes import keys_in, running_engine, scheduler_and_relays, started, until

from llmserve.workers.balance import Balance


def test_a_relay_with_more_connections_passes_a_new_one_to_the_one_with_fewest() -> None:
    balance = Balance(3)
    balance.note(1, 4)
    balance.note(2, 1)
    assert balance.better(0, 5) == 2
    assert balance.better(1, 1) is None
    balance.leave(2)
    assert balance.better(0, 5) == 1


def test_of_many_connections_a_small_difference_is_not_worth_it() -> None:
    balance = Balance(2)
    balance.note(1, 1_000)
    assert balance.better(0, 1_100) is None
    assert balance.better(0, 1_200) == 1


def test_the_connection_itself_passes() -> None:
    balance = Balance(2)
    client, accepted = socket.socketpair()
    assert balance.give(1, accepted)
    taken = balance.take(1)
    assert taken is not None
    taken.send(b"hello")
    assert client.recv(5) == b"hello"
    assert balance.take(1) is None
    for end in (client, taken):
        end.close()


async def test_few_connections_are_dealt_out_evenly(tmp_path: Path) -> None:
    keys_in(tmp_path)
    with running_engine() as (url, _), started(url, tmp_path) as server:
        _, relays = scheduler_and_relays(server)
        port = int(server.url.rpartition(":")[2])
        opened = []
        for number in range(1, 9):  # one after the other: relays that accept at once know of each other's too late
            opened.append(await asyncio.open_connection("127.0.0.1", port))

            async def all_are_held(all_of_them: int = number) -> bool:
                return sum([held(relay, port) for relay in relays]) == all_of_them

            await until(all_are_held)
        assert min([held(relay, port) for relay in relays]) >= 3
        for _, writer in opened:
            writer.close()


def held(relay: psutil.Process, port: int) -> int:
    """Connections of clients that a relay holds."""
    of_clients = [c for c in relay.net_connections(kind="tcp") if c.status == "ESTABLISHED" and c.laddr.port == port]
    return len(of_clients)
