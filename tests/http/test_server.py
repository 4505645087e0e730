"""The server on real sockets: memory, turns of reading, room for connections, clients that do not read, and the end.

What one connection makes of bytes and of time: test_connection.py.
"""

from __future__ import annotations

import asyncio
import gc
import re
import resource
import threading
import weakref
from collections import Counter
from typing import Any

import pytest
from front import until
from raw_site import POST, Client, Site, site

from llmserve.http import accepting, connection, protocol, server
from llmserve.http import exchange as exchanges
from llmserve.http.buffers import Buffers
from llmserve.http.connection import Connection
from llmserve.http.exchange import Exchange
from llmserve.http.protocol import ConnectionProtocol

ECHO = (200, b"POST /v1/x hello")


@pytest.fixture(autouse=True)
def quick_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SWEEP_S", 0.02)


# ---- memory ----------------------------------------------------------------------------------------------------------


async def test_a_closed_connection_is_freed_without_a_garbage_collection() -> None:
    async with site() as at:
        client = await at.client()
        await client.send(POST)
        await client.answer()
        gc.collect()
        gc.disable()
        try:
            (served,) = map(weakref.ref, at.server.connections)
            client.writer.close()
            await until(lambda: served() is None)
        finally:
            gc.enable()


async def test_a_connection_that_is_lost_in_a_body_is_freed_without_a_garbage_collection() -> None:
    async with site() as at:
        client = await at.client()
        await client.send(POST[:-1])
        await until(lambda: at.server.buffered_bytes == 4)
        gc.collect()
        gc.disable()
        try:
            (served,) = map(weakref.ref, at.server.connections)
            client.writer.close()
            await until(lambda: served() is None)
        finally:
            gc.enable()


def chunked(data: bytes, size: int) -> bytes:
    return (
        b"".join([b"%x\r\n%b\r\n" % (len(part), part) for part in re.findall(b"(?s).{1,%d}" % size, data)])
        + b"0\r\n\r\n"
    )


async def send_body(client: Client, path: bytes, size: int) -> None:
    await client.send(b"POST %b HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % (path, size) + b"a" * size)


def test_one_holder_leaves_room_for_another() -> None:
    """With 1,000 bytes of buffers one holder alone may have 500, two a third each, and so on."""
    memory = Buffers(1_000)
    assert [memory.keep("alice", 240) for _ in range(2)] == [None, None]
    assert memory.keep("alice", 240) is not None
    memory.release("alice", 240)
    assert memory.keep("bob", 250) is None
    for holder, size in (("bob", 250), ("alice", 240), ("alice", 240)):
        memory.release(holder, size)
    assert (memory.used_bytes, memory.kept) == (0, {})
    assert memory.keep("alice", 480) is None


async def test_unread_answers_count_for_their_holder() -> None:
    async with site(buffers_bytes_max=64 << 20) as at:
        clients: list[Any] = []
        for number, (name, size) in enumerate((("alice", 20), ("alice", 24), ("bob", 12)), 1):
            client = await at.client()
            await client.send(f"GET /of/{name}?held HTTP/1.1\r\nhost: h\r\n\r\n".encode())
            await until(lambda number=number: len(at.echo.held) == number)  # type: ignore[misc]
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            clients.append((client, size << 20))
        for exchange, (_, size) in zip(at.echo.held, clients, strict=True):
            exchange.respond(200, [], b"a" * size)
        await until(lambda: at.server.cut["buffers_full"] > 0)
        for client, size in (clients[0], clients[2]):
            client.writer.transport.resume_reading()
            assert len((await client.answer())[1]) == size
        assert at.server.cut["buffers_full"] == 1


def test_bodies_count_as_freed_memory_if_they_are_large() -> None:
    memory = Buffers(1 << 30)
    for size, number, freed in ((50_000, 200, 0), (1_000_000, 9, 9_000_000)):
        for _ in range(number):
            assert memory.keep("alice", size) is None
            memory.release("alice", size)
        assert memory.freed_bytes == freed


async def test_freed_memory_is_given_back_once_it_is_much(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back = threading.Event()
    monkeypatch.setattr(server, "give_back", given_back.set)
    async with site() as at:
        at.server.shared.buffers.freed_bytes = server.FREED_BYTES + 1
        await until(given_back.is_set)
        assert at.server.shared.buffers.freed_bytes == 0


# ---- turns of reading ------------------------------------------------------------------------------------------------


async def test_clients_that_send_much_read_in_turns_and_a_short_request_passes_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight floods get one read in a turn of the loop, and one more while the flood begins."""
    reads: list[tuple[int, bool]] = []
    update = ConnectionProtocol.buffer_updated
    turn, counting = 0, True

    def counted(link: ConnectionProtocol, size: int) -> None:
        reads.append((turn, size > protocol.LONG_READ_BYTES))
        update(link, size)

    def count_turns() -> None:
        nonlocal turn
        turn += 1
        if counting:
            asyncio.get_running_loop().call_soon(count_turns)

    monkeypatch.setattr(ConnectionProtocol, "buffer_updated", counted)
    async with site(body_bytes_max=64 << 20) as at:
        floods = [await at.client() for _ in range(8)]
        body = b"POST /none HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(bytes(50_000), 1)
        sending = [asyncio.ensure_future(client.send(body * 8)) for client in floods]
        await until(lambda: len(reads) > 50)
        count_turns()
        asker = await at.client()
        await asker.send(POST)
        assert await asker.answer() == ECHO
        await asyncio.gather(*sending)
        counting = False
        assert [await flood.answer() for flood in floods for _ in range(8)] == [(200, b"POST /none ")] * 64
    by_turn = Counter(number for number, is_long in reads if number and is_long)
    by_turn.pop(turn, None)  # from then on nobody counted
    assert max(by_turn.values()) <= 2


async def test_a_connection_that_is_lost_waits_for_no_turn_and_stays_in_no_memory() -> None:
    """Each sends more than a short read, so that each waits for its turn when it goes."""
    async with site() as at:
        gone = [await at.client() for _ in range(50)]
        for client in gone:
            client.writer.write(b"POST /v1/x HTTP/1.1\r\nhost: h\r\ncontent-length: 99999\r\n\r\n" + b"x" * 50_000)
        await until(lambda: len(at.server.connections) == 50)
        for client in gone:
            client.writer.transport.abort()
        await until(lambda: not at.server.connections)
        assert not at.server._turns._waiting
        asker = await at.client()
        await asker.send(POST)
        assert await asker.answer() == ECHO


# ---- clients that do not read, or leave ------------------------------------------------------------------------------


async def held(at: Site) -> tuple[Client, Exchange[None]]:
    client = await at.client()
    await client.send(b"GET /held HTTP/1.1\r\nhost: h\r\n\r\n")
    await until(lambda: bool(at.echo.held))
    return client, at.echo.held.pop()


async def test_a_client_that_reads_nothing_of_a_whole_answer_is_cut_off() -> None:
    async with site() as at:
        client, exchange = await held(at)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        exchange.respond(200, [], b"a" * (64 << 20))
        await until(lambda: at.server.buffered_bytes > 0)
        at.later(61.0)
        await until(lambda: not at.server.connections)
        assert at.server.cut["stalled"] == 1
        await until(lambda: at.server.buffered_bytes == 0)


async def test_a_connection_that_fails_in_a_sweep_is_cut_off_and_the_others_are_looked_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with site(client_stall_s=0.3) as at:
        bad, good = await at.client(), await at.client()
        for client in (bad, good):
            await client.send(POST)
            await client.answer()
        port = bad.writer.get_extra_info("sockname")[1]
        tick = Connection.tick

        def failing(one: Connection, now_s: float) -> int:
            if one.peer.endswith(f":{port}"):
                raise RecursionError("too deep")
            return tick(one, now_s)

        monkeypatch.setattr(Connection, "tick", failing)
        await until(lambda: at.server.cut["failed"] == 1)
        await good.send(POST)
        assert await good.answer() == (200, b"POST /v1/x hello")
        assert len(at.server.connections) == 1


async def test_the_largest_unread_answers_go_when_all_together_are_too_many() -> None:
    async with site(buffers_bytes_max=40 << 20) as at:
        (small, first), (large, second) = await held(at), await held(at)
        for client in (small, large):
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        first.respond(200, [], b"a" * (16 << 20))
        second.respond(200, [], b"a" * (48 << 20))
        await until(lambda: len(at.server.connections) == 1)
        assert at.server.cut["buffers_full"] == 1
        small.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert len((await small.answer())[1]) == 16 << 20


async def test_a_client_that_closes_its_sending_side_is_answered() -> None:
    async with site() as at:
        client, exchange = await held(at)
        client.writer.write_eof()
        await asyncio.sleep(0.1)  # several looks at whether the client is gone
        assert at.echo.gone == []
        exchange.respond(200, [], b"late")
        assert await client.answer() == (200, b"late")
        assert await client.rest() == b""


@pytest.mark.parametrize("end", ["close", "abort"])
async def test_a_client_that_leaves_is_noticed_before_its_answer(end: str) -> None:
    async with site() as at:
        client, exchange = await held(at)
        getattr(client.writer.transport, end)()
        await until(lambda: at.echo.gone == [exchange])
        assert at.echo.ended == 1
        exchange.respond(200, [], b"nobody hears")


# ---- room for connections --------------------------------------------------------------------------------------------


async def test_idle_connections_make_room_and_busy_ones_do_not() -> None:
    async with site(connections_max=3) as at:
        busy, exchange = await held(at)
        for _ in range(20):
            await at.client()
            at.later(server.EVICT_AFTER_S)
        asker = await at.client()
        await asker.send(POST)
        assert (await asker.answer())[0] == 200
        assert at.server.cut["evicted"] > 0
        assert len(at.server.connections) <= 3
        exchange.respond(200, [], b"kept")
        assert await busy.answer() == (200, b"kept")


async def test_beyond_the_limit_clients_wait_until_a_connection_ends() -> None:
    async with site(connections_max=2) as at:
        pairs = [await held(at) for _ in range(2)]
        late = await at.client()
        await late.send(POST)
        await until(lambda: at.server._acceptor._queued)
        assert len(at.server.connections) == 2
        pairs[0][1].keep_alive = False
        pairs[0][1].respond(200, [], b"")
        assert await late.answer() == (200, b"POST /v1/x hello")


async def test_half_of_the_files_are_left_to_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, connections in ((64, 16), (1024, 480), (resource.RLIM_INFINITY, accepting.CONNECTIONS_MAX)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        async with site() as at:
            assert at.server.connections_max == connections


async def test_silent_connections_make_room_before_a_request_that_arrives() -> None:
    async with site(connections_max=4) as at:
        client = await at.client()
        await client.send(POST[:-1])
        kept = await at.client()
        await kept.send(POST)
        assert (await kept.answer())[0] == 200
        await kept.send(POST[:-2])  # a second request, after an answer
        await until(lambda: sum(link._reader.has_head for link in at.server.connections) == 2)
        for _ in range(12):
            await at.client()
            at.later(server.EVICT_AFTER_S)
        await until(lambda: at.server.cut["evicted"] >= 5)
        await client.send(b"o")
        await kept.send(b"lo")
        assert [await client.answer(), await kept.answer()] == [ECHO, ECHO]


async def test_a_body_that_nobody_reads_keeps_no_connection() -> None:
    async with site(connections_max=2) as at:
        for _ in range(2):
            client = await at.client()
            await client.send(b"GET /none HTTP/1.1\r\nhost: h\r\ncontent-length: 9\r\n\r\n")
        at.later(server.EVICT_AFTER_S)
        asker = await at.client()
        await asker.send(POST)
        assert await asker.answer() == ECHO


async def test_clients_wait_for_a_connection_for_a_while_and_are_then_refused() -> None:
    async with site(connections_max=2) as at:
        busy = [await at.client() for _ in range(2)]
        for client in busy:
            await client.send(b"GET /held HTTP/1.1\r\nhost: h\r\n\r\n")
        await until(lambda: len(at.echo.held) == 2)
        late = [await at.client() for _ in range(30)]
        for client in late:
            await client.send(POST)
        await until(lambda: at.server._acceptor._queued)
        at.later(accepting.QUEUE_S)
        for client in late:
            status, body = await client.answer()
            assert (status, b"connections_max" in body) == (503, True)
        assert at.server.cut["refused"] == 30
        assert len(at.server.connections) == 2
        for exchange in at.echo.held:
            exchange.keep_alive = False
            exchange.respond(200, [], b"")
        asker = await at.client()
        await asker.send(POST)
        assert await asker.answer() == ECHO, "the system's queue is empty again"


async def test_without_a_free_file_a_client_is_refused_rather_than_left_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.1)
    import errno
    import socket

    accept, calls = socket.socket.accept, 0

    def full(listener: socket.socket) -> Any:
        nonlocal calls
        calls += 1
        if calls % 2:  # with the spare file closed there is room for one
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    async with site() as at:
        monkeypatch.setattr(socket.socket, "accept", full)
        client = await at.client()
        assert (await client.answer())[0] == 503
        monkeypatch.setattr(socket.socket, "accept", accept)
        asker = await at.client()
        await asker.send(POST)
        assert await asker.answer() == ECHO


async def test_of_very_many_refused_clients_that_go_on_sending_the_first_are_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchanges, "LINGERING_MAX", 3)
    async with site() as at:
        refused = [await at.client() for _ in range(10)]
        for client in refused:
            await client.send(b"no HTTP\r\n\r\n" + b"x" * 10_000)
            assert (await client.answer())[0] == 400
        await until(lambda: len(at.server.connections) == 3)
        assert set(at.server.shared.connections._lingering) == at.server.connections


# ---- the end ---------------------------------------------------------------------------------------------------------


async def test_a_stop_lets_answers_out_and_closes_idle_connections_at_once() -> None:
    async with site() as at:
        idle = await at.client()
        await until(lambda: len(at.server.connections) == 1)
        client, exchange = await held(at)
        closing = asyncio.ensure_future(at.server.close())
        assert await idle.rest() == b""
        assert not closing.done()
        exchange.respond(200, [], b"a" * (16 << 20))
        status, body = await client.answer()
        assert (status, len(body)) == (200, 16 << 20)
        await closing


async def test_a_stop_does_not_wait_for_a_client_that_reads_nothing() -> None:
    async with site() as at:
        client, exchange = await held(at)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        exchange.respond(200, [], b"a" * (64 << 20))
        closing = asyncio.ensure_future(at.server.close())
        await until(lambda: at.server.buffered_bytes > 0)
        at.later(connection.CLOSE_STALL_S + 1.0)
        await closing
        assert at.server.cut["stalled"] == 1
