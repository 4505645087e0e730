"""Passes: what is asked, each request at its time, and what a pass has shown."""

from __future__ import annotations

import json
import math
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import aiohttp
import numpy as np
from bench import client
from bench.results import median_of

from llmserve.headers import PREDICTED_HEADER, SLO_HEADER
from on_vllm.arrangements import Arrangement, baselines_of
from on_vllm.loads import Floats, Ints, Load, ServiceTime

SLO_S, SLO_SERVICE_TIMES = 0.5, 5.0
SLO_BURST_S = 600.0  # nothing waits so long
ANSWER_S_MAX = 900.0  # a request without an answer for so long is lost


@dataclass(frozen=True, slots=True)
class Question:
    body: bytes
    headers: Mapping[str, str]
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request. Times are seconds after its arrival; tokens is 0 and failure is said when it failed."""

    arrival_s: float
    first_s: float
    latency_s: float
    tokens: int
    failure: str | None = None


def streamed(prompt: str, **more: Any) -> bytes:
    """A question's body. No max_tokens: it would tell llmserve the length."""
    return json.dumps(client.body_of(prompt, stream=True, stream_options={"include_usage": True}, **more)).encode()


def questions_of(arrangement: Arrangement, load: Load, service: ServiceTime, *, burst: bool) -> list[Question]:
    """burst: edf's deadlines are long, and come from the predictions."""
    told = None if arrangement.predictions is None else load.told[arrangement.predictions]
    slos_s = SLO_S + SLO_SERVICE_TIMES * service(load.tokens)
    if burst and told is not None:
        slos_s = SLO_BURST_S + SLO_SERVICE_TIMES * service(told)
    questions = []
    for index, prompt in enumerate(load.prompts):
        headers: dict[str, str] = {}
        priority: dict[str, int] = {}
        if told is not None and arrangement.way == "priority":
            priority["priority"] = int(told[index])
        elif told is not None:
            headers[PREDICTED_HEADER] = str(told[index])
        if arrangement.way == "edf":
            headers[SLO_HEADER] = f"{1e3 * slos_s[index]:.0f}"
        questions.append(Question(streamed(prompt, **priority), headers, float(load.arrivals_s[index])))
    return questions


USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
TAIL_BYTES = 1024  # hold the usage event and what follows it


async def ask(session: aiohttp.ClientSession, url: str, question: Question, due_s: float) -> Outcome:
    """due_s: when it should have been sent, on the clock of perf_counter; everything is counted from then."""
    head, first_s = b"", 0.0

    def on_chunk(chunk: bytes) -> None:
        nonlocal head, first_s
        if not first_s:  # the first event only opens the answer
            head += chunk
            if head.count(b"data: ") > 1:
                first_s = time.perf_counter() - due_s

    reply = await client.ask(session, url, question.body, question.headers, on_chunk=on_chunk)
    latency_s = time.perf_counter() - due_s
    tail = reply.body[-TAIL_BYTES:]
    usage = USAGE.search(tail)
    failure = reply.error or None
    if reply.status not in (0, 200):
        failure = f"{reply.status} {code_of(reply.body)}"
    elif failure is None and (usage is None or b"data: [DONE]" not in tail):
        failure = "the stream ended too early"
    if failure is not None or usage is None:
        return Outcome(question.arrival_s, math.nan, latency_s, 0, failure)
    return Outcome(question.arrival_s, first_s, latency_s, int(usage[1]))


def session_of() -> aiohttp.ClientSession:
    return client.session_of(ANSWER_S_MAX, connections_kept=False)


def code_of(body: bytes) -> str:
    """The code (or type) of an error in OpenAI's shape; "unclear" for anything else."""
    try:
        error = json.loads(body)["error"]
        return str(error.get("code") or error["type"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return "unclear"


async def send(urls: Sequence[str], questions: Sequence[Question]) -> list[Outcome]:
    """Ask each question at its time, at the URL beside it."""
    async with session_of() as session:
        return await client.at_their_times(
            [question.arrival_s for question in questions],
            lambda index, due_s: ask(session, urls[index], questions[index], due_s),
        )


def all_at_once(prompts: Sequence[str]) -> list[Question]:
    return [Question(streamed(prompt), {}) for prompt in prompts]


def shares(tokens: Ints, count: int) -> list[int]:
    """For each request which of `count` servers gets it, so that all get about the same number of tokens."""
    totals = [0] * count
    placed = [0] * tokens.size
    for index in np.argsort(-tokens, kind="stable"):
        placed[index] = int(np.argmin(totals))
        totals[placed[index]] += int(tokens[index])
    return placed


def saturated_tokens_per_s(began_s: Floats, ended_s: Floats, tokens: Ints) -> float:
    """Tokens per second until the last answer began, that is, while something waited. Seconds after the first arrival.

    A burst's makespan also holds the time in which slots run empty: with the longest answers last that is the longest,
    although none of it is lost where requests keep coming. An answer's tokens are taken to come evenly.
    """
    until_s = began_s.max()
    shares = np.clip((until_s - began_s) / np.maximum(ended_s - began_s, 1e-9), 0.0, 1.0)
    return float((shares * tokens).sum() / until_s)


def summary(outcomes: Sequence[Outcome], load: Load, service: ServiceTime) -> dict[str, float]:
    """Of one pass. Latencies and slow-downs are of answered requests, deadlines_met of all.

    tokens_per_s: from the first arrival to the end of the last answer. dropped: refused with 504; failed: any other
    way of not being answered. other_length: answered with another length than in the first pass. Raises RuntimeError
    when no request was answered.
    """
    answered = [(index, outcome) for index, outcome in enumerate(outcomes) if outcome.failure is None]
    if not answered:
        raise RuntimeError(f"no request was answered; the first says: {outcomes[0].failure}")
    tokens = np.array([outcome.tokens for _, outcome in answered])
    first_s = np.array([outcome.first_s for _, outcome in answered])
    latency_s = np.array([outcome.latency_s for _, outcome in answered])
    wanted = load.tokens[[index for index, _ in answered]]
    taken_s = service(wanted)
    slowdown = latency_s / taken_s
    dropped = sum((outcome.failure or "").startswith("504 ") for outcome in outcomes)
    since_s = np.array([o.arrival_s for _, o in answered]) - min(o.arrival_s for o in outcomes)
    found = {
        "tokens_per_s": tokens.sum() / (since_s + latency_s).max(),
        "tokens_per_s_saturated": saturated_tokens_per_s(since_s + first_s, since_s + latency_s, tokens),
        **_spread("first_token_s", first_s, (50, 95)),
        **_spread("latency_s", latency_s, (50, 95, 99)),
        **_spread("slowdown", slowdown, (95,)),
        "deadlines_met": (latency_s <= SLO_S + SLO_SERVICE_TIMES * taken_s).sum() / len(outcomes),
        "dropped": dropped,
        "failed": len(outcomes) - len(answered) - dropped,
        "other_length": (tokens != wanted).sum(),
    }
    return {name: float(value) for name, value in found.items()}


def _spread(name: str, values: Floats, percents: Sequence[int]) -> dict[str, float]:
    return {f"{name}_mean": values.mean(), **{f"{name}_p{q}": np.percentile(values, q) for q in percents}}


RATIOS = (
    "tokens_per_s",
    "tokens_per_s_saturated",
    "first_token_s_mean",
    "latency_s_mean",
    "latency_s_p95",
    "latency_s_p99",
    "slowdown_mean",
)


def rows(arrangements: Sequence[Arrangement], rounds: Mapping[str, Sequence[dict[str, float]]]) -> list[dict[str, Any]]:
    """Medians over the rounds; ratios round by round, then their median: a machine that slows down slows both sides."""
    made = []
    for arrangement in arrangements:
        these = rounds[arrangement.name]
        row: dict[str, Any] = {
            "arrangement": arrangement.name,
            "way": arrangement.way,
            "predictions": arrangement.predictions,
            "bins": arrangement.bins,
        }
        row |= {name: round(median_of(these, itemgetter(name)), 5) for name in these[0]}
        row["ratios"] = {
            label: {
                name: round(statistics.median(a[name] / b[name] for a, b in zip(these, rounds[base], strict=True)), 4)
                for name in RATIOS
            }
            for label, base in baselines_of(arrangement, list(rounds)).items()
        }
        made.append(row)
    return made
