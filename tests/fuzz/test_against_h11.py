"""This server and h11 see the same requests in the same bytes: against_h11.py says what is compared."""

from __future__ import annotations

import os

import against_h11
import h11
import pytest
from against_h11 import compare, difference, ours, theirs

CASES = int(os.environ.get("FUZZ_CASES", "500"))
UPGRADE = b"connection: upgrade\r\nupgrade: h2c\r\n"


def test_random_requests_are_seen_as_h11_sees_them() -> None:
    counts, found = compare(seed=1, cases=CASES)
    assert not found, found[0]
    assert counts["requests seen by both"] > CASES / 3
    assert counts["equal, all read"] > CASES / 5


def seen_by_both(*pieces: bytes) -> tuple[against_h11.Outcome, against_h11.Outcome]:
    return ours(list(pieces)), theirs(list(pieces))


@pytest.mark.parametrize(
    ("data", "requests"),
    [
        (
            b"POST /a HTTP/1.1\r\nhost: h\r\n"
            + UPGRADE
            + b"content-length: 3\r\n\r\nabcGET /b HTTP/1.1\r\nhost: h\r\n\r\n",
            2,
        ),
        (
            b"POST /a HTTP/1.1\r\nhost: h\r\n"
            + UPGRADE
            + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nx: y\r\n\r\n",
            1,
        ),
        (
            b"GET /a HTTP/1.1\r\nhost: h\r\n"
            + UPGRADE
            + b"\r\nGET /b HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\nGET",
            2,
        ),
        (b"POST /a HTTP/1.1\r\nhost: h\r\nx: \t a b \t\r\nx: c\r\ncontent-length: 0\r\n\r\n", 1),
        (b"GET http://h/a?b#c HTTP/1.1\r\nHOST: h\r\n\r\n", 1),
    ],
)
def test_these_requests_are_the_same(data: bytes, requests: int) -> None:
    for pieces in ([data], [data[at : at + 1] for at in range(len(data))]):
        mine, other = seen_by_both(*pieces)
        assert mine.requests == other.requests
        assert len(mine.requests) == requests
        assert difference(mine, other) == ""


@pytest.mark.parametrize(
    "data",
    [
        b"POST /a HTTP/1.1\r\nhost: h\r\ncontent-length : 3\r\n\r\nabc",
        b"POST /a HTTP/1.1\r\nhost: h\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
        b"POST /a HTTP/1.1\r\nhost: h\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST /a HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n",
        b"GET /a HTTP/1.1\r\nhost: h\r\nhost: h\r\n\r\n",
        b"GET /a b HTTP/1.1\r\nhost: h\r\n\r\n",
        b"GET /a HTTP/1.1\r\nhost: h\r\nx: a\0b\r\n\r\n",
    ],
)
def test_these_bytes_are_refused_by_both(data: bytes) -> None:
    mine, other = seen_by_both(data)
    assert (mine.requests, mine.refused) == ([], True)
    assert (other.requests, other.refused) == ([], True)


def test_a_difference_that_matters_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose body lacks a byte, or that is read although h11 refuses the bytes."""
    send = h11.Connection.receive_data
    monkeypatch.setattr(h11.Connection, "receive_data", lambda link, data: send(link, data.replace(b"hello", b"hellO")))
    mine, other = seen_by_both(b"POST /a HTTP/1.1\r\nhost: h\r\ncontent-length: 5\r\n\r\nhello")
    assert difference(mine, other) == "matters"
    monkeypatch.setattr(h11.Connection, "receive_data", lambda link, data: send(link, data.replace(b"x:", b"x :")))
    mine, other = seen_by_both(b"GET /a HTTP/1.1\r\nhost: h\r\nx: y\r\n\r\n")
    assert difference(mine, other) == "matters"
