"""One client's connection, without a socket and without waiting: what it may send, how long it has, how it ends."""

from __future__ import annotations

import asyncio
from functools import reduce
from operator import lshift, rshift

import pytest
from playbook import (
    At,
    Begin,
    Does,
    Draining,
    Ended,
    Finish,
    Gone,
    Lost,
    Playbook,
    Received,
    Refused,
    Request,
    Respond,
    Sent,
    SinkFull,
    Turn,
    Write,
    answer,
    head_of,
    refused,
)

from llmserve.http import connection, heads
from llmserve.http.connection import BODY_S, CONTINUE, HEAD_S, KEEP_ALIVE_S, LINGER_S

POST = b"POST /v1/x HTTP/1.1\r\nhost: h\r\ncontent-length: 5\r\n\r\nhello"
GET = b"GET / HTTP/1.1\r\nhost: h\r\n\r\n"
POSTED = Request("POST", "/v1/x", b"hello")
GOT = Request("GET", "/")
CHUNKED = b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\n\r\n"
UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
STREAM = head_of(200, b"transfer-encoding: chunked")


def post(fields: bytes, path: bytes = b"/v1/x") -> bytes:
    return b"POST %b HTTP/1.1\r\nhost: h\r\n%b" % (path, fields)


def sized(size: int, path: bytes = b"/v1/x") -> bytes:
    """A head that announces a body."""
    return post(b"content-length: %d\r\n\r\n" % size, path)


def in_bytes(data: bytes) -> list[Received]:
    return [Received(data[at : at + 1]) for at in range(len(data))]


# ---- one request after the other ------------------------------------------------------------------------------------


def test_requests_of_one_packet_are_answered_in_their_order_one_in_each_turn() -> None:
    assert (
        Playbook()
        >> Received(POST * 3)
        << POSTED
        << Does("pause")
        >> Respond(b"1")
        << Sent(answer(b"1"))
        >> Turn()
        << POSTED
        >> Respond(b"2")
        << Sent(answer(b"2"))
        >> Turn()
        << Does("resume")
        << POSTED
        >> Respond(b"3")
        << Sent(answer(b"3"))
        >> Received(POST)
        << POSTED
    )


def test_a_request_behind_a_slow_one_waits_for_its_turn() -> None:
    assert (
        Playbook()
        >> Received(GET)
        << GOT
        >> Received(POST)
        << Does("pause")
        >> Turn()
        >> Respond(b"first")
        << Sent(answer(b"first"))
        >> Turn()
        << Does("resume")
        << POSTED
    )


def test_of_a_long_pipeline_few_requests_are_read_ahead_and_all_are_answered() -> None:
    play = Playbook() >> Received(GET + GET * 2_000 + POST) << GOT << Does("pause")
    assert len(play.connection._waiting) <= 2 * connection.SLICE_BYTES / len(GET)
    answered = 0
    while play.handler.waiting or play.soon:
        for exchange in play.handler.waiting:
            exchange.respond(200, [], b"")
            answered += 1
        play.handler.waiting.clear()
        play.done.clear()
        play._happen(Turn())
    assert answered == 2_002


@pytest.mark.parametrize(
    "packets", [in_bytes(POST), [Received(post(CHUNKED))], in_bytes(post(CHUNKED))], ids=["bytes", "chunks", "both"]
)
def test_a_body_that_arrives_in_pieces_or_chunks_is_whole(packets: list[Received]) -> None:
    assert reduce(rshift, packets, Playbook()) << POSTED >> Respond(b"ok") << Sent(answer(b"ok"))


def test_a_body_that_comes_byte_by_byte_costs_its_bytes() -> None:
    play = reduce(rshift, in_bytes(sized(3_000) + b"a" * 2_999), Playbook())
    grown = play.connection._reader.exchange._grown  # type: ignore[union-attr]
    assert grown is not None
    assert grown.__sizeof__() < 1.5 * 3_000
    assert play >> Received(b"a") << Request("POST", "/v1/x", b"a" * 3_000)


def test_chunks_of_one_byte_are_one_part_for_each_read() -> None:
    play, parts = Playbook() >> Received(post(b"transfer-encoding: chunked\r\n\r\n")), []
    take = play.connection.body_comes
    play.connection.body_comes = lambda exchange, part: (parts.append(part), take(exchange, part))  # type: ignore
    assert play >> Received(b"1\r\na\r\n" * 600) >> Received(b"0\r\n\r\n") << Request("POST", "/v1/x", b"a" * 600)
    assert parts == [b"a" * 600]


@pytest.mark.parametrize(
    ("version", "sent", "end"),
    [
        (b"1.1", head_of(200, b"transfer-encoding: chunked", b"connection: close") + b"5\r\nhello\r\n", b"0\r\n\r\n"),
        (b"1.0", head_of(200, b"connection: close") + b"hello", b""),
    ],
)
def test_an_answer_of_unknown_length_is_chunked_and_over_http_1_0_ends_with_the_connection(
    version: bytes, sent: bytes, end: bytes
) -> None:
    asked = Received(b"GET / HTTP/%b\r\nhost: h\r\nconnection: close\r\n\r\n" % version)
    play = Playbook() >> asked << GOT >> Begin() >> Write(b"hello") << Sent(sent) >> Finish()
    assert reduce(lshift, [*([Sent(end)] if end else []), Does("close")], play)


def test_no_header_can_begin_another_line() -> None:
    play = Playbook() >> Received(GET) << GOT
    play.handler.waiting[0].respond(200, [(b"x-name", b"a\r\nb")], b"")
    assert play << Sent(b"HTTP/1.1 200 OK\r\nx-name: ab\r\ndate: D\r\ncontent-length: 0\r\n\r\n")


def test_a_head_request_gets_no_body() -> None:
    asked = Received(b"HEAD / HTTP/1.1\r\nhost: h\r\n\r\n")
    assert Playbook() >> asked << Request("HEAD", "/") >> Respond(b"hello") << Sent(answer(b"hello")[:-5])


# ---- heads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nhost: h\r\nx: " + b"a" * heads.HEAD_BYTES_MAX + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: h\r\nx: " + b"a" * (1 << 17),
        b"GET /" + b"a" * (1 << 17),
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 101 + b"\r\n",
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 10_000,
    ],
    ids=["one long field", "a field without end", "a path without end", "101 fields", "fields without end"],
)
def test_a_head_beyond_its_limits_is_431_and_the_end_of_the_connection(head: bytes) -> None:
    play = Playbook()
    for start in range(0, len(head), 60_000):
        play._happen(Received(head[start : start + 60_000]))
    play = play << Refused(431, "head_too_large") << Sent(refused(b"head_too_large", 431))
    assert play << Does("close" if head.endswith(b"\r\n\r\n") else "half-close")


def test_a_flood_of_fields_is_refused_after_a_slice_of_it() -> None:
    for begin, reason, status in (
        (b"GET / HTTP/1.1\r\n", b"head_too_large", 431),
        (post(b"transfer-encoding: chunked\r\n\r\n0\r\n"), b"malformed_request", 400),
    ):
        flood = b"".join([b"x-%d: y\r\n" % number for number in range(6_000)])
        play = Playbook() >> Received(begin + flood)
        assert play << Refused(status, reason.decode()) << Sent(refused(reason, status)) << Does("half-close")
        assert len(play.connection._reader._headers) < 2 * connection.SLICE_BYTES / len(b"x-1: y\r\n")


def test_a_head_at_its_limits_is_read() -> None:
    fields = b"x: y\r\n" * 99 + b"z: " + b"a" * 60_000
    assert Playbook() >> Received(b"GET / HTTP/1.1\r\n" + fields + b"\r\n\r\n") << GOT


@pytest.mark.parametrize(
    ("sent", "status", "reason"),
    [
        (b"\x16\x03\x01\n\n\n", 400, b"malformed_request"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 400, b"http_version"),
        (b"CONNECT example.com:443 HTTP/1.1\r\nhost: example.com:443\r\n\r\n\x16\x03\x01", 405, b"method_not_allowed"),
        (post(b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n"), 400, b"transfer_encoding"),
        (b"GET / HTTP/1.1\r\nhost: h\r\nhost: other\r\n\r\n", 400, b"malformed_request"),
        (b"GET / HTTP/1.1\r\nauthorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n", 400, b"malformed_request"),
        (post(b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello!"), 400, b"malformed_request"),
        (post(b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"), 400, b"malformed_request"),
    ],
)
def test_what_is_not_spoken_here_is_refused_and_the_connection_ends(sent: bytes, status: int, reason: bytes) -> None:
    play = Playbook() >> Received(sent) << Refused(status, reason.decode()) << Sent(refused(reason, status))
    assert play.done
    assert play.done.pop() in (Does("half-close"), Does("close"))


def test_what_is_no_http_is_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    play = Playbook()
    for _ in range(20):
        play.shared.malformed("192.0.2.1:1", ValueError("no"))
    assert len(caplog.records) == 1
    assert "192.0.2.1" in caplog.text
    assert play.shared.cut["malformed"] == 20
    play.clock.now_s = 11.0
    play.shared.malformed("192.0.2.1:1", ValueError("no"))
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: h\r\nconnection: close, upgrade\r\nupgrade: h2c\r\n\r\n",
        b"GET / HTTP/1.0\r\nhost: h\r\n\r\n",
    ],
)
def test_nothing_behind_a_request_that_ends_the_connection_is_served(head: bytes) -> None:
    play = Playbook() >> Received(head + POST * 3) << GOT >> Received(POST) >> Respond(b"x")
    assert play << Sent(answer(b"x", 200, b"connection: close")) << Does("half-close") >> Received(POST)
    assert not play.shared.cut["malformed"]


@pytest.mark.parametrize(
    "head",
    [b"GET / HTTP/1.1\r\nhost: h\r\n" + b"x: y\r\n" * 100 + b"\r\n", b"GET / HTTP/2.0\r\nhost: h\r\n\r\n"],
    ids=["101 fields", "HTTP/2.0"],
)
def test_nothing_behind_a_refused_head_is_served(head: bytes) -> None:
    play = Playbook()
    play._happen(Received(head + POST * 3))
    assert [type(done) for done in play.done] == [Refused, Sent, Does]
    assert not play.shared.cut["malformed"]


def test_space_around_a_value_is_no_part_of_the_value() -> None:
    play = Playbook() >> Received(b"GET / HTTP/1.1\r\nhost: h\r\nx-a: \t a b \t \r\n\r\n") << GOT
    assert play.handler.waiting[0].headers["x-a"] == "a b"


# ---- Upgrade --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"content-length: 5\r\n\r\nhello", CHUNKED], ids=["length", "chunked"])
@pytest.mark.parametrize("wish", [UPGRADE, b"upgrade: websocket, h2c\r\nconnection: keep-alive, upgrade\r\n"])
def test_a_wish_for_another_protocol_is_ignored_and_the_body_read(wish: bytes, body: bytes) -> None:
    one = post(wish + body)
    for packets in ([Received(one)], in_bytes(one)):
        play = reduce(rshift, packets, Playbook()) << POSTED >> Respond(b"") << Sent(answer(b""))
        play = play >> Received(one + POST + b"GET /g HTTP/1.1\r\nhost: h\r\n" + wish + b"\r\n") << POSTED
        play = play << Does("pause") >> Respond(b"") << Sent(answer(b"")) >> Turn() << POSTED
        assert play >> Respond(b"") << Sent(answer(b"")) >> Turn() << Does("resume") << Request("GET", "/g")


def test_a_wish_keeps_the_query_and_an_empty_body_is_none() -> None:
    play = (
        Playbook()
        >> Received(post(UPGRADE + b"content-length: 2\r\n\r\nab", b"/q?held"))
        << Request("POST", "/q", b"ab")
    )
    assert play.handler.waiting[0].query == b"held"
    assert play.handler.waiting[0].headers["content-length"] == "2"
    play = play >> Respond(b"") << Sent(answer(b"")) >> Received(post(UPGRADE + b"content-length: 000\r\n\r\n"))
    assert play << Request("POST", "/v1/x")


def test_a_wish_beside_close_ends_the_connection_after_the_answer() -> None:
    wish = b"connection: close, upgrade\r\nupgrade: h2c\r\n"
    play = Playbook() >> Received(post(wish + b"content-length: 5\r\n\r\nhello")) << POSTED
    assert play >> Respond(b"x") << Sent(answer(b"x", 200, b"connection: close")) << Does("close")


@pytest.mark.parametrize(
    "body", [b"content-length: 2000\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n7d0\r\n" + b"a" * 2_000]
)
@pytest.mark.parametrize("wish", [b"", UPGRADE])
def test_no_body_is_larger_than_its_limit(wish: bytes, body: bytes) -> None:
    play = Playbook(body_bytes_max=1_000) >> Received(post(wish + body)) << Refused(413, "body_too_large")
    assert play << Sent(refused(b"body_too_large", 413)) << Does("half-close")
    assert play.shared.buffers.body_bytes == 0


# ---- bodies ---------------------------------------------------------------------------------------------------------


def test_fields_behind_the_last_chunk_are_no_fields_of_the_request() -> None:
    trailer = b"authorization: Bearer other\r\nx-b: c\r\n\r\n"
    play = Playbook() >> Received(post(CHUNKED[:-2] + trailer)) << POSTED
    assert play.handler.waiting[0].headers == {"host": "h", "transfer-encoding": "chunked"}


@pytest.mark.parametrize("endless", [b"2;" + b"x" * (1 << 20), b"0\r\nx: " + b"a" * (1 << 20)])
def test_what_is_around_chunks_has_a_limit(endless: bytes) -> None:
    play = Playbook() >> Received(post(b"transfer-encoding: chunked\r\n\r\n"))
    for start in range(0, len(endless), 60_000):
        play._happen(Received(endless[start : start + 60_000]))
    assert play << Refused(400, "malformed_request") << Sent(refused(b"malformed_request", 400)) << Does("half-close")


def test_a_wrong_key_is_refused_before_the_body_and_a_whole_request_leaves_the_connection_open() -> None:
    told = Refused(401, "no_key")
    play = Playbook() >> Received(sized(1_000_000, b"/secret")) << told << Sent(refused(b"no_key", 401))
    assert play << Does("half-close")
    whole = Received(sized(5, b"/secret") + b"hello" + POST)
    play = Playbook() >> whole << told << Sent(answer(b"no_key", 401)) << Does("pause") >> Turn()
    assert play << Does("resume") << POSTED


@pytest.mark.parametrize("framing", [b"content-length: 60000\r\n\r\n", b"transfer-encoding: chunked\r\n\r\nea60\r\n"])
def test_a_body_that_no_handler_reads_is_dropped(framing: bytes) -> None:
    play = Playbook() >> Received(post(framing, b"/none") + b"a" * 30_000)
    assert play.shared.buffers.body_bytes == 0
    end = b"" if b"length" in framing else b"\r\n0\r\n\r\n"
    assert play >> Received(b"a" * 30_000 + end) << Request("POST", "/none")


@pytest.mark.parametrize("framing", [b"content-length: 99999\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n1869F\r\n"])
def test_a_large_body_that_no_handler_reads_is_413(framing: bytes) -> None:
    play = Playbook()
    for part in (post(framing, b"/none") + b"a" * 40_000, b"a" * 40_000):
        play._happen(Received(part))
    assert play << Refused(413, "body_not_read") << Sent(refused(b"body_not_read", 413)) << Does("half-close")


def test_bodies_beyond_the_sum_of_all_are_503_until_others_are_answered() -> None:
    body = Received(sized(900) + b"a" * 900)
    taken = Request("POST", "/v1/x", b"a" * 900)
    first = Playbook(buffers_bytes_max=2_000) >> body << taken
    second = Playbook(beside=first) >> body << Refused(503, "buffers_full")
    assert second << Sent(answer(b"buffers_full", 503)), "a whole request leaves the connection open"
    assert first >> Respond(b"") << Sent(answer(b""))
    assert Playbook(beside=first) >> body << taken


# ---- bodies into a sink ---------------------------------------------------------------------------------------------

LATE = Refused(408, "request_timeout")


def test_a_sink_takes_more_than_a_body_in_memory_may_have_and_is_not_asked_for_room() -> None:
    play = Playbook(body_bytes_max=10, buffers_bytes_max=10) >> Received(sized(60_000, b"/sink") + b"a" * 30_000)
    assert play >> Received(b"a" * 30_000) << Request("POST", "/sink")


def test_an_upload_has_a_minute_between_its_parts_and_a_rate_that_it_must_keep() -> None:
    head, rate = sized(10_000_000, b"/sink"), connection.BYTES_PER_S_MIN
    silent = Playbook() >> Received(head + b"a") >> At(BODY_S - 0.1) >> At(BODY_S + 0.1) << LATE
    assert silent << Sent(refused(b"request_timeout", 408)) << Does("half-close")
    fair = Playbook() >> Received(head)
    for minute in range(10):
        fair = fair >> At(30.0 * minute) >> Received(b"a" * 30 * rate)
    assert fair >> At(300.0 + BODY_S - 31.0)
    slow = Playbook() >> Received(head + b"a") >> At(30.0) >> Received(b"a") >> At(BODY_S + 1) << LATE
    assert slow << Sent(refused(b"request_timeout", 408)) << Does("half-close")


def test_the_time_of_a_sink_that_is_full_is_not_the_clients() -> None:
    play = Playbook() >> Received(sized(99, b"/sink") + b"a") >> SinkFull(True) << Does("pause") >> At(1000.0)
    play = play >> SinkFull(False) << Does("resume") >> At(1000.0 + BODY_S - 0.1) >> At(1000.0 + BODY_S + 0.1) << LATE
    assert play << Sent(refused(b"request_timeout", 408)) << Does("half-close")


def test_a_sink_that_is_full_after_the_end_of_the_body_sets_no_time() -> None:
    play = Playbook() >> Received(sized(2, b"/sink") + b"a") >> SinkFull(True) << Does("pause")
    play = play >> Received(b"b") << Request("POST", "/sink") >> SinkFull(False) << Does("resume") >> At(1000.0)
    assert play >> Respond(b"") << Sent(answer(b""))


# ---- 100 Continue ---------------------------------------------------------------------------------------------------

EXPECTING = post(b"expect: 100-continue\r\ncontent-length: 5\r\n\r\n")


def test_a_client_that_asks_whether_to_send_is_told_so() -> None:
    assert Playbook() >> Received(EXPECTING) << Sent(CONTINUE) >> Received(b"hello") << POSTED


def test_an_interim_answer_waits_for_the_end_of_the_answer_before() -> None:
    play = Playbook() >> Received(GET + EXPECTING) << GOT >> Begin() >> Write(b"one") << Sent(STREAM + b"3\r\none\r\n")
    assert play >> Finish() << Sent(b"0\r\n\r\n" + CONTINUE) >> Received(b"hello") << POSTED


def test_a_client_that_did_not_wait_gets_no_interim_answer() -> None:
    assert Playbook() >> Received(EXPECTING + b"he") >> Received(b"llo") << POSTED
    play = Playbook() >> Received(GET + EXPECTING + b"he") << GOT >> Respond(b"") << Sent(answer(b""))
    assert play >> Received(b"llo") << POSTED


@pytest.mark.parametrize(
    ("head", "status", "reason"),
    [
        (EXPECTING.replace(b"/v1/x", b"/secret"), 401, b"no_key"),
        (EXPECTING.replace(b": 5", b": 99999999"), 413, b"body_too_large"),
        (EXPECTING.replace(b"/v1/x", b"/none").replace(b": 5", b": 99999"), 413, b"body_not_read"),
    ],
)
def test_a_refused_client_is_never_asked_for_its_body(head: bytes, status: int, reason: bytes) -> None:
    play = Playbook() >> Received(head) << Refused(status, reason.decode()) << Sent(refused(reason, status))
    assert play << Does("half-close")


def test_a_client_of_http_1_0_gets_no_interim_answer() -> None:
    assert Playbook() >> Received(EXPECTING.replace(b"HTTP/1.1", b"HTTP/1.0")) >> Received(b"hello") << POSTED


# ---- time -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "due_s", "reason"),
    [(b"GET / HTTP/1.1\r\nhost", HEAD_S, "slow_head"), (sized(9) + b"ab", BODY_S, "slow_body")],
)
def test_a_request_that_does_not_arrive_in_time_is_408(sent: bytes, due_s: float, reason: str) -> None:
    play = Playbook() >> Received(sent) >> At(due_s - 0.1) >> At(due_s) << Refused(408, "request_timeout")
    assert play << Sent(refused(b"request_timeout", 408)) << Does("half-close")
    assert play.shared.cut == {reason: 1}
    assert play >> Received(b"x") >> At(due_s + LINGER_S - 0.1) >> At(due_s + LINGER_S) << Does("close")


def test_a_silent_client_is_closed_without_an_answer_and_later_when_it_was_answered_before() -> None:
    assert Playbook() >> At(HEAD_S - 0.1) >> At(HEAD_S) << Does("close")
    play = Playbook() >> Received(GET) << GOT >> At(500.0) >> Respond(b"") << Sent(answer(b""))
    assert play >> At(500.0 + KEEP_ALIVE_S - 0.1) >> At(500.0 + KEEP_ALIVE_S) << Does("close")
    assert play.shared.cut == {"idle": 1}


def test_a_client_that_takes_nothing_of_an_answer_is_cut_off() -> None:
    play = Playbook(client_stall_s=5.0) >> Received(GET) << GOT >> Respond(b"a" * 1_000)
    size = len(answer(b"a" * 1_000))
    play = play << Sent(answer(b"a" * 1_000)) >> At(1.0, size - 500) >> At(6.0, size - 500)
    assert play >> At(6.1, size - 500) << Does("abort")
    assert play.shared.cut == {"stalled": 1}


def test_a_client_that_reads_slowly_gets_everything() -> None:
    play = Playbook(client_stall_s=5.0) >> Received(GET) << GOT >> Respond(b"a" * 1_000)
    play = play << Sent(answer(b"a" * 1_000))
    assert reduce(rshift, [At(4.0 * look, 1_000 - look) for look in range(18)], play)


def test_a_client_of_a_closing_server_may_stall_for_a_moment_only() -> None:
    play = Playbook() >> Received(GET) << GOT >> Respond(b"a") << Sent(answer(b"a")) >> Draining() << Does("close")
    assert play >> At(connection.CLOSE_STALL_S, 9) >> At(2 * connection.CLOSE_STALL_S + 0.1, 9) << Does("abort")


def test_a_stream_without_news_gets_a_comment_after_each_silence() -> None:
    play = Playbook(keep_alive_s=2.0) >> Received(GET) << GOT >> Begin(on_silence=b":") >> Write(b"a")
    play = play << Sent(STREAM + b"1\r\na\r\n") >> At(1.0) >> At(2.9) >> At(3.0) << Sent(b"1\r\n:\r\n")
    play = play >> At(4.9) >> At(5.0) << Sent(b"1\r\n:\r\n") >> Write(b"b") << Sent(b"1\r\nb\r\n") >> At(6.0)
    assert play >> At(7.9) >> At(8.0, unread=4) >> Finish() << Sent(b"0\r\n\r\n") >> At(11.0)


# ---- clients that leave ---------------------------------------------------------------------------------------------


def test_a_client_that_closes_its_sending_side_is_answered() -> None:
    play = Playbook() >> Received(GET) << GOT >> Ended() << Sent(CONTINUE) >> Respond(b"late")
    assert play << Sent(answer(b"late")) << Does("close")
    play = Playbook() >> Received(GET) << GOT >> Begin(on_silence=b":") >> Write(b"a") << Sent(STREAM + b"1\r\na\r\n")
    assert play >> Ended() << Sent(b"1\r\n:\r\n") >> Finish() << Sent(b"0\r\n\r\n") << Does("close")


def test_requests_of_a_client_that_then_closes_its_side_are_all_answered() -> None:
    wish = b"GET /g HTTP/1.1\r\nhost: h\r\n" + UPGRADE + b"\r\n"
    play = Playbook() >> Received(GET + wish) << GOT << Does("pause") >> Ended() << Sent(CONTINUE) >> Respond(b"1")
    play = play << Sent(answer(b"1")) >> Turn() << Does("resume") << Request("GET", "/g") >> Respond(b"2")
    assert play << Sent(answer(b"2")) << Does("close")


def test_a_refused_request_behind_a_running_one_lets_its_answer_out_also_to_a_closed_side() -> None:
    play = Playbook() >> Received(GET + b"no HTTP\r\n\r\n") << GOT << Does("pause") >> Ended() << Sent(CONTINUE)
    play = play >> Respond(b"1") << Sent(answer(b"1")) >> Turn() << Does("resume")
    assert play << Refused(400, "malformed_request") << Sent(refused(b"malformed_request", 400)) << Does("close")


@pytest.mark.parametrize("sent", [b"", POST[:-1], b"GET / HTTP/1.0\r\n\r\n"])
def test_a_client_that_closes_its_side_in_a_request_or_speaks_http_1_0_is_not_answered(sent: bytes) -> None:
    play = Playbook()
    play._happen(Received(sent))
    play.done.clear()
    assert play >> Ended() << Does("close")


def test_the_handler_hears_of_a_client_that_has_left_and_its_bytes_leave_the_memory() -> None:
    play = Playbook() >> Received(POST) << POSTED >> Received(sized(9) + b"ab") >> Lost() << Gone()
    assert (play.shared.buffers.body_bytes, play.shared.connections.all) == (0, set())
    assert play >> Respond(b"nobody hears") >> Turn()


async def test_a_writer_waits_for_a_client_that_reads_no_more_and_wakes_when_it_leaves() -> None:
    play = Playbook() >> Received(GET) << GOT
    exchange = play.handler.waiting[0]
    exchange.start(200, [], None)
    assert not exchange.write(b"read at once")
    for wake in (play.connection.out.resume, play.connection.lost):
        play.connection.out.pause()
        assert exchange.write(b"not read yet")
        waiting = asyncio.ensure_future(exchange.writable())
        await asyncio.sleep(0)
        assert not waiting.done()
        wake()
        await waiting


# ---- the end of the server ------------------------------------------------------------------------------------------


def test_a_stop_closes_idle_connections_at_once_and_others_after_their_answer() -> None:
    assert Playbook() >> Draining() << Does("close")
    play = Playbook() >> Received(GET) << GOT >> Draining() >> Respond(b"x")
    assert play << Sent(answer(b"x", 200, b"connection: close")) << Does("close")


def test_a_stop_answers_the_requests_that_wait_behind_another() -> None:
    play = Playbook() >> Received(GET + POST) << GOT << Does("pause") >> Draining() >> Respond(b"1")
    play = play << Sent(answer(b"1")) >> Turn() << Does("resume") << POSTED >> Respond(b"2")
    assert play << Sent(answer(b"2", 200, b"connection: close")) << Does("close")


def test_a_stop_refuses_a_body_on_its_way() -> None:
    play = Playbook() >> Received(sized(9) + b"ab") >> Draining() << Refused(503, "draining")
    assert play << Sent(refused(b"draining", 503)) << Does("half-close")
