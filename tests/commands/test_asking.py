"""What commands that ask a running server say of its answers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from llmserve.commands.asking import ask
from llmserve.errors import ConfigError, NoAnswer


@contextmanager
def answering(*answers: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server that gives one connection after the other an answer. Yields its URL, and the first lines of requests."""
    asked: list[bytes] = []

    def serve(listener: socket.socket) -> None:
        for answer in answers:
            connection, _ = listener.accept()
            with connection:
                asked.append(connection.recv(10_000).partition(b"\r\n")[0])
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
        thread.join()


def answer(status: bytes, body: bytes = b"", fields: bytes = b"") -> bytes:
    return b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n\r\n%b" % (status, fields, len(body), body)


def test_a_url_may_end_with_v1_and_a_redirection_is_followed() -> None:
    moved = answer(b"308 Permanent Redirect", fields=b"location: /there/metrics?a=b\r\n")
    with answering(moved, answer(b"200 OK", b"text")) as (url, asked):
        assert ask(f"{url}/base/v1/", "/metrics", None, {}) == b"text"
    assert asked == [b"GET /base/metrics HTTP/1.1", b"GET /there/metrics?a=b HTTP/1.1"]


def test_an_order_is_not_repeated_elsewhere() -> None:
    moved = answer(b"307 Temporary Redirect", fields=b"location: /there\r\n")
    with answering(moved) as (url, _), pytest.raises(NoAnswer, match="answers with status 307"):
        ask(url, "/here", None, {}, method="POST")


def test_a_refusal_that_is_known_is_an_error_of_the_settings_and_another_is_told() -> None:
    with answering(answer(b"401 Unauthorized")) as (url, _), pytest.raises(ConfigError, match="refuses the key"):
        ask(url, "/", "k", {401: "refuses the key"})
    with answering(answer(b"503 No", b"draining")) as (url, _), pytest.raises(NoAnswer, match="status 503: draining"):
        ask(url, "/", "k", {401: "refuses the key"})


def test_a_server_that_is_not_there_is_told_as_the_system_tells_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(NoAnswer, match=r"does not answer: \[Errno 111\] Connection refused"):
        ask(url, "/", None, {})
