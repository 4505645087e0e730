"""One of two servers is killed: how each request ends."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kit import client
from kit.client import Reply
from kit.progress import log

from questions.vllm.arrangements import arrangements_of
from questions.vllm.engines import Engines, front
from questions.vllm.parts import requests_of
from questions.vllm.passes import code_of, session_of, streamed


@dataclass(frozen=True, slots=True)
class Verdict:
    """kind : "answer", "error" (a clear error), "lost" (neither), or "twice" (more than one answer or error)"""

    kind: str
    code: str = ""
    text: str = ""


def judge(reply: Reply, *, stream: bool) -> Verdict:
    """Judge the reply to a request with one choice, as a client must."""
    if reply.status not in (0, 200):
        code = code_of(reply.body)
        return Verdict("error", f"{reply.status} {code}") if code != "unclear" else Verdict("lost", "an unclear error")
    try:
        events = list(_events(reply.body)) if stream else [json.loads(reply.body)]
    except ValueError:
        return Verdict("lost", "cut off")
    choices = [choice for event in events for choice in event.get("choices", ())]
    errors = [event for event in events if "error" in event]
    finishes = sum(choice.get("finish_reason") is not None for choice in choices)
    text = "".join((choice.get("delta") or choice.get("message") or {}).get("content") or "" for choice in choices)
    if finishes + len(errors) > 1:
        return Verdict("twice", text=text)
    if errors:
        return Verdict("error", f"event {code_of(json.dumps(errors[0]).encode())}", text)
    if not finishes or (stream and not reply.body.rstrip().endswith(b"data: [DONE]")):
        return Verdict("lost", "cut off", text)
    return Verdict("answer", text=text)


def _events(body: bytes) -> Iterator[dict[str, Any]]:
    """The JSON of a stream's events. Raises ValueError where an event is cut off."""
    for line in body.splitlines():
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield json.loads(line[6:])


async def kill(args: argparse.Namespace, part: str, engines: Engines) -> dict[str, Any]:
    """Kill the first server and its processes when half of the requests have ended. Every second request streams."""
    count = requests_of(args, part)
    prompts = engines.prompts[:count]
    arrangement = arrangements_of(part, args.orders)[1]
    done = 0
    half_done = asyncio.Event()
    async with session_of() as session, front(args, arrangement, engines) as front_url:

        async def ask(url: str, index: int, *, stream: bool) -> Verdict:
            body = streamed(prompts[index]) if stream else client.body_of(prompts[index])
            return judge(await client.ask(session, url, body), stream=stream)

        async def verdict(index: int) -> Verdict:
            nonlocal done
            own = await ask(front_url, index, stream=bool(index % 2))
            done += 1
            if 2 * done >= count:
                half_done.set()
            return own

        expected = await asyncio.gather(*(ask(engines.urls[index % 2], index, stream=False) for index in range(count)))
        verdicts_later = asyncio.gather(*(verdict(index) for index in range(count)))
        await half_done.wait()
        engines.servers[0].kill()
        answered_before = done
        await engines.servers[0].process.wait()
        verdicts = await verdicts_later
    kinds = Counter(verdict.kind for verdict in verdicts)
    section: dict[str, Any] = {kind: kinds[kind] for kind in ("answer", "error", "lost", "twice")}
    section["answered_before_the_kill"] = answered_before
    section["errors"] = dict(Counter(verdict.code for verdict in verdicts if verdict.kind in ("error", "lost")))
    section["other_text"] = sum(
        verdict.kind == "answer" and verdict.text != own.text for verdict, own in zip(verdicts, expected, strict=True)
    )
    log(f"kill: {section}")
    return section
