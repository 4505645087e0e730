"""The requests that are sent to both checkouts: bad ones over all endpoints, and good ones.

A request is the bytes of a whole HTTP/1.1 request. Each is sent on a connection of its own, which the server closes.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

ANSWER_S = 30.0
READ_BYTES = 1 << 16

CHAT: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 4}
BODIES: dict[str, dict[str, Any]] = {  # a good body for each endpoint that takes JSON
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "fake", "prompt": "hello there", "max_tokens": 4},
    "/v1/responses": {"model": "fake", "input": "hello there", "max_output_tokens": 4},
    "/v1/messages": {**CHAT},
    "/v1/messages/count_tokens": {"model": "fake", "messages": CHAT["messages"]},
    "/v1/embeddings": {"model": "fake", "input": "hello there"},
    "/v1/moderations": {"model": "fake", "input": "hello there"},
    "/rerank": {"model": "fake", "query": "hello", "documents": ["a", "b"]},
    "/v1/rerank": {"model": "fake", "query": "hello", "documents": ["a", "b"]},
    "/score": {"model": "fake", "text_1": "hello", "text_2": "there"},
    "/v1/score": {"model": "fake", "text_1": "hello", "text_2": "there"},
    "/tokenize": {"model": "fake", "prompt": "hello there"},
    "/detokenize": {"model": "fake", "tokens": [1, 2, 3]},
}
FORMS = ("/v1/audio/transcriptions", "/v1/audio/translations")
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
MAIN_FIELD = {
    **dict.fromkeys(BODIES, "input"),
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
    "/rerank": "documents",
    "/v1/rerank": "documents",
    "/score": "text_1",
    "/v1/score": "text_1",
    "/tokenize": "prompt",
    "/detokenize": "tokens",
}


class Asked(NamedTuple):
    """name : among all requests of an arrangement.  data : the whole request, or what is sent of it"""

    name: str
    data: bytes


def head(method: str, path: str, headers: Mapping[str, str], *, close: bool = True) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", *[f"{name}: {value}" for name, value in headers.items()]]
    return "\r\n".join([*lines, *(["connection: close"] if close else []), "", ""]).encode()


def ask(method: str, path: str, body: bytes | Any = b"", *, name: str = "", **headers: str) -> Asked:
    """headers : with _ for -"""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {name.replace("_", "-"): value for name, value in headers.items()}
    if data or method in ("POST", "PUT", "PATCH"):
        lines.setdefault("content-length", str(len(data)))
        lines.setdefault("content-type", "application/json")
    return Asked(f"{method} {path} {name}".strip(), head(method, path, lines) + data)


def form(path: str, fields: Mapping[str, bytes], *, name: str, boundary: str = "xxBOUNDARYxx", **headers: str) -> Asked:
    """multipart/form-data; a field called `file` is a file."""
    parts = []
    for field, value in fields.items():
        file = '; filename="in.jsonl"' if field == "file" else ""
        parts.append(f'--{boundary}\r\ncontent-disposition: form-data; name="{field}"{file}\r\n\r\n'.encode() + value)
    data = b"\r\n".join([*parts, f"--{boundary}--\r\n".encode()])
    kind = f"multipart/form-data; boundary={boundary}"
    return ask("POST", path, data, name=name, **{"content_type": kind, **headers})


def answer(port: int, data: bytes) -> bytes:
    """All bytes that the server sends until it closes."""
    got = []
    with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S) as connection:
        try:
            connection.sendall(data)
            while received := connection.recv(READ_BYTES):
                got.append(received)
        except TimeoutError:
            got.append(b"(no more bytes, and no end)")
        except ConnectionError:
            got.append(b"(reset)")
    return b"".join(got)


# ---- bad requests --------------------------------------------------------------------------------------------------


def bad_bodies() -> Iterator[Asked]:
    """The same dozen mistakes on every endpoint that takes JSON."""
    for path, body in BODIES.items():
        field = MAIN_FIELD[path]
        yield ask("POST", path, b"", name="empty")
        yield ask("POST", path, b'{"model": "fake", ', name="broken")
        yield ask("POST", path, b"[1, 2]", name="a list")
        yield ask("POST", path, b'"text"', name="a text")
        yield ask("POST", path, b"null", name="null")
        yield ask("POST", path, b"\xff\xfe{}", name="not UTF-8")
        yield ask("POST", path, {**body, "model": 7}, name="model of another type")
        yield ask("POST", path, {**body, "model": "nobody"}, name="unknown model")
        yield ask("POST", path, {**body, "model": ""}, name="empty model")
        yield ask("POST", path, {name: value for name, value in body.items() if name != "model"}, name="no model")
        yield ask("POST", path, {"model": "fake"}, name="no prompt")
        yield ask("POST", path, {**body, field: {"a": 1}}, name="prompt of another type")
        yield ask("POST", path, {**body, field: 3.5}, name="prompt is a number")
        yield ask("POST", path, {**body, field: []}, name="empty prompt")
        yield ask("POST", path, {**body, "deep": json.loads("[" * 200 + "]" * 200)}, name="nested")
        yield ask("POST", path, b'{"model": "\\ud83d"}', name="half a surrogate pair")
        yield ask("POST", path, {**body, field: "x" * 3000}, name="long")
        yield ask("POST", path, body, name="path with a slash", x_request_id="a" * 400)


def bad_fields() -> Iterator[Asked]:
    """Fields whose values make no sense, on the endpoints with generated text."""
    values: list[tuple[str, Any]] = [
        *[("stream", value) for value in ("perhaps", 2, [], None, "true", 1)],
        *[("n", value) for value in (0, -1, 129, "x", 1.5, "2", [])],
        *[("max_tokens", value) for value in (0, -1, -2, "x", 1e30, 1.5, [], 1 << 40)],
        *[("max_completion_tokens", value) for value in (0, "x", 1 << 40)],
        *[("max_output_tokens", value) for value in (0, "x", 1 << 40)],
        *[("min_tokens", value) for value in (-1, "x", 1 << 40)],
        *[("priority", value) for value in (-5, "x", 9, 1.5)],
        *[("service_tier", value) for value in ("flex", "priority", "gold", 7, None)],
        *[("stop", value) for value in (["a"] * 65, 3, {}, "a")],
        *[("tools", value) for value in ([{}] * 1025, "x", [{"type": "function"}])],
        *[("best_of", value) for value in (0, "x", 200)],
        ("messages", [{"role": "user", "content": "a"}] * 8200),
        ("messages", [{"role": "user"}]),
        ("messages", [{"content": 7}]),
        ("messages", ["text"]),
        ("prompt", ["a"] * 130),
        ("prompt", [1, 2, 3]),
        ("prompt", [[1, 2], [3]]),
        ("prompt", [1, "a"]),
        ("prompt", list(range(100)) * 200),
        ("input", [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]),
        ("input", [[1, 2], 3]),
        ("previous_response_id", "resp_none"),
        ("previous_response_id", 5),
        ("background", True),
        ("stream_options", {"include_usage": True}),
        ("stream_options", 5),
    ]
    for path in GENERATING:
        for number, (field, value) in enumerate(values):
            yield ask("POST", path, {**BODIES[path], field: value}, name=f"{number}: {field} {str(value)[:20]}")


def bad_headers() -> Iterator[Asked]:
    chat = "/v1/chat/completions"
    for number, value in enumerate(("abc", "0", "-5", "1e400", "nan", "", "5 s", "0.0001")):
        yield ask("POST", chat, CHAT, name=f"slo {number}", x_llmserve_slo_ms=value)
    for number, value in enumerate(("abc", "0", "-5", "inf", "nan", "", "1e30")):
        yield ask("POST", chat, CHAT, name=f"prediction {number}", x_llmserve_predicted_tokens=value)
    for number, value in enumerate(("", "a/b", "x" * 300, "a b", "é", "a,b")):
        yield ask("POST", chat, CHAT, name=f"stream {number}", x_llmserve_stream=value)
    for number, value in enumerate(("maybe", "true", "1", "")):
        yield ask("POST", chat, {**CHAT, "stream": True}, name=f"receipt {number}", x_llmserve_receipt=value)
    for number, value in enumerate(("br", "gzip", "gzip, gzip, gzip, gzip", "identity", "zstd")):
        yield ask("POST", chat, CHAT, name=f"coding {number}", content_encoding=value)
    for number, value in enumerate(("Bearer x", "Basic x", "Bearer ", "x", "Bearer a b")):
        yield ask("POST", chat, CHAT, name=f"authorization {number}", authorization=value)
    yield ask("POST", chat, CHAT, name="asker", x_llmserve_asker='{"key": "alice"}')
    yield ask("POST", chat, CHAT, name="expect", expect="100-continue")
    yield ask("POST", chat, CHAT, name="other expectation", expect="200-ok")
    yield ask("POST", chat, CHAT, name="origin", origin="https://evil.example")
    yield ask("POST", chat, CHAT, name="upgrade", upgrade="h2c")
    yield ask("POST", chat, CHAT, name="content type", content_type="text/plain")
    yield ask("POST", "/v1/messages", BODIES["/v1/messages"], name="bare key", x_api_key="sk-alice")
    yield ask("POST", chat, CHAT, name="bare key", x_api_key="sk-alice")
    yield ask("POST", chat, CHAT, name="request id", x_request_id="mine-1")
    yield ask("POST", chat, CHAT, name="traceparent", traceparent="00-" + "1" * 32 + "-" + "2" * 16 + "-01")


def bad_paths() -> Iterator[Asked]:
    paths = (
        "/v1/chat/completion",
        "/chat/completions",
        "/v1",
        "/v2/chat/completions",
        "/nothing",
        "/v1/v1/completions",
    )
    for path in (
        *paths,
        "/openai/v1/chat/completions",
        "//v1//chat//completions",
        "/v1/chat/completions/",
        "/%2e%2e/x",
    ):
        for method in ("GET", "POST"):
            yield ask(method, path, CHAT if method == "POST" else b"")
    for path in (*BODIES, *FORMS):
        for method in ("GET", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"):
            yield ask(method, path)
    own = ("/v1/models", "/v1/models/fake", "/health", "/ready", "/metrics", "/openapi.json", "/", "/events")
    own += (
        "/v1/files",
        "/v1/batches",
        "/admin/queue",
        "/admin/engines",
        "/admin/usage",
        "/admin/reload",
        "/admin/peers",
    )
    for path in own:
        for method in ("POST", "DELETE", "OPTIONS", "HEAD", "TRACE"):
            if (method, path) != ("HEAD", "/events"):
                yield ask(method, path, b"{}" if method == "POST" else b"")
    yield ask("OPTIONS", "*")
    yield ask(
        "OPTIONS", "/v1/models", name="preflight", origin="https://a.example", access_control_request_method="GET"
    )
    for path in ("/v1/models/nobody", "/v1/models/a/b", "/v1/responses/resp_none", "/v1/responses/", "/docs", "/redoc"):
        yield ask("GET", path)
    yield ask("DELETE", "/v1/responses/resp_none")
    yield ask("POST", "/v1/responses/resp_none/cancel")
    yield ask("POST", "/nothing", b"x" * 70_000, name="large body where none is read")


def bad_forms() -> Iterator[Asked]:
    for path in FORMS:
        good = {"model": b"fake", "file": b"RIFF" + b"\0" * 400}
        yield form(path, {"file": good["file"]}, name="no model")
        yield form(path, {"model": b"fake"}, name="no file")
        yield form(path, {**good, "model": b"nobody"}, name="unknown model")
        yield form(path, {**good, "stream": b"perhaps"}, name="stream")
        yield form(path, {**good, "model": b"\xff"}, name="model is not UTF-8")
        yield form(path, good, name="no boundary", content_type="multipart/form-data")
        yield form(path, good, name="another boundary", content_type="multipart/form-data; boundary=other")
        yield form(path, good, name="JSON", content_type="application/json")
        yield form(path, good, name="no type", content_type="")
        yield ask("POST", path, {"model": "fake"}, name="a JSON body")
        yield ask("POST", path, b"--x\r\n", name="cut", content_type="multipart/form-data; boundary=x")


def bad_bytes() -> Iterator[Asked]:
    """What is hardly HTTP."""
    data = json.dumps(CHAT).encode()
    line, chat = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n", "/v1/chat/completions"
    heads = {
        "no HTTP": b"hello\r\n\r\n",
        "HTTP/0.9": b"GET /\r\n\r\n",
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "HTTP/3.0": b"GET / HTTP/3.0\r\nhost: a\r\n\r\n",
        "HTTP/1.0": b"GET /health HTTP/1.0\r\n\r\n",
        "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100,
        "CONNECT": b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n",
        "no host": b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n",
        "two hosts": b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\nconnection: close\r\n\r\n",
        "two keys": line + b"authorization: Bearer a\r\nauthorization: Bearer b\r\ncontent-length: 0\r\n\r\n",
        "two lengths": line + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        "length of another type": line + b"content-length: five\r\n\r\nhello",
        "negative length": line + b"content-length: -5\r\n\r\nhello",
        "length and chunks": line + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "other coding": line + b"transfer-encoding: gzip\r\n\r\nhello",
        "bad chunk": line + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        "long length": line + b"content-length: 99999999999\r\n\r\n",
        "huge length": line + b"content-length: 99999999999999999999999999\r\n\r\n",
        "large head": line + b"x: " + b"y" * 70_000 + b"\r\n\r\n",
        "many fields": line + b"".join([b"x-%d: y\r\n" % number for number in range(120)]) + b"\r\n",
        "folded field": line + b"x: a\r\n b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
        "space in name": line + b"x y: a\r\n\r\n",
        "nul": line + b"x: a\0b\r\n\r\n",
        "bare line feeds": b"GET /health HTTP/1.1\nhost: a\nconnection: close\n\n",
        "absolute target": b"GET http://a/health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n",
        "target with a fragment": b"GET /health#x HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n",
        "target with a query": b"GET /health?a=b HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n",
        "target is not ASCII": "GET /é HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n".encode(),
        "long target": b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
        "unknown method": b"BREW /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n",
        "method in small letters": b"get /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n",
        "empty lines before": b"\r\n\r\nGET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n",
    }
    for name, sent in heads.items():
        yield Asked(f"bytes: {name}", sent)
    chunks = b"%x\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (10, data[:10], len(data) - 10, data[10:])
    chunked = head("POST", chat, {"transfer-encoding": "chunked", "content-type": "application/json"})
    yield Asked("bytes: chunked body", chunked + chunks)
    two = head("GET", "/health", {}, close=False) + head("POST", chat, {"content-length": str(len(data))}) + data
    yield Asked("bytes: two requests at once", two)
    yield Asked("bytes: a bad one behind a good one", head("GET", "/health", {}, close=False) + b"nonsense\r\n\r\n")


def over_limits() -> Iterator[Asked]:
    for path in ("/v1/chat/completions", "/v1/embeddings"):
        field = MAIN_FIELD[path]
        long = "word " * 300_000
        value = [{"role": "user", "content": long}] if field == "messages" else long
        yield ask("POST", path, {**BODIES[path], field: value}, name="prompt_chars_max")
        yield ask("POST", path, b" " * 20_000_000, name="body_bytes_max")


# ---- good requests -------------------------------------------------------------------------------------------------


def good(**headers: str) -> Iterator[Asked]:
    for path, body in BODIES.items():
        yield ask("POST", path, body, name="good", **headers)
    for path in GENERATING:
        yield ask("POST", path, {**BODIES[path], "stream": True}, name="good stream", **headers)
    chat = "/v1/chat/completions"
    yield ask("POST", chat, {**CHAT, "n": 3}, name="three choices", **headers)
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    yield ask("POST", chat, {**CHAT, **usage}, name="usage", **headers)
    yield ask("POST", chat, {**CHAT, **usage}, name="receipt", x_llmserve_receipt="true", **headers)
    yield ask("POST", chat, CHAT, name="predicted", x_llmserve_predicted_tokens="12", **headers)
    yield ask("POST", chat, CHAT, name="deadline", x_llmserve_slo_ms="60000", **headers)
    yield ask("POST", chat, CHAT, name="stream", x_llmserve_stream="web", **headers)
    for path in FORMS:
        yield form(path, {"model": b"fake", "file": b"RIFF" + b"\0" * 4000}, name="good", **headers)


def own_paths(**headers: str) -> Iterator[Asked]:
    paths = ("/v1/models", "/v1/models/fake", "/health", "/ready", "/openapi.json", "/", "/page.css", "/page.js")
    for path in (*paths, "/charts.js", "/admin/queue", "/admin/engines", "/admin/usage"):
        yield ask("GET", path, name="own", **headers)


def bad() -> list[Asked]:
    """All bad requests of a server without keys."""
    parts = (bad_bodies, bad_fields, bad_headers, bad_paths, bad_forms, bad_bytes, over_limits)
    return [asked for part in parts for asked in part()]
