"""What steps and interruptions of decoding cost, and from which answer length grouping loses.

K      slots
theta  slots of a group
alpha  fixed seconds of a step of decoding: chiefly reading the weights from memory
beta   seconds that a sequence adds to a step
a      seconds that decoding loses per interruption, in whatever number prompts come
b      seconds that decoding loses per prompt
m      mean tokens of an answer

While requests wait, slots empty one by one until theta are free: K - (theta - 1) / 2 sequences run in the mean. Of the
engine's time a request takes m / K_mean steps of alpha + beta K_mean seconds, its prompt's b, and a / theta.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from kit import client
from kit.results import straight_line
from scipy.optimize import brentq

from questions.grouped_refill.passes import ANSWER_S_MAX, random_prompt, stream

SEQUENCES = (1, 2, 4, 8, 16)
GROUPS = (1, 2, 4, 8)
PROMPT = 512  # tokens of each prompt here
TOKENS = 64  # of an answer: all answers overlap, even if a step has room for half a prompt only
DECODING = 4  # sequences that prompts interrupt
PROMPTS = 8  # that interrupt them, a measurement
STEPS_ALONE = 24


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds; see the legend. prompt_s : time that decoding lost per prompt, by the prompts that came at once"""

    step_s: dict[int, float]
    prompt_s: dict[int, float]

    @property
    def line(self) -> tuple[float, float]:
        """alpha and beta, by least squares."""
        slope, intercept, _ = straight_line(list(self.step_s), list(self.step_s.values()))
        return intercept, slope

    @property
    def interruption(self) -> tuple[float, float]:
        """a and b, by least squares."""
        groups = list(self.prompt_s)
        slope, intercept, _ = straight_line(groups, [size * self.prompt_s[size] for size in groups])
        return intercept, slope

    def request_s(self, slots: int, group: int, tokens: float) -> float:
        """The engine's time for a request while requests wait."""
        (alpha, beta), (a, b) = self.line, self.interruption
        running = slots - (group - 1) / 2
        return tokens * (alpha / running + beta) + b + a / group

    def interruption_for(self, gain: float, slots: int, group: int, tokens: float) -> float:
        """Seconds per interruption with which the group would have `gain` times the throughput of single slots.

        gain : below `group`, because a group saves at most all interruptions but one
        """
        a = self.interruption[0]
        single_s = self.request_s(slots, 1, tokens) - a
        group_s = self.request_s(slots, group, tokens) - a / group
        return (gain * group_s - single_s) / (1 - gain / group)

    def break_even_tokens(self, slots: int, group: int) -> float:
        """Mean tokens of answers above which the group loses against single slots; 0 where it always loses."""
        alpha, a = self.line[0], max(0.0, self.interruption[0])
        return (a - a / group) / (alpha / (slots - (group - 1) / 2) - alpha / slots)


def threshold_share(fixed_s: float, step_s: float, tokens: float) -> float:
    """Share of slots that must be free before EB refills: theta / (1 - theta) + ln(1 - theta) = fixed / (tokens step).

    fixed_s : of a phase of prompts.  step_s : fixed part of a step.  tokens : mean of an answer, geometric
    Source: Zhang et al., Threshold-Based Exclusive Batching (ICML 2026), Proposition 1.
    """
    wanted = max(0.0, fixed_s) / (tokens * step_s)
    return float(brentq(lambda share: share / (1 - share) + math.log(1 - share) - wanted, 0.0, 1 - 1e-9))


async def decoding_s(url: str, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Median time between tokens while all these answers, of so many tokens, are written."""
    times: list[list[float]] = [[] for _ in prompts]
    async with client.session_of(ANSWER_S_MAX) as session, asyncio.TaskGroup() as tasks:
        for prompt, own in zip(prompts, times, strict=True):
            tasks.create_task(stream(session, url, prompt, tokens, lambda _, own=own: own.append(time.perf_counter())))
    begin_s, end_s = max(own[0] for own in times), min(own[-1] for own in times)
    assert begin_s < end_s, "the answers do not overlap"
    gaps_s = [np.diff([at_s for at_s in own if begin_s <= at_s <= end_s]) for own in times]
    return float(np.median(np.concatenate(gaps_s)))


async def lost_s(url: str, prompts: Sequence[Sequence[int]], group: int) -> float:
    """Time per prompt that decoding loses, if the prompts come in groups of this size, one group after the other.

    The prompts' answers have one token, which comes with the last step of the prompt itself. The time of a step without
    prompts is measured directly before.
    """
    counts = [0] * DECODING
    warm, alone = asyncio.Event(), asyncio.Event()

    def count(place: int) -> None:
        counts[place] += 1
        for event, tokens in ((warm, 4), (alone, 4 + STEPS_ALONE)):
            if min(counts) >= tokens:
                event.set()

    async with client.session_of(ANSWER_S_MAX) as session:
        decoding = [
            asyncio.create_task(stream(session, url, prompts[place], 1000, lambda _, place=place: count(place)))
            for place in range(DECODING)
        ]
        await warm.wait()
        start = sum(counts), time.perf_counter()
        await alone.wait()
        begin = sum(counts), time.perf_counter()
        for first in range(0, len(prompts), group):
            await asyncio.gather(*(stream(session, url, prompt, 1) for prompt in prompts[first : first + group]))
        end = sum(counts), time.perf_counter()
        for task in decoding:
            task.cancel()
        await asyncio.gather(*decoding, return_exceptions=True)
    token_s = (begin[1] - start[1]) / (begin[0] - start[0])
    return (end[1] - begin[1] - (end[0] - begin[0]) * token_s) / len(prompts)


async def measured(url: str, vocabulary: int, repeats: int, rng: np.random.Generator) -> Costs:
    """Medians over the repeats."""

    def some(count: int) -> list[list[int]]:
        return [random_prompt(PROMPT, rng, vocabulary) for _ in range(count)]

    steps: dict[int, list[float]] = {count: [] for count in SEQUENCES}
    prompts: dict[int, list[float]] = {group: [] for group in GROUPS}
    for _ in range(repeats):
        for count, own in steps.items():
            own.append(await decoding_s(url, some(count), TOKENS))
        for group, own in prompts.items():
            own.append(await lost_s(url, some(PROMPTS), group))
    return Costs(
        {count: statistics.median(own) for count, own in steps.items()},
        {group: statistics.median(own) for group, own in prompts.items()},
    )
