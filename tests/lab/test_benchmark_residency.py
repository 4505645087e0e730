"""The benchmark of hits in caches: its loads, its figures and its ratios. vLLM and vllm-router are not needed."""

from __future__ import annotations

import numpy as np
from kit.rows import Row
from questions.residency.conversations import Shape, Told, conversations
from questions.residency.run import LONG_SHARE, RATIOS, figures, long_pass, mixed, rows_of, shared_pass

from llmserve.engines.timed.server import FakeEngine

SMALL = Shape(6, prefixes=2, prefix_chars=2_000, turns=3, think_s=0.0, begin_per_s=1e3)


async def test_conversations_find_their_own_turns_and_what_others_began_in_the_cache() -> None:
    async with FakeEngine(model="llmserve-demo", step_s=0, cache_words=100_000) as engine:
        load = conversations(SMALL, np.random.default_rng(1), "first")
        found = await shared_pass([engine.url], load)
        again = await shared_pass([engine.url], load)
        other = await shared_pass([engine.url], conversations(SMALL, np.random.default_rng(1), "second"))
    assert 0.5 < found["hit_rate"] < again["hit_rate"]
    assert other["hit_rate"] == found["hit_rate"], "a salt keeps a pass from the blocks of another one"


async def test_each_conversation_stays_with_one_of_several_urls() -> None:
    async with (
        FakeEngine(model="llmserve-demo", step_s=0, cache_words=100_000) as one,
        FakeEngine(model="llmserve-demo", step_s=0, cache_words=100_000) as two,
    ):
        await shared_pass([one.url, two.url], conversations(SMALL, np.random.default_rng(1), ""))
        assert len(one.bodies) == len(two.bodies) == 3 * SMALL.turns


async def test_a_few_prompts_have_the_length_of_the_context_and_times_of_their_own() -> None:
    texts = mixed(100, np.random.default_rng(2), "salt")
    async with FakeEngine(model="llmserve-demo", step_s=0) as engine:
        found = await long_pass(engine.url, texts, [0.0] * len(texts))
    assert sum(len(text) > 10_000 for text in texts) == 100 * LONG_SHARE
    assert set(RATIOS["long"]) <= set(found)


def test_hits_are_of_all_prompts_and_times_of_the_chats() -> None:
    chat, long = Told(1.0, 2.0, "", 10, 100, 50), Told(9.0, 9.0, "", 10, 900, 0, long=True)
    found = figures([chat, long], 2.0)
    assert (found["hit_rate"], found["first_s_mean"], found["long_first_s_mean"]) == (0.05, 1.0, 9.0)
    assert found["tokens_per_s"] == 10.0


def test_a_ratio_is_the_median_of_the_ratios_of_the_rounds() -> None:
    def passed(name: str, number: int, value: float) -> Row:
        return Row({"arrangement": name, "round": number}, dict.fromkeys(RATIOS["shared"], value))

    theirs = [passed("theirs", number, value) for number, value in enumerate((1.0, 10.0, 100.0))]
    ours = [passed("ours", number, value) for number, value in enumerate((0.5, 4.0, 90.0))]
    first, second = rows_of("shared", [*theirs, *ours])
    assert first.ratios["ours"]["hit_rate"] == 2.0
    assert second.ratios["theirs"]["hit_rate"] == 0.5
