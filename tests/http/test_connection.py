"""One client against the server: what connections may send, how long they may take, and how they end."""

from __future__ import annotations

import asyncio
import gc
import resource
import weakref

import pytest
from front import until
from raw_site import POST, Client, Site, site

from llmserve.http import connection, heads
from llmserve.http import server as listening
from llmserve.http.exchange import Exchange


@pytest.fixture(autouse=True)
def quick_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "SWEEP_S", 0.02)


# ---- requests and answers -------------------------------------------------------------------------------------------


async def test_requests_on_one_connection_are_answered_in_their_order() -> None:
    async with site() as at:
        client = await at.client()
        await client.send(POST * 3)
        assert [await client.answer() for _ in range(3)] == [(200, b"POST /v1/x hello")] * 3
        await client.send(POST)
        assert await client.answer() == (200, b"POST /v1/x hello")
        assert (at.echo.ended, at.server.body_bytes) == (4, 0)


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
        await until(lambda: at.server.body_bytes == 4)
        gc.collect()
        gc.disable()
        try:
            (served,) = map(weakref.ref, at.server.connections)
            client.writer.close()
            await until(lambda: served() is None)
        finally:
            gc.enable()


async def test_a_request_behind_a_slow_one_waits_for_its_turn() -> None:
    async with site() as at:
        client = await at.client()
        await client.send(b"GET /held HTTP/1.1\r\nhost: h\r\n\r\n" + POST * 2)
        await until(lambda: len(at.echo.held) == 1)
        at.echo.held[0].respond(200, [], b"first")
        bodies = [(await client.answer())[1] for _ in range(3)]
        assert bodies == [b"first", b"POST /v1/x hello", b"POST /v1/x hello"]


async def test_a_body_that_arrives_in_pieces_or_chunks_is_whole() -> None:
    async with site() as at:
        client = await at.client()
        for byte in POST:
            await client.send(bytes([byte]))
        assert await client.answer() == (200, b"POST /v1/x hello")
        await client.send(
            b"POST /v1/x HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"
        )
        assert await client.answer() == (200, b"POST /v1/x hello")


async def test_an_answer_of_unknown_length_is_chunked_and_over_http_1_0_ends_with_the_connection() -> None:
    async with site() as at:
        for version, expected in ((b"1.1", b"5\r\nhello\r\n0\r\n\r\n"), (b"1.0", b"hello")):
            client = await at.client()
            await client.send(b"GET /held HTTP/%b\r\nhost: h\r\nconnection: close\r\n\r\n" % version)
            await until(lambda: bool(at.echo.held))
            exchange = at.echo.held.pop()
            exchange.start(200, [(b"x-name", b"a\r\nb")], None)
            exchange.write(b"hello")
            exchange.end()
            head, _, body = (await client.rest()).partition(b"\r\n\r\n")
            assert body == expected
            assert b"x-name: ab" in head, "no header can begin another line"


async def test_a_head_request_gets_no_body() -> None:
    async with site() as at:
        client = await at.client()
        await client.send(b"HEAD /v1/x HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
        answer = await client.rest()
        assert answer.endswith(b"\r\n\r\n")
        assert b"content-length: 11" in answer


# ---- heads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nhost: h\r\nx: " + b"a" * heads.HEAD_BYTES_MAX + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: h\r\nx: " + b"a" * (8 << 20),
        b"GET /" + b"a" * (8 << 20),
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 101 + b"\r\n",
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 1_000_000,
    ],
    ids=["one long field", "a field without end", "a path without end", "101 fields", "fields without end"],
)
async def test_a_head_beyond_its_limits_is_431_and_the_end_of_the_connection(head: bytes) -> None:
    async with site() as at:
        client = await at.client()
        sending = asyncio.ensure_future(client.send(head))
        status, body = await client.answer()
        assert (status, b"head_too_large" in body) == (431, True)
        sending.cancel()
        await until(lambda: not at.server.connections)
        assert at.echo.refusals == ["head_too_large"]


async def test_a_head_at_its_limits_is_read() -> None:
    async with site() as at:
        client = await at.client()
        await client.send(b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 99 + b"z: " + b"a" * 60_000 + b"\r\n\r\n")
        assert (await client.answer())[0] == 200


async def test_what_is_no_http_is_400_and_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    async with site() as at:
        for _ in range(20):
            client = await at.client()
            await client.send(b"\x16\x03\x01\n\n\n")
            assert (await client.answer())[0] == 400
        assert len(caplog.records) == 1
        assert "127.0.0.1" in caplog.text
        assert at.server.cut["malformed"] == 20


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"", "idle"),
        (b"GET / HTTP/1.1\r\nhost", "slow_head"),
        (b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\nab", "slow_body"),
    ],
)
async def test_a_request_that_does_not_arrive_in_time_is_408(
    sent: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HEAD_S", "BODY_S", "LINGER_S"):
        monkeypatch.setattr(connection, name, 0.1)
    async with site() as at:
        client = await at.client()
        await client.send(sent)
        answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 408" if sent else b"")
        await until(lambda: not at.server.connections)
        assert at.server.cut[reason] == 1


# ---- bodies ---------------------------------------------------------------------------------------------------------


async def test_a_body_announced_too_large_is_413_at_once_and_never_asked_for() -> None:
    async with site() as at:
        client = await at.client()
        await client.send(b"POST / HTTP/1.1\r\nhost: h\r\nexpect: 100-continue\r\ncontent-length: 1000000000\r\n\r\n")
        assert (await client.rest()).startswith(b"HTTP/1.1 413 ")


async def test_a_client_that_asks_whether_to_send_is_told_so() -> None:
    async with site() as at:
        client = await at.client()
        await client.send(b"POST /x HTTP/1.1\r\nhost: h\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n")
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(b"hello")
        assert await client.answer() == (200, b"POST /x hello")


async def test_a_chunked_body_is_held_to_the_limit_too() -> None:
    async with site(body_bytes_max=1_000) as at:
        client = await at.client()
        await client.send(b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n7d0\r\n" + b"a" * 2_000)
        assert (await client.answer())[0] == 413
        await until(lambda: at.server.body_bytes == 0)


async def test_a_wrong_key_is_refused_before_the_body() -> None:
    async with site() as at:
        client = await at.client()
        await client.send(b"POST /secret HTTP/1.1\r\nhost: h\r\ncontent-length: 1000000\r\n\r\n")
        assert (await client.answer())[0] == 401
        client = await at.client()
        await client.send(POST.replace(b"/v1/x", b"/secret") + POST)
        assert [(await client.answer())[0] for _ in range(2)] == [401, 200], (
            "a whole request leaves the connection open"
        )


async def test_bodies_beyond_the_sum_of_all_are_503() -> None:
    async with site(buffers_bytes_max=2_000) as at:
        first, second = await at.client(), await at.client()
        await first.send(b"POST /held HTTP/1.1\r\nhost: h\r\ncontent-length: 900\r\n\r\n" + b"a" * 900)
        await until(lambda: bool(at.echo.held))
        await second.send(b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 900\r\n\r\n" + b"a" * 900)
        status, body = await second.answer()
        assert (status, b"buffers_full" in body) == (503, True)
        at.echo.held[0].respond(200, [], b"")
        assert (await first.answer())[0] == 200
        third = await at.client()
        await third.send(b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 900\r\n\r\n" + b"a" * 900)
        assert (await third.answer())[0] == 200


# ---- clients that do not read, or leave -----------------------------------------------------------------------------


async def held(at: Site) -> tuple[Client, Exchange]:
    client = await at.client()
    await client.send(b"GET /held HTTP/1.1\r\nhost: h\r\n\r\n")
    await until(lambda: bool(at.echo.held))
    return client, at.echo.held.pop()


async def test_a_client_that_reads_nothing_of_a_whole_answer_is_cut_off() -> None:
    async with site(client_stall_s=0.3) as at:
        client, exchange = await held(at)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        exchange.respond(200, [], b"a" * (64 << 20))
        await until(lambda: at.server.buffered_bytes > 0)
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
        check_gone = connection.Connection.check_gone

        def failing(one: connection.Connection) -> None:
            if one.transport.get_extra_info("peername")[1] == port:
                raise RecursionError("too deep")
            check_gone(one)

        monkeypatch.setattr(connection.Connection, "check_gone", failing)
        await until(lambda: at.server.cut["failed"] == 1)
        await good.send(POST)
        assert await good.answer() == (200, b"POST /v1/x hello")
        assert len(at.server.connections) == 1


async def test_a_client_that_reads_slowly_gets_everything() -> None:
    async with site(client_stall_s=0.5) as at:
        client, exchange = await held(at)
        exchange.respond(200, [], b"a" * (8 << 20))
        await client.reader.readuntil(b"\r\n\r\n")
        received = 0
        while received < 8 << 20:
            received += len(await client.reader.read(400_000))
            await asyncio.sleep(0.05)
        assert at.server.cut["stalled"] == 0


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


async def test_a_writer_waits_for_a_client_that_reads_no_more_and_wakes_when_it_leaves() -> None:
    async with site() as at:
        client, exchange = await held(at)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        exchange.start(200, [], None)
        exchange.write(b"a" * (32 << 20))
        assert exchange.paused
        waiting = asyncio.ensure_future(exchange.writable())
        await asyncio.sleep(0)
        assert not waiting.done()
        client.writer.transport.abort()
        await until(waiting.done)
        assert at.echo.gone == [exchange]


async def test_a_client_that_closes_its_sending_side_is_answered() -> None:
    async with site() as at:
        client, exchange = await held(at)
        client.writer.write_eof()
        await asyncio.sleep(0.5)
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


# ---- many connections -----------------------------------------------------------------------------------------------


async def test_idle_connections_make_room_and_busy_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "EVICT_AFTER_S", 0.05)
    async with site(connections_max=3) as at:
        busy, exchange = await held(at)
        for _ in range(20):
            await at.client()
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
        await asyncio.sleep(0.2)
        assert len(at.server.connections) == 2
        pairs[0][1].keep_alive = False
        pairs[0][1].respond(200, [], b"")
        assert await late.answer() == (200, b"POST /v1/x hello")


async def test_half_of_the_files_are_left_to_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, connections in ((64, 16), (1024, 480), (resource.RLIM_INFINITY, listening.CONNECTIONS_MAX)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        async with site() as at:
            assert at.server.connections_max == connections


# ---- the end --------------------------------------------------------------------------------------------------------


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


async def test_a_stop_answers_the_requests_that_wait_behind_another() -> None:
    async with site() as at:
        client = await at.client()
        await client.send(b"GET /held HTTP/1.1\r\nhost: h\r\n\r\n" + POST)
        await until(lambda: bool(at.echo.held))
        closing = asyncio.ensure_future(at.server.close())
        await asyncio.sleep(0)
        at.echo.held[0].respond(200, [], b"first")
        assert [(await client.answer())[1] for _ in range(2)] == [b"first", b"POST /v1/x hello"]
        await closing


async def test_a_stop_does_not_wait_for_a_client_that_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "CLOSE_STALL_S", 0.2)
    async with site() as at:
        client, exchange = await held(at)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        exchange.respond(200, [], b"a" * (64 << 20))
        await at.server.close()
        assert at.server.cut["stalled"] == 1
