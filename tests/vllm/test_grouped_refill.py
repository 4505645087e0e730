"""Slots of vLLM that are handed over in groups, as scripts/lab/questions/grouped_refill/run.py does."""

from __future__ import annotations

import numpy as np
import pytest
from questions.grouped_refill import passes
from questions.grouped_refill.slots import GroupedSlots

SLOTS = 4
TOKENS = np.array([6 + 7 * (index % 4) for index in range(20)])  # single slots get free one by one


@pytest.mark.vllm
async def test_prompts_in_groups_interrupt_decoding_less_often(vllm_url: str) -> None:
    rng = np.random.default_rng(4)
    interruptions = {}
    for group in (1, SLOTS):
        prompts = [passes.random_prompt(100, rng, 1800) for _ in TOKENS]  # new ones: vLLM keeps prefixes
        before = await passes.steps(vllm_url)
        answers = await passes.one_pass(
            vllm_url, passes.Load(prompts, TOKENS, 0.0 * TOKENS), GroupedSlots(SLOTS, group)
        )
        assert [answer.tokens for answer in answers] == list(TOKENS)
        interruptions[group] = (await passes.steps(vllm_url))[1] - before[1]
    assert 0 < interruptions[SLOTS] < interruptions[1]
