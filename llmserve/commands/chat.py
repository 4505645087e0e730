"""Talk to a model of a running server, in the terminal.

    llmserve chat                                       with the first model of http://127.0.0.1:8000; Ctrl-D ends it
    llmserve chat "Count from 1 to 20."                 one question
    llmserve chat --model NAME --key-file FILE          the first key of FILE is sent

While a question waits, its place in the queue is shown. Ctrl-C stops an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import sys
from collections.abc import AsyncIterator, Iterator

import msgspec

from llmserve.commands import asking
from llmserve.errors import ConfigError, NoAnswer
from llmserve.http.client import HttpClient
from llmserve.http.connecting import HttpError

PATH = "/v1/chat/completions"


class Model(msgspec.Struct):
    id: str


class Models(msgspec.Struct):
    data: list[Model]


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct):
    delta: Delta = msgspec.field(default_factory=Delta)


class Told(msgspec.Struct):
    message: str = ""


class Chunk(msgspec.Struct):
    """What is read of a stream's event."""

    choices: list[Choice] = []
    error: Told | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("question", nargs="?", metavar="QUESTION", help="one question; without it, a conversation")
    asking.add_server(parser)
    parser.add_argument("--model", metavar="NAME", help="the model (default: the first that the server has)")


def main(args: argparse.Namespace) -> int:
    key = asking.key_of(args)
    model = args.model or first_model(args.url, key)
    messages: list[dict[str, str]] = []
    questions = [args.question] if args.question is not None else typed(model)
    for question in questions:
        messages.append({"role": "user", "content": question})
        with contextlib.suppress(KeyboardInterrupt):
            messages.append({"role": "assistant", "content": asyncio.run(answered(args.url, key, model, messages))})
        print()
    return 0


def first_model(url: str, key: str | None) -> str:
    body = asking.ask(url, "/v1/models", key, asking.NEEDS_KEY)
    try:
        models = msgspec.json.decode(body, type=Models).data
    except msgspec.MsgspecError as error:
        raise NoAnswer(f"{url} lists no models: {error}") from error
    if not models:
        raise NoAnswer(f"{url} has no model: no engine of it has been up")
    return models[0].id


def typed(model: str) -> Iterator[str]:
    """The questions that are typed, until the end of the input."""
    if sys.stdin.isatty():
        print(f"{model}; Ctrl-D ends the conversation", file=sys.stderr)
    while True:
        try:
            question = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            return
        if question.strip():
            yield question


async def answered(url: str, key: str | None, model: str, messages: list[dict[str, str]]) -> str:
    """Print the answer as it comes, and return it. Raises ConfigError and NoAnswer."""
    parts = []
    async for text in streamed(url, key, model, messages):
        print(text, end="", flush=True)
        parts.append(text)
    return "".join(parts)


async def streamed(url: str, key: str | None, model: str, messages: list[dict[str, str]]) -> AsyncIterator[str]:
    body = msgspec.json.encode({"model": model, "messages": messages, "stream": True})
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    place = asking.Place()
    try:
        base = url.rstrip("/").removesuffix("/v1")
        async with HttpClient(base, connect_s=asking.ANSWER_S, idle_s=math.inf, answer_s=math.inf) as client:
            response = await client.request(client.opening("POST", PATH, headers), body)
            if response.status != 200:
                told = (await response.read(1 << 20)).decode(errors="replace")
                raise (ConfigError if response.status == 401 else NoAnswer)(f"{url}: {message_of(told)}")
            rest = b""
            while data := await response.next_bytes():
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if line.startswith(b":"):
                        place.show(line[1:].strip().decode(errors="replace"))
                    elif line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                        chunk = msgspec.json.decode(line[5:], type=Chunk)
                        if chunk.error is not None:
                            raise NoAnswer(f"{url}: {chunk.error.message}")
                        for choice in chunk.choices:
                            if text := (choice.delta.reasoning_content or "") + (choice.delta.content or ""):
                                place.clear()
                                yield text
    except (HttpError, ValueError) as error:
        raise NoAnswer(f"{url} does not answer: {error}") from error
    finally:
        place.clear()


def message_of(body: str) -> str:
    """What an error's body says, for people."""
    try:
        return msgspec.json.decode(body, type=dict[str, Told])["error"].message
    except (msgspec.MsgspecError, KeyError):
        return body[: asking.TOLD_BYTES_MAX]
