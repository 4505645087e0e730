"""Passes: the requests of a pass, each sent at its time, and the numbers of the pass."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
from kit import client
from kit.rows import Row, median, ratio, select

from llmserve.wire.headers import PREDICTED_HEADER, SLO_HEADER
from questions.vllm.arrangements import Arrangement, baselines_of
from questions.vllm.loads import Floats, Ints, Load, ServiceTime

SLO_S, SLO_SERVICE_TIMES = 0.5, 5.0
SLO_BURST_S = 600.0  # longer than any request waits
ANSWER_S_MAX = 900.0  # a request without an answer for so long is lost


@dataclass(frozen=True, slots=True)
class Question:
    """A request of a pass. whole : its answer comes as a whole, not as a stream"""

    body: bytes
    headers: Mapping[str, str]
    arrival_s: float = 0.0
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a request.

    first_s, latency_s : seconds after arrival, to the first token and to the end; the same for a whole answer.
    tokens : 0 if the request failed
    engine_s : that the engine itself has taken for prompt and answer, without waiting; nan: only llama.cpp says it
    """

    arrival_s: float
    first_s: float
    latency_s: float
    tokens: int
    failure: str | None = None
    engine_s: float = math.nan


def streamed(prompt: str, **more: Any) -> bytes:
    """The body of a streaming request. max_tokens is absent, because it would tell llmserve the length."""
    return json.dumps(client.body_of(prompt, stream=True, stream_options={"include_usage": True}, **more)).encode()


def question_of(prompt: str, arrival_s: float = 0.0, *, whole: bool = False, tokens: int | None = None) -> Question:
    """tokens : the prediction of the answer's length; None: the request has none"""
    body = json.dumps(client.body_of(prompt)).encode() if whole else streamed(prompt)
    return Question(body, {} if tokens is None else {PREDICTED_HEADER: str(tokens)}, arrival_s, whole)


def questions_of(arrangement: Arrangement, load: Load, service: ServiceTime, *, burst: bool) -> list[Question]:
    """burst : give edf long deadlines, computed from the predictions"""
    predictions = None if arrangement.predictions is None else load.predictions[arrangement.predictions]
    slos_s = SLO_S + SLO_SERVICE_TIMES * service(load.tokens)
    if burst and predictions is not None:
        slos_s = SLO_BURST_S + SLO_SERVICE_TIMES * service(predictions)
    questions = []
    for index, prompt in enumerate(load.prompts):
        headers: dict[str, str] = {}
        priority: dict[str, int] = {}
        if predictions is not None and arrangement.way == "priority":
            priority["priority"] = int(predictions[index])
        elif predictions is not None:
            headers[PREDICTED_HEADER] = str(predictions[index])
        if arrangement.way == "edf":
            headers[SLO_HEADER] = f"{1e3 * slos_s[index]:.0f}"
        questions.append(Question(streamed(prompt, **priority), headers, float(load.arrivals_s[index])))
    return questions


USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
TIMINGS = re.compile(rb'"prompt_ms": ?([\d.]+).*?"predicted_ms": ?([\d.]+)')
TAIL_BYTES = 1024  # contain the usage event and all later events


async def ask(session: aiohttp.ClientSession, url: str, question: Question, due_s: float) -> Outcome:
    """due_s : due time of the request on the clock of perf_counter, from which all times are counted"""
    first_token = client.FirstToken(due_s)
    reply = await client.ask(session, url, question.body, question.headers, on_chunk=first_token)
    latency_s = time.perf_counter() - due_s
    tail = reply.body[-TAIL_BYTES:]
    usage = USAGE.search(tail)
    failure = reply.error or None
    if reply.status not in (0, 200):
        failure = f"{reply.status} {code_of(reply.body)}"
    elif failure is None and (usage is None or not (question.whole or b"data: [DONE]" in tail)):
        failure = "the answer ended too early"
    if failure is not None or usage is None:
        return Outcome(question.arrival_s, math.nan, latency_s, 0, failure)
    first_s = latency_s if question.whole else first_token.seconds
    told = TIMINGS.search(tail)
    engine_s = (float(told[1]) + float(told[2])) / 1e3 if told is not None else math.nan
    return Outcome(question.arrival_s, first_s, latency_s, int(usage[1]), engine_s=engine_s)


def session_of() -> aiohttp.ClientSession:
    return client.session_of(ANSWER_S_MAX, connections_kept=False)


def code_of(body: bytes) -> str:
    """The code (or type) of an error in OpenAI's format; "unclear" for any other body."""
    try:
        error = json.loads(body)["error"]
        return str(error.get("code") or error["type"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return "unclear"


async def send(urls: Sequence[str], questions: Sequence[Question]) -> list[Outcome]:
    """Send each question at its time to the URL at the same index."""
    async with session_of() as session:
        return await client.at_their_times(
            [question.arrival_s for question in questions],
            lambda index, due_s: ask(session, urls[index], questions[index], due_s),
        )


def all_at_once(prompts: Sequence[str]) -> list[Question]:
    return [question_of(prompt) for prompt in prompts]


def shares(tokens: Ints, count: int) -> list[int]:
    """For each request the index of its server, of `count`, so that all servers get about as many tokens."""
    totals = [0] * count
    placed = [0] * tokens.size
    for index in np.argsort(-tokens, kind="stable"):
        placed[index] = int(np.argmin(totals))
        totals[placed[index]] += int(tokens[index])
    return placed


def saturated_tokens_per_s(began_s: Floats, ended_s: Floats, tokens: Ints) -> float:
    """Tokens per second until the last answer began, that is, while requests waited. Times start at the first arrival.

    The makespan of a burst also contains the time in which slots run empty, which is longest if the longest answers
    come last. Under steady arrivals that time is not lost. The tokens of an answer are assumed to come evenly.
    """
    until_s = began_s.max()
    shares = np.clip((until_s - began_s) / np.maximum(ended_s - began_s, 1e-9), 0.0, 1.0)
    return float((shares * tokens).sum() / until_s)


def summary(outcomes: Sequence[Outcome], load: Load, service: ServiceTime) -> dict[str, float]:
    """The numbers of one pass. Latencies and slow-downs count answered requests, deadlines_met counts all requests.

    tokens_per_s  from the first arrival to the end of the last answer
    dropped       requests refused with 504
    failed        other requests without an answer
    other_length  answers with another length than in the first pass

    Raises RuntimeError when no request was answered.
    """
    answered = [(index, outcome) for index, outcome in enumerate(outcomes) if outcome.failure is None]
    if not answered:
        raise RuntimeError(f"no request was answered; the first failure: {outcomes[0].failure}")
    tokens = np.array([outcome.tokens for _, outcome in answered])
    first_s = np.array([outcome.first_s for _, outcome in answered])
    latency_s = np.array([outcome.latency_s for _, outcome in answered])
    expected = load.tokens[[index for index, _ in answered]]
    service_s = service(expected)
    slowdown = latency_s / service_s
    dropped = sum((outcome.failure or "").startswith("504 ") for outcome in outcomes)
    since_s = np.array([o.arrival_s for _, o in answered]) - min(o.arrival_s for o in outcomes)
    numbers = {
        "tokens_per_s": tokens.sum() / (since_s + latency_s).max(),
        "tokens_per_s_saturated": saturated_tokens_per_s(since_s + first_s, since_s + latency_s, tokens),
        **_spread("first_token_s", first_s, (50, 95)),
        **_spread("latency_s", latency_s, (50, 95, 99)),
        **_spread("slowdown", slowdown, (95,)),
        "deadlines_met": (latency_s <= SLO_S + SLO_SERVICE_TIMES * service_s).sum() / len(outcomes),
        "dropped": dropped,
        "failed": len(outcomes) - len(answered) - dropped,
        "other_length": (tokens != expected).sum(),
    }
    return {name: float(value) for name, value in numbers.items()}


def _spread(name: str, values: Floats, percents: Sequence[int]) -> dict[str, float]:
    return {f"{name}_mean": values.mean(), **{f"{name}_p{q}": np.percentile(values, q) for q in percents}}


RATIOS = (
    "tokens_per_s",
    "tokens_per_s_saturated",
    "tokens_per_step",
    "first_token_s_mean",
    "latency_s_mean",
    "latency_s_p95",
    "latency_s_p99",
    "slowdown_mean",
)


CASE = ("arrangement", "way", "predictions", "bins")


def rows(arrangements: Sequence[Arrangement], passes: Sequence[Row]) -> list[Row]:
    """A row for each arrangement: medians over the rounds, and ratios to its baselines.

    passes : rows of the case (arrangement, round)
    """
    names = [arrangement.name for arrangement in arrangements]
    by_name = {name: select(passes, arrangement=name) for name in names}
    return [
        Row(
            dict(zip(CASE, (name, arrangement.way, arrangement.predictions, arrangement.bins), strict=True)),
            {number: round(median(by_name[name], number), 5) for number in by_name[name][0].numbers},
            {
                label: {
                    number: round(ratio(by_name[name], by_name[base], number, "round"), 4)
                    for number in RATIOS
                    if number in by_name[name][0].numbers
                }
                for label, base in baselines_of(arrangement, names).items()
            },
        )
        for name, arrangement in zip(names, arrangements, strict=True)
    ]
