"""Servers with the settings that a comparison covers, and what each is asked."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from behaviour import asking
from behaviour.asking import CHAT, Asked, ask, form

KEYS = """
[keys.alice]
key = "sk-alice"
weight = 2

[keys.hasty]
key = "sk-hasty"
requests_per_minute = 3

[keys.brief]
key = "sk-brief"
tokens_per_minute = 30
tokens_waiting = 500

[keys.poor]
key = "sk-poor"
tokens_per_day = 40
money_per_month = 1

[keys.rich]
key = "sk-rich"
tiers = ["auto", "default", "priority"]
priority = [-2, 3]
money_per_day = 0.00002

[keys.rich.models."fake"]
concurrent = 1

[prices."fake"]
input = 0.10
output = 0.40
"""
LINE = {"custom_id": "a-1", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
POLLS, POLL_S = 100, 0.1

Answers = dict[str, bytes]
Send = Callable[[Asked], bytes]


class Arrangement(NamedTuple):
    """A server, and what it is asked in order.

    flags  of `serve`; {folder} is a fresh folder, with `files` in it
    then   further requests, which depend on answers; their answers by name
    """

    name: str
    flags: tuple[str, ...]
    asked: Callable[[], Iterable[Asked]]
    files: Mapping[str, str] = {}
    then: Callable[[Send], Answers] | None = None
    engine: tuple[str, ...] = ()


def _plain() -> Iterable[Asked]:
    yield from asking.good()
    yield from asking.own_paths()
    yield from asking.bad()


def _keys() -> Iterable[Asked]:
    alice, admin = {"authorization": "Bearer sk-alice"}, {"authorization": "Bearer sk-admin"}
    yield from asking.good(**alice)
    yield from asking.own_paths()
    yield from asking.own_paths(**alice)
    yield from asking.own_paths(**admin)
    yield from asking.bad_headers()
    yield from asking.bad_paths()
    chat = "/v1/chat/completions"
    for name in ("hasty", "brief", "poor", "rich"):
        for number in range(5):
            key = {"authorization": f"Bearer sk-{name}"}
            yield ask("POST", chat, CHAT, name=f"{name} {number}", **key)
            yield ask("POST", "/v1/messages", asking.BODIES["/v1/messages"], name=f"{name} {number}", **key)
    for name in ("alice", "rich"):
        key = {"authorization": f"Bearer sk-{name}"}
        for tier in ("auto", "default", "flex", "priority", "gold"):
            yield ask("POST", chat, {**CHAT, "service_tier": tier}, name=f"{name} tier {tier}", **key)
        for priority in (-3, -2, 0, 3, 4):
            yield ask("POST", chat, {**CHAT, "priority": priority}, name=f"{name} priority {priority}", **key)
        yield ask("POST", chat, {**CHAT, "max_tokens": 1_000_000}, name=f"{name} large", **key)
    for name in ("brief", "poor"):
        key = {"authorization": f"Bearer sk-{name}"}
        yield ask("POST", chat, {**CHAT, "max_tokens": 1_000_000}, name=f"{name} large", **key)
    for key in ({}, alice, {"authorization": "Bearer sk-wrong"}, {"x_api_key": "sk-alice"}):
        yield ask("GET", "/metrics", name=f"with {key}", **key)
        yield ask("GET", "/v1/models", name=f"with {key}", **key)
        yield ask("POST", "/v1/responses/resp_none/cancel", name=f"with {key}", **key)
        yield ask("POST", "/v1/messages", asking.BODIES["/v1/messages"], name=f"with {key}", **key)
    yield from _operating(admin)


def _operating(admin: Mapping[str, str]) -> Iterable[Asked]:
    for body in (b"", b"{", b"[]", b"{}", b'{"parts": 3}', b'{"limits_part": "x"}'):
        yield ask("POST", "/admin/peers", body, name=f"peers {body.decode()}", **admin)
    for path in ("nobody/drain", "nobody", "ENGINE/melt", "ENGINE/restart", "ENGINE/drain", "ENGINE/drain"):
        yield ask("POST", f"/admin/engines/{path}", name=path, **admin)
    yield ask("GET", "/admin/engines", name="while drained", **admin)
    yield ask("GET", "/ready", name="while drained")
    yield ask("POST", "/v1/chat/completions", CHAT, name="while drained", authorization="Bearer sk-alice")
    yield ask("POST", "/admin/engines/ENGINE/resume", **admin)
    yield ask("POST", "/v1/chat/completions", CHAT, name="resumed", authorization="Bearer sk-alice")
    yield ask("POST", "/admin/reload", **admin)
    yield ask("GET", "/admin/usage", name="at the end", **admin)


def _named() -> Iterable[Asked]:
    for model in ("gpt-4o", "other", "fake", "second", "nobody", "fak"):
        yield ask("POST", "/v1/chat/completions", {**CHAT, "model": model}, name=f"model {model}")
        yield ask("POST", "/v1/embeddings", {"model": model, "input": "a"}, name=f"model {model}")
    origin = {"origin": "https://chat.example.com"}
    for method in ("GET", "OPTIONS"):
        asked_for = {"access_control_request_method": "POST", "access_control_request_headers": "x-a"}
        yield ask(method, "/v1/models", name="origin", **origin, **asked_for)
        yield ask(method, "/v1/models", name="another origin", origin="https://b.example", **asked_for)
    yield ask("POST", "/v1/chat/completions", CHAT, name="origin", **origin)
    yield from asking.good(**{"x_forwarded_for": "10.1.2.3"})
    yield from asking.own_paths()
    yield from asking.bad_headers()
    yield ask("POST", "/v1/chat/completions", {**CHAT, "model": "gpt-4o", "max_tokens": 4000}, name="too late")


def _static() -> Iterable[Asked]:
    yield from asking.good()
    yield from asking.bad_headers()
    yield from asking.own_paths()


def _jobs() -> Iterable[Asked]:
    files, batches = "/v1/files", "/v1/batches"
    good = {"purpose": b"batch", "file": json.dumps(LINE).encode()}
    yield form(files, {"file": good["file"]}, name="no purpose")
    yield form(files, {"purpose": b"batch"}, name="no file")
    yield form(files, {**good, "purpose": b"singing"}, name="unknown purpose")
    yield form(files, {**good, "expires_after[anchor]": b"never"}, name="anchor")
    yield form(files, {**good, "expires_after[anchor]": b"created_at", "expires_after[seconds]": b"5"}, name="seconds")
    yield form(files, good, name="no boundary", content_type="multipart/form-data")
    yield form(files, good, name="JSON", content_type="application/json")
    yield form(files, good, name="packed", content_encoding="gzip")
    yield ask("POST", files, {"a": 1}, name="a JSON body")
    yield ask("POST", files, b"", name="empty")
    for path in (files, batches):
        for query in (
            "",
            "?limit=0",
            "?limit=x",
            "?limit=99999",
            "?order=up",
            "?after=none",
            "?purpose=x",
            "?before=1",
        ):
            yield ask("GET", path + query)
        yield ask("PUT", path)
    for path in ("file-none", "file-none/content", "file-none/more", "%2e%2e", "a/b/c"):
        yield ask("GET", f"{files}/{path}")
        yield ask("DELETE", f"{files}/{path}")
    for path in ("batch_none", "batch_none/cancel", "batch_none/more"):
        yield ask("GET", f"{batches}/{path}")
        yield ask("POST", f"{batches}/{path}", b"")
    body = {"input_file_id": "file-none", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    for number, change in enumerate(
        (
            *({}, {"endpoint": "/v1/files"}, {"endpoint": 5}, {"endpoint": "/v1/audio/transcriptions"}),
            *({"completion_window": window} for window in ("soon", "0s", "31d", "-1h", 5, None, "90s")),
            *({"input_file_id": value} for value in (None, 5, "", "x" * 300)),
            *(
                {"metadata": value}
                for value in (5, {"a": 1}, {"a" * 70: "b"}, {"a": "b" * 600}, {str(i): "" for i in range(20)})
            ),
            *(
                {"output_expires_after": value}
                for value in (5, {"anchor": "x", "seconds": 1}, {"anchor": "created_at"})
            ),
        )
    ):
        yield ask("POST", batches, {**body, **change}, name=f"bad {number}")
    yield ask("POST", batches, body, name="long key", idempotency_key="x" * 300)
    for data in (b"", b"{", b"[]", b"null"):
        yield ask("POST", batches, data, name=f"body {data.decode()}")


def _jobs_with_keys() -> Iterable[Asked]:
    yield from _jobs()
    for asked in _jobs():
        line, _, rest = asked.data.partition(b"\r\n")
        yield Asked(f"{asked.name}, with a key", line + b"\r\nauthorization: Bearer sk-a\r\n" + rest)


def _whole_jobs(send: Send) -> Answers:
    """Batches from their upload to their files, one that works and several that do not."""
    answers: Answers = {}
    lines = [{**LINE, "custom_id": f"a-{number}"} for number in range(5)]
    odd = [*lines, {**LINE, "custom_id": "b", "body": {**CHAT, "model": "nobody"}}]
    odd += [
        {**LINE, "custom_id": "c", "body": {**CHAT, "n": "x"}},
        {**LINE, "custom_id": "d", "body": {"model": "fake"}},
    ]
    files = {
        "good": _lines(lines),
        "odd requests": _lines(odd),
        "an id twice": _lines([lines[0], lines[0]]),
        "no JSON": b"{\n" + _lines(lines),
        "another url": _lines([{**LINE, "url": "/v1/completions"}]),
        "streams": _lines([{**LINE, "body": {**CHAT, "stream": True}}]),
        "empty": b"",
        "UTF-16": _lines(lines).decode().encode("utf-16"),
        "a byte order mark": b"\xef\xbb\xbf" + _lines(lines),
    }
    for name, data in files.items():
        answers[f"{name}: upload"] = uploaded = send(form("/v1/files", {"purpose": b"batch", "file": data}, name=name))
        file = _json(uploaded).get("id", "")
        body = {
            "input_file_id": file,
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
            "metadata": {"a": "b"},
        }
        answers[f"{name}: create"] = created = send(ask("POST", "/v1/batches", body, name=name))
        batch = _json(created).get("id", "")
        for _ in range(POLLS):
            answers[f"{name}: end"] = seen = send(ask("GET", f"/v1/batches/{batch}"))
            shown = _json(seen)
            if shown.get("status") not in ("validating", "in_progress", "finalizing"):
                break
            time.sleep(POLL_S)
        answers[f"{name}: cancel"] = send(ask("POST", f"/v1/batches/{batch}/cancel", b""))
        for kind in ("output_file_id", "error_file_id"):
            if shown.get(kind):
                answers[f"{name}: {kind}"] = _sorted_lines(send(ask("GET", f"/v1/files/{shown[kind]}/content")))
        answers[f"{name}: file"] = send(ask("GET", f"/v1/files/{file}"))
        answers[f"{name}: content"] = send(ask("GET", f"/v1/files/{file}/content"))
        answers[f"{name}: delete"] = send(ask("DELETE", f"/v1/files/{file}"))
        answers[f"{name}: deleted"] = send(ask("GET", f"/v1/files/{file}"))
    answers["list of batches"] = send(ask("GET", "/v1/batches?limit=3"))
    answers["list of files"] = send(ask("GET", "/v1/files?limit=3&order=asc"))
    return answers


def _lines(rows: list[dict[str, Any]]) -> bytes:
    return b"\n".join(json.dumps(row).encode() for row in rows)


def _json(answer: bytes) -> dict[str, Any]:
    try:
        found = json.loads(answer.partition(b"\r\n\r\n")[2])
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _sorted_lines(answer: bytes) -> bytes:
    """Answers come in any order, and so do their numbers."""
    top, _, body = answer.partition(b"\r\n\r\n")
    rows = [json.loads(row) for row in body.splitlines() if row.startswith(b"{")]
    for row in rows:
        if row.get("response"):
            row["response"]["request_id"] = ""
    return top + b"\r\n\r\n" + b"\n".join(sorted(json.dumps(row).encode() for row in rows))


ARRANGEMENTS = (
    Arrangement("plain", ("--journal", "{folder}/journal"), _plain),
    Arrangement(
        "keys",
        (
            *("--api-key-file", "{folder}/keys.toml", "--admin-key-file", "{folder}/admin", "--access-log"),
            *("--usage-file", "{folder}/usage.sqlite", "--journal", "{folder}/journal", "--log-format", "json"),
        ),
        _keys,
        files={"keys.toml": KEYS, "admin": "sk-admin\n"},
    ),
    Arrangement(
        "names, deadlines, origins",
        (
            *("--alias", "gpt-4o=fake", "--alias", "gpt-4o=second", "--alias", "other=second", "--order", "edf"),
            *("--slo-ms", "60000", "--slo-ms", "model:second=30000", "--cors-origin", "https://chat.example.com"),
            *("--fair-by", "address", "--trusted-proxy", "127.0.0.1", "--access-log", "--journal", "{folder}/journal"),
        ),
        _named,
        engine=("--other", "second=0"),
    ),
    Arrangement(
        "whole batches",
        (
            "--barrier",
            "--slots",
            "4",
            "--batch-size",
            "4",
            "--release",
            "greedy",
            "--bins",
            "3",
            "--fair-by",
            "stream",
            "--journal",
            "{folder}/journal",
        ),
        _static,
        engine=("--barrier",),
    ),
    Arrangement("jobs", ("--state", "{folder}/state", "--access-log"), _jobs, then=_whole_jobs),
    Arrangement(
        "jobs with keys",
        ("--state", "{folder}/state", "--api-key-file", "{folder}/keys"),
        _jobs_with_keys,
        files={"keys": "a: sk-a\n"},
    ),
)
