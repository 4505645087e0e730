"""What bytes of clients become: upgrades, interim answers, chunks, and bodies that nobody reads."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from typing import Any

import pytest
from front import until
from raw_site import POST, Client, site

from llmserve.http import connection, turns
from llmserve.http import server as listening
from llmserve.http.connection import Connection

UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\n\r\n"
ECHO = (200, b"POST /v1/x hello")


@pytest.fixture(autouse=True)
def quick_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "SWEEP_S", 0.02)


def upgrading(body: bytes, wish: bytes = UPGRADE) -> bytes:
    return b"POST /v1/x HTTP/1.1\r\nhost: h\r\n" + wish + body


# ---- Upgrade --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"content-length: 5\r\n\r\nhello", CHUNKED], ids=["length", "chunked"])
@pytest.mark.parametrize("wish", [UPGRADE, b"upgrade: websocket, h2c\r\nconnection: keep-alive, upgrade\r\n"])
async def test_a_wish_for_another_protocol_is_ignored_and_the_body_read(body: bytes, wish: bytes) -> None:
    async with site() as at:
        client = await at.client()
        for _ in range(2):
            await client.send(upgrading(body, wish))
            assert await client.answer() == ECHO
        await client.send((upgrading(body, wish) + POST + b"GET /g HTTP/1.1\r\nhost: h\r\n" + wish + b"\r\n") * 2)
        answers = [await client.answer() for _ in range(6)]
        assert answers == [ECHO, ECHO, (200, b"GET /g ")] * 2
        assert at.server.body_bytes == 0


@pytest.mark.parametrize("body", [b"content-length: 5\r\n\r\nhello", CHUNKED], ids=["length", "chunked"])
async def test_a_body_behind_a_wish_may_come_byte_by_byte(body: bytes) -> None:
    async with site() as at:
        client = await at.client()
        for byte in upgrading(body):
            await client.send(bytes([byte]))
            await asyncio.sleep(0)
        assert await client.answer() == ECHO


async def test_a_wish_keeps_the_query_and_an_empty_body_is_none() -> None:
    async with site() as at:
        client = await at.client()
        await client.send(b"POST /q?held HTTP/1.1\r\nhost: h\r\n" + UPGRADE + b"content-length: 2\r\n\r\nab" + POST)
        await until(lambda: bool(at.echo.held))
        exchange = at.echo.held.pop()
        assert (exchange.path, exchange.query, exchange.body) == ("/q", b"held", b"ab")
        assert exchange.headers["content-length"] == "2"
        exchange.respond(200, [], b"")
        assert [await client.answer() for _ in range(2)] == [(200, b""), ECHO]
        await client.send(upgrading(b"content-length: 000\r\n\r\n") + POST)
        assert [await client.answer() for _ in range(2)] == [(200, b"POST /v1/x "), ECHO]


async def test_a_wish_beside_close_ends_the_connection_after_the_answer() -> None:
    async with site() as at:
        client = await at.client()
        wish = b"connection: close, upgrade\r\nupgrade: h2c\r\n"
        await client.send(upgrading(b"content-length: 5\r\n\r\nhello", wish) + POST)
        rest = await client.rest()
        assert rest.count(b"HTTP/1.1 200") == 1
        assert rest.endswith(b"POST /v1/x hello")


async def test_a_wish_does_not_lift_the_limit_of_a_body() -> None:
    async with site(body_bytes_max=1_000) as at:
        for body in (b"content-length: 2000\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n7d0\r\n" + b"a" * 2_000):
            client = await at.client()
            await client.send(upgrading(body))
            assert (await client.answer())[0] == 413


async def test_requests_with_a_wish_are_all_answered_when_the_client_then_closes_its_side() -> None:
    async with site() as at:
        client = await at.client()
        await client.send(
            b"GET /held HTTP/1.1\r\nhost: h\r\n\r\n" + b"GET /g HTTP/1.1\r\nhost: h\r\n" + UPGRADE + b"\r\n"
        )
        client.writer.write_eof()
        await until(lambda: bool(at.echo.held))
        await asyncio.sleep(0.1)
        at.echo.held[0].respond(200, [], b"first")
        assert [(await client.answer())[1] for _ in range(2)] == [b"first", b"GET /g "]
        assert await client.rest() == b""


@pytest.mark.parametrize(
    ("sent", "status", "says"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 400, b"HTTP/2"),
        (b"CONNECT example.com:443 HTTP/1.1\r\nhost: example.com:443\r\n\r\n\x16\x03\x01", 405, b"CONNECT"),
        (b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400, b"chunked"),
        (b"GET / HTTP/1.1\r\nhost: h\r\nhost: other\r\n\r\n", 400, b"host"),
        (b"GET / HTTP/1.1\r\nauthorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n", 400, b"authorization"),
        (b"POST / HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello!", 400, b"HTTP/1.1"),
        (b"POST / HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400, b"HTTP/1.1"),
    ],
)
async def test_what_is_not_spoken_here_is_refused_in_clear_words_and_the_connection_ends(
    sent: bytes, status: int, says: bytes
) -> None:
    async with site() as at:
        client = await at.client()
        await client.send(sent)
        rest = await client.rest()
        assert rest.startswith(b"HTTP/1.1 %d " % status)
        assert says in rest
        assert rest.count(b"HTTP/1.1 4") == 1


async def test_a_refused_request_behind_a_running_one_lets_its_answer_out_also_to_a_closed_side() -> None:
    async with site() as at:
        client = await at.client()
        await client.send(b"GET /held HTTP/1.1\r\nhost: h\r\n\r\nno HTTP\r\n\r\n")
        client.writer.write_eof()
        await until(lambda: bool(at.echo.held))
        await asyncio.sleep(0.1)
        at.echo.held[0].respond(200, [], b"first")
        assert [(await client.answer())[0] for _ in range(2)] == [200, 400]


async def test_nothing_behind_a_request_that_ends_the_connection_is_served() -> None:
    """Also in the same packet, and also behind a refused head, or a wish for another protocol beside `close`."""
    heads = (
        b"GET / HTTP/1.1\r\nhost: h\r\n" + b"x: y\r\n" * 100 + b"\r\n",
        b"GET / HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: h\r\nconnection: close, upgrade\r\nupgrade: h2c\r\n\r\n",
        b"GET / HTTP/1.0\r\nhost: h\r\n\r\n",
        b"GET / HTTP/2.0\r\nhost: h\r\n\r\n",
    )
    async with site() as at:
        for head in heads:
            client = await at.client()
            await client.send(head + POST * 3)
            assert (await client.rest()).count(b"HTTP/1.1 ") == 1
        assert not at.server.cut["malformed"]


async def test_space_around_a_value_is_no_part_of_the_value() -> None:
    async with site() as at:
        client = await at.client()
        await client.send(b"GET /held HTTP/1.1\r\nhost: h\r\nx-a: \t a b \t \r\n\r\n")
        await until(lambda: bool(at.echo.held))
        assert at.echo.held[0].headers["x-a"] == "a b"


async def test_fields_behind_the_last_chunk_are_no_fields_of_the_request() -> None:
    async with site() as at:
        client = await at.client()
        trailer = b"authorization: Bearer other\r\nx-b: c\r\n\r\n"
        await client.send(b"POST /p?held HTTP/1.1\r\nhost: h\r\n" + CHUNKED[:-2] + trailer)
        await until(lambda: bool(at.echo.held))
        assert at.echo.held[0].headers == {"host": "h", "transfer-encoding": "chunked"}
        assert at.echo.held[0].body == b"hello"


@pytest.mark.parametrize(
    "endless", [b"2;" + b"x" * (1 << 20), b"0\r\nx: " + b"a" * (1 << 20)], ids=["extension", "trailer"]
)
async def test_what_is_around_chunks_has_a_limit(endless: bytes) -> None:
    async with site() as at:
        client = await at.client()
        sending = asyncio.ensure_future(
            client.send(b"POST /p HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n" + endless)
        )
        assert (await client.answer())[0] == 400
        sending.cancel()


# ---- 100 Continue ---------------------------------------------------------------------------------------------------

EXPECTING = b"POST /v1/x HTTP/1.1\r\nhost: h\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


async def test_an_interim_answer_waits_for_the_end_of_the_answer_before() -> None:
    async with site() as at:
        client = await at.client()
        await client.send(b"GET /held HTTP/1.1\r\nhost: h\r\n\r\n" + EXPECTING)
        await until(lambda: bool(at.echo.held))
        exchange = at.echo.held[0]
        exchange.start(200, [], None)
        exchange.write(b"one")
        await asyncio.sleep(0.05)
        exchange.write(b"two")
        exchange.end()
        first = await client.reader.readuntil(b"0\r\n\r\n")
        assert first.endswith(b"\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")
        assert await client.reader.readexactly(len(INTERIM)) == INTERIM
        await client.send(b"hello")
        assert await client.answer() == ECHO


@pytest.mark.parametrize("behind", [b"", b"GET /held HTTP/1.1\r\nhost: h\r\n\r\n"], ids=["alone", "behind another"])
async def test_a_client_that_did_not_wait_gets_no_interim_answer(behind: bytes) -> None:
    async with site() as at:
        client = await at.client()
        await client.send(behind + EXPECTING + b"he")
        if behind:
            await until(lambda: bool(at.echo.held))
            at.echo.held[0].respond(200, [], b"")
            assert (await client.answer())[0] == 200
        await asyncio.sleep(0.05)
        await client.send(b"llo")
        answer = await client.reader.readuntil(b"hello")
        assert b"100 Continue" not in answer


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (EXPECTING.replace(b"/v1/x", b"/secret"), 401),
        (EXPECTING.replace(b": 5", b": 99999999"), 413),
        (EXPECTING.replace(b"/v1/x", b"/none").replace(b": 5", b": 99999"), 413),
    ],
)
async def test_a_refused_client_is_never_asked_for_its_body(head: bytes, status: int) -> None:
    async with site() as at:
        client = await at.client()
        await client.send(head)
        rest = await client.rest()
        assert rest.startswith(b"HTTP/1.1 %d " % status)
        assert b"connection: close" in rest


async def test_a_client_of_http_1_0_gets_no_interim_answer() -> None:
    async with site() as at:
        client = await at.client()
        await client.send(EXPECTING.replace(b"HTTP/1.1", b"HTTP/1.0") + b"hello")
        assert (await client.rest()).startswith(b"HTTP/1.1 200 ")


# ---- chunks ---------------------------------------------------------------------------------------------------------


def chunked(data: bytes, size: int) -> bytes:
    return (
        b"".join([b"%x\r\n%b\r\n" % (len(part), part) for part in re.findall(b"(?s).{1,%d}" % size, data)])
        + b"0\r\n\r\n"
    )


async def test_chunks_of_one_byte_are_one_part_for_each_read_of_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    takes: list[int] = []
    take = Connection._take_body

    def counted(connection: Connection) -> None:
        takes.append(len(connection._parts))
        take(connection)

    monkeypatch.setattr(Connection, "_take_body", counted)
    data = bytes(range(256)) * 1_000
    async with site() as at:
        client = await at.client()
        wire = b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(data, 1)
        await client.send(wire)
        assert await client.answer() == (200, b"POST / " + data)
        assert sum(takes) == len(data)
        assert len(takes) < len(data) / 100, "Python is called for reads, not for chunks"


async def test_clients_that_send_much_read_in_turns_and_a_short_request_passes_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight floods get one read in a turn of the loop, and one more while the flood begins."""
    reads: list[tuple[int, bool]] = []
    update = Connection.buffer_updated
    turn, counting = 0, True

    def counted(connection: Connection, size: int) -> None:
        reads.append((turn, size > turns.LONG_READ_BYTES))
        update(connection, size)

    def count_turns() -> None:
        nonlocal turn
        turn += 1
        if counting:
            asyncio.get_running_loop().call_soon(count_turns)

    monkeypatch.setattr(Connection, "buffer_updated", counted)
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


# ---- bodies that are not kept ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("framing", ["content-length: 60000\r\n\r\n", "transfer-encoding: chunked\r\n\r\n"])
async def test_a_body_that_no_handler_reads_is_dropped(framing: str) -> None:
    body = b"a" * 60_000 if "length" in framing else chunked(b"a" * 60_000, 7)
    async with site() as at:
        client = await at.client()
        head = f"GET /none HTTP/1.1\r\nhost: h\r\n{framing}".encode()
        await client.send(head + body[:30_000])
        await until(lambda: any(link._has_head for link in at.server.connections))
        assert at.server.body_bytes == 0
        await client.send(body[30_000:] + POST)
        assert [await client.answer() for _ in range(2)] == [(200, b"GET /none "), ECHO]


@pytest.mark.parametrize("framing", [b"content-length: 99999\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n1869F\r\n"])
async def test_a_large_body_that_no_handler_reads_is_413(framing: bytes) -> None:
    async with site() as at:
        client = await at.client()
        await client.send(b"POST /none HTTP/1.1\r\nhost: h\r\n" + framing + b"a" * 99_998)
        status, body = await client.answer()
        assert (status, b"takes no body" in body) == (413, True)


async def send_body(client: Client, path: bytes, size: int) -> None:
    await client.send(b"POST %b HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % (path, size) + b"a" * size)


async def test_one_holder_leaves_room_for_another() -> None:
    """With 1,000 bytes of buffers one key alone may hold 500, two keys a third each, and so on."""
    async with site(buffers_bytes_max=1_000) as at:
        for held in (1, 2):
            client = await at.client()
            await send_body(client, b"/of/alice?held", 240)
            await until(lambda held=held: len(at.echo.held) == held)  # type: ignore[misc]
        greedy = await at.client()
        await send_body(greedy, b"/of/alice?held", 240)
        assert (await greedy.answer())[0] == 503
        for path in (b"/of/bob", b"/anonymous"):
            other = await at.client()
            await send_body(other, path, 250)
            assert (await other.answer())[0] == 200
        for exchange in at.echo.held:
            exchange.respond(200, [], b"")
        await until(lambda: at.server.body_bytes == 0)
        assert not at.server._kept
        await send_body(greedy := await at.client(), b"/of/alice", 480)
        assert (await greedy.answer())[0] == 200


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


async def test_a_body_that_comes_byte_by_byte_costs_its_bytes() -> None:
    async with site() as at:
        client = await at.client()
        size = 3_000
        await client.send(b"POST /v1/x HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % size)
        for sent in range(size - 1):
            await client.send(b"a")
            if sent % 100 == 0:
                await asyncio.sleep(0.001)
        await until(lambda: at.server.body_bytes == size - 1)
        (link,) = at.server.connections
        reading = link._reading
        assert reading is not None
        assert reading._grown is not None
        assert reading._grown.__sizeof__() < 1.5 * size
        await client.send(b"a")
        assert len((await client.answer())[1]) == size + len("POST /v1/x ")


async def test_the_memory_of_large_bodies_is_given_back_and_small_ones_are_not_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given_back = threading.Event()
    monkeypatch.setattr(listening, "give_back", given_back.set)
    async with site() as at:
        client = await at.client()
        for size, number in ((50_000, 200), (1_000_000, 9)):
            for _ in range(number):
                await send_body(client, b"/v1/x", size)
                assert (await client.answer())[0] == 200
            await asyncio.sleep(0.1)
            assert given_back.is_set() == (size > listening.LARGE_BYTES)


# ---- room for connections -------------------------------------------------------------------------------------------


async def test_silent_connections_make_room_before_a_request_that_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "EVICT_AFTER_S", 0.05)
    async with site(connections_max=4) as at:
        client = await at.client()
        await client.send(POST[:-1])
        kept = await at.client()
        await kept.send(POST)
        assert (await kept.answer())[0] == 200
        await kept.send(POST[:-2])  # a second request, after an answer
        await until(lambda: sum(link._has_head for link in at.server.connections) == 2)
        for _ in range(12):
            await at.client()
            await asyncio.sleep(0.02)
        await until(lambda: at.server.cut["evicted"] >= 5)
        await client.send(b"o")
        await kept.send(b"lo")
        assert [await client.answer(), await kept.answer()] == [ECHO, ECHO]


async def test_a_body_that_nobody_reads_keeps_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "EVICT_AFTER_S", 0.05)
    async with site(connections_max=2) as at:
        for _ in range(2):
            client = await at.client()
            await client.send(b"GET /none HTTP/1.1\r\nhost: h\r\ncontent-length: 9\r\n\r\n")
        asker = await at.client()
        await asker.send(POST)
        assert await asker.answer() == ECHO


async def test_clients_wait_for_a_connection_for_a_while_and_are_then_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "QUEUE_S", 0.3)
    async with site(connections_max=2) as at:
        busy = [await at.client() for _ in range(2)]
        for client in busy:
            await client.send(b"GET /held HTTP/1.1\r\nhost: h\r\n\r\n")
        await until(lambda: len(at.echo.held) == 2)
        late = [await at.client() for _ in range(30)]
        for client in late:
            await client.send(POST)
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


async def test_a_pipeline_gets_one_answer_in_a_turn_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[int] = []
    serve, turn, counting = Connection._serve, 0, True

    def counted(connection: Connection, exchange: Any) -> None:
        answers.append(turn)
        serve(connection, exchange)

    def count_turns() -> None:
        nonlocal turn
        turn += 1
        if counting:
            asyncio.get_running_loop().call_soon(count_turns)

    monkeypatch.setattr(Connection, "_serve", counted)
    async with site() as at:
        client = await at.client()
        count_turns()
        await client.send(POST * 50 + upgrading(b"content-length: 5\r\n\r\nhello") * 50)
        assert [await client.answer() for _ in range(100)] == [ECHO] * 100
        counting = False
        assert max(Counter(answers).values()) == 1


async def test_of_a_long_pipeline_few_requests_are_read_ahead_and_all_are_answered() -> None:
    async with site() as at:
        client = await at.client()
        short = b"GET / HTTP/1.1\r\nhost: h\r\n\r\n"
        await client.send(b"GET /held HTTP/1.1\r\nhost: h\r\n\r\n" + short * 20_000 + POST)
        await until(lambda: bool(at.echo.held))
        (link,) = at.server.connections
        await until(lambda: bool(link._waiting))
        assert len(link._waiting) <= 2 * connection.SLICE_BYTES / len(short)
        at.echo.held[0].respond(200, [], b"first")
        assert await client.answer() == (200, b"first")
        for _ in range(20_000):
            assert await client.answer() == (200, b"GET / ")
        assert await client.answer() == ECHO


async def test_a_flood_of_fields_is_refused_after_a_slice_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = 0
    take = Connection.on_header

    def counted(link: Connection, name: bytes, value: bytes) -> None:
        nonlocal fields
        fields += 1
        take(link, name, value)

    monkeypatch.setattr(Connection, "on_header", counted)
    async with site() as at:
        for begin, status in (
            (b"GET / HTTP/1.1\r\n", 431),
            (b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", 400),
        ):
            for field in (b"x: y\r\n", b"x-%d: y\r\n"):
                client = await at.client()
                flood = b"".join([field % number if b"%" in field else field for number in range(20_000)])
                sending = asyncio.ensure_future(client.send(begin + flood))
                assert (await client.answer())[0] == status
                sending.cancel()
    assert fields < 4 * 2 * connection.SLICE_BYTES / len(b"x: y\r\n")


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
        assert not at.server.turns._waiting
        asker = await at.client()
        await asker.send(POST)
        assert await asker.answer() == ECHO


async def test_of_very_many_refused_clients_that_go_on_sending_the_first_are_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listening, "LINGERING_MAX", 3)
    async with site() as at:
        refused = [await at.client() for _ in range(10)]
        for client in refused:
            await client.send(b"no HTTP\r\n\r\n" + b"x" * 10_000)
            assert (await client.answer())[0] == 400
        await until(lambda: len(at.server.connections) == 3)
        assert set(at.server._lingering) == at.server.connections
