"""The benchmark of the simulator beside the real vLLM: its fit, and its simulated half."""

from __future__ import annotations

import numpy as np
import pytest
from questions.simulated import shared, warm
from questions.simulated.fit import Answer, fitted
from questions.simulated.long import SETTINGS, passed
from questions.simulated.run import FIGURES, conversations, costs_record, simulated

from llmserve.simulation.engine_model import Costs

COSTS = Costs(
    [0.003 + 0.0003 * count for count in range(9)],
    [0.0] * 9,
    0.004,
    prefill_s_per_token=4e-5,
    metered=False,
    prefill_s_per_context_token=1e-8,
    step_s_per_context_token=1e-7,
)


def streams(steps: int) -> list[Answer]:
    """Streams of 40 tokens from an engine of these costs, at most eight at once, with prompts in one step each."""
    rng = np.random.default_rng(0)
    now_s, running, ended = 0.0, list[Answer](), list[Answer]()
    for _ in range(steps):
        fresh = None
        if len(running) < 8 and rng.random() < 0.2:
            prompt_tokens = int(rng.integers(200, 1500))
            fresh = Answer(now_s, prompt_tokens, int(rng.integers(prompt_tokens // 32)) * 32)
        contexts = sum(answer.prompt_tokens + len(answer.times_s) for answer in running)
        now_s += COSTS.step_s[len(running)] + COSTS.step_s_per_context_token * contexts
        if fresh is not None:
            now_s += COSTS.prompt_s(fresh.cached_tokens, fresh.prompt_tokens - fresh.cached_tokens, True)
            running.append(fresh)
        for answer in running:
            answer.times_s.append(now_s)
        ended += [answer for answer in running if len(answer.times_s) == 40]
        running = [answer for answer in running if len(answer.times_s) < 40]
    return ended


def test_the_costs_of_an_engine_are_found_from_the_times_of_its_tokens() -> None:
    found = fitted([streams(3_000)], 8)
    assert found.step_s[4] == pytest.approx(COSTS.step_s[4], rel=0.05)
    for name in ("prefill_s", "prefill_s_per_token", "prefill_s_per_context_token", "step_s_per_context_token"):
        assert getattr(found, name) == pytest.approx(getattr(COSTS, name), rel=0.1)
    assert costs_record(found)["prefill_s"] == found.prefill_s


def test_conversations_find_more_in_a_larger_cache() -> None:
    sessions = conversations(200, 20.0, np.random.default_rng(1))
    small, large = (simulated(sessions, COSTS, blocks) for blocks in (150, 2_000))
    assert tuple(small) == FIGURES
    assert small["hit_rate"] < large["hit_rate"] - 0.05
    assert small["latency_s_mean"] > large["latency_s_mean"]


def test_the_work_is_the_same_in_front_of_the_engine_and_chats_wait_no_longer_for_it() -> None:
    direct, boost = (passed(SETTINGS["CPU"], way, 600, 2) for way in ("direct", "boost"))
    assert boost["tokens_per_s"] == pytest.approx(direct["tokens_per_s"], rel=0.01)
    assert boost["first_s_mean"] < direct["first_s_mean"]
    assert min(boost["long_first_s_mean"], direct["long_first_s_mean"]) > 5.0, "of which a long prompt takes five"


def test_where_slots_run_out_more_is_found_in_caches_by_those_who_wait_for_the_engine_that_has_their_prompt() -> None:
    anywhere, ours = (warm.passed(warm.TALKS["CPU"], way, 100, 5.0, 1) for way in (warm.ANY, warm.OURS))
    assert ours["hit_rate"] > anywhere["hit_rate"]
    assert ours["first_s_mean"] < anywhere["first_s_mean"]


def test_chats_that_share_a_system_prompt_need_the_cache_once_for_it() -> None:
    whole, ours = (shared.passed(way, 80, 1.5, 1) for way in (shared.WHOLE, shared.OURS))
    assert ours["first_s_mean"] < 0.5 * whole["first_s_mean"]
    assert ours["latency_s_mean"] < whole["latency_s_mean"]
