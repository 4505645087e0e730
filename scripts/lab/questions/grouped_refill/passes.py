"""Loads, and the passes that send them to an engine whose slots are handed over in groups."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import aiohttp
import numpy as np
from kit import client
from kit.client import MODEL, get_text
from scipy.stats import geom

from questions.grouped_refill.slots import GroupedSlots
from questions.vllm.loads import Floats, Ints, poisson_arrivals_s

PROMPT_TOKENS = (256, 1024)
SPECIAL_TOKENS = 16  # at most: the tokenizer's first ids
TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
STEPS = re.compile(r'^vllm:iteration_tokens_total_bucket\{.*le="(16\.0|\+Inf)".*\} (\S+)$', re.M)
ANSWER_S_MAX = 300.0


@dataclass(frozen=True)
class Load:
    """Requests in their order of arrival. prompts : token ids.  tokens : of the answers"""

    prompts: list[list[int]]
    tokens: Ints
    arrivals_s: Floats

    def at_poisson_times(self, rate_per_s: float, rng: np.random.Generator) -> Load:
        return replace(self, arrivals_s=poisson_arrivals_s(self.tokens.size, rate_per_s, rng))


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds since time 0 of the load. handed_over_s : the same for all requests of a group"""

    tokens: int
    arrival_s: float
    handed_over_s: float
    first_s: float
    end_s: float


def burst(count: int, tokens_mean: int, rng: np.random.Generator, vocabulary: int) -> Load:
    """All requests at once. Prompts are random token ids of the tokenizer's ordinary tokens.

    Prompts' lengths are log-uniform, answers' lengths geometric (as in the paper's model). Every load has the same
    lengths, namely equally likely quantiles, in random order: all loads are equally large.
    """
    quantiles = (np.arange(count) + 0.5) / count
    low, high = PROMPT_TOKENS
    prompt_tokens = rng.permutation((low * (high / low) ** quantiles).round().astype(int))
    tokens = rng.permutation(geom.ppf(quantiles, 1 / tokens_mean).astype(int))
    prompts = [random_prompt(int(length), rng, vocabulary) for length in prompt_tokens]
    return Load(prompts, tokens, np.zeros(count))


def random_prompt(tokens: int, rng: np.random.Generator, vocabulary: int) -> list[int]:
    ids: list[int] = rng.integers(SPECIAL_TOKENS, vocabulary, tokens).tolist()
    return ids


async def stream(
    session: aiohttp.ClientSession,
    url: str,
    prompt: Sequence[int],
    tokens: int,
    on_chunk: Callable[[bytes], None] = lambda chunk: None,
) -> None:
    """Stream an answer of exactly so many tokens. Raises AssertionError when the answer has another length."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    reply = await client.ask(session, url, body, path="/v1/completions", on_chunk=on_chunk)
    usage = TOKENS.findall(reply.body)
    assert reply.status == 200, f"{reply.status} {reply.error}{reply.body[-500:].decode(errors='replace')}"
    assert usage, "the stream ended too early"
    assert int(usage[-1]) == tokens


async def one_pass(url: str, load: Load, slots: GroupedSlots) -> list[Answer]:
    """Send each request when it has arrived and gets a slot. Raises an ExceptionGroup when a request fails."""
    answers: dict[int, Answer] = {}
    async with client.session_of(ANSWER_S_MAX, connections_kept=False) as session, asyncio.TaskGroup() as tasks:
        begin_s = time.perf_counter()

        def hand_over(requests: Sequence[int]) -> None:
            now_s = time.perf_counter() - begin_s
            for index in requests:
                tasks.create_task(serve(index, now_s))

        async def serve(index: int, handed_over_s: float) -> None:
            first_s = 0.0

            def on_chunk(chunk: bytes) -> None:
                nonlocal first_s
                first_s = first_s or time.perf_counter() - begin_s

            tokens = int(load.tokens[index])
            await stream(session, url, load.prompts[index], tokens, on_chunk)
            end_s = time.perf_counter() - begin_s
            answers[index] = Answer(tokens, float(load.arrivals_s[index]), handed_over_s, first_s, end_s)
            hand_over(slots.ended())

        for at_s, arrived in itertools.groupby(
            range(load.tokens.size), key=lambda index: float(load.arrivals_s[index])
        ):
            await asyncio.sleep(max(0.0, begin_s + at_s - time.perf_counter()))
            hand_over(slots.arrived(*arrived))
    return [answers[index] for index in range(load.tokens.size)]


async def steps(url: str) -> tuple[float, float]:
    """Steps of the engine so far: all, and those with more than 16 tokens, which contain part of a prompt."""
    async with client.session_of() as session:
        counts = {bound: float(count) for bound, count in STEPS.findall(await get_text(session, f"{url}/metrics"))}
    return (counts["+Inf"], counts["+Inf"] - counts["16.0"]) if counts else (0.0, 0.0)


def summary(answers: Sequence[Answer], slots: int) -> dict[str, float]:
    """The numbers of a pass.

    tokens_per_s            from the first arrival to the last end; the work is the same for each group
    tokens_per_s_saturated  from the first refill to the last, that is, without the time in which slots run empty
    token_s_mean            between the tokens of an answer
    """
    tokens, arrival_s, handed_over_s, first_s, end_s = np.array(
        [(a.tokens, a.arrival_s, a.handed_over_s, a.first_s, a.end_s) for a in answers]
    ).T
    latency_s, several = end_s - arrival_s, tokens > 1
    order = np.sort(handed_over_s)
    begin_s, until_s = order[slots], order[-1]
    refills = (handed_over_s >= begin_s) & (handed_over_s < until_s)
    numbers = {
        "tokens_per_s": tokens.sum() / (end_s.max() - arrival_s.min()),
        "tokens_per_s_saturated": tokens[refills].sum() / (until_s - begin_s),
        "requests_per_s_saturated": refills.sum() / (until_s - begin_s),
        "latency_s_mean": latency_s.mean(),
        "latency_s_p99": np.percentile(latency_s, 99),
        "first_token_s_mean": (first_s - arrival_s).mean(),
        "token_s_mean": ((end_s - first_s)[several] / (tokens[several] - 1)).mean(),
    }
    return {name: float(value) for name, value in numbers.items()}
