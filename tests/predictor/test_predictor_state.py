"""The state of a learner: taken and given back, at once and in slices."""

import time
from itertools import islice

import numpy as np
import pytest
from msgspec.structs import replace

from predictor.memory import RecentlyUsed, keys_of
from predictor.online import OnlineLearner
from predictor.prediction import Prediction
from predictor.prompt import Prompt


def traffic(count: int, seed: int = 0, templates: int = 40):
    """Prompts, their predictions (for two of three), and the lengths of their answers."""
    draw = np.random.default_rng(seed)
    for number in range(count):
        template = int(draw.integers(templates))
        text = f"template {template} with some words, so that it is longer than thirty-two characters {number}"
        prompt = Prompt(text, f"model {template % 3}", "be brief" * (template % 2), stop=("X",) * (template % 5 == 0))
        raw = np.sort(draw.lognormal(4.0, 1.0, 15 if template % 4 else 1)).tolist() if template % 3 else None
        yield (
            prompt,
            None if raw is None else Prediction(raw),
            float(np.ceil(draw.lognormal(3.0 + template / 20, 0.3))),
            bool(draw.random() < 0.1),
        )


def teach(learner: OnlineLearner, count: int, seed: int = 0) -> None:
    for prompt, raw, tokens, capped in traffic(count, seed):
        learner.observe(learner.forecast(prompt, raw), tokens, capped)


@pytest.mark.parametrize("answers", [0, 1, 3, 17, 600])
def test_a_learner_that_is_restored_forecasts_and_learns_like_the_first(answers):
    first, second = OnlineLearner(secret=b"secret"), OnlineLearner(secret=b"another")
    teach(first, answers)
    second.restore(first.state())
    for prompt, raw, tokens, capped in traffic(300, seed=1):
        forecast, same = first.forecast(prompt, raw), second.forecast(prompt, raw)
        assert same == forecast
        first.observe(forecast, tokens, capped)
        second.observe(same, tokens, capped)


def test_a_memory_in_slices_may_be_saved_while_it_learns():
    """Here it learns of other models, and drops keys that nobody used for long."""
    twin, busy = OnlineLearner(keys_max=1_500), OnlineLearner(keys_max=1_500)
    teach(twin, 900)
    teach(busy, 900)
    saving, rest = busy.memory.saving(), traffic(2_000, seed=1)
    while True:
        for prompt, raw, tokens, capped in islice(rest, 40):
            prompt = replace(prompt, model=f"another {prompt.model}")
            busy.observe(busy.forecast(prompt, raw), tokens, capped)
        try:
            next(saving)
        except StopIteration as done:
            state = done.value
            break
    restored = OnlineLearner(keys_max=1_500).memory
    restored.restore(state)
    assert len(busy.memory) == 1_500
    for prompt, _, _, _ in traffic(100, seed=2):
        assert restored.judge(keys_of(prompt), None) == twin.memory.judge(keys_of(prompt), None)


def test_a_learner_of_fewer_keys_keeps_the_latest():
    first, second = OnlineLearner(), OnlineLearner(keys_max=2)
    for number in range(5):
        prompt = Prompt("the same words each time, that is, a template", system=f"application {number}")
        for _ in range(10):
            first.observe(first.forecast(prompt, None), 100.0 * (number + 1))
    second.restore(first.state())
    assert len(second.memory) == 2
    forecast = second.forecast(prompt, None)
    assert forecast.source == "memory"
    assert forecast.median == pytest.approx(500, rel=0.02)


@pytest.mark.parametrize("broken", ["secret", "recalibrations", "memory"])
def test_a_state_without_a_part_is_refused(broken):
    learner = OnlineLearner()
    teach(learner, 100)
    state = learner.state()
    del state[broken]
    with pytest.raises(ValueError, match=f"no '{broken}'"):
        OnlineLearner().restore(state)


@pytest.mark.parametrize("sizes", [{"lengths_per_key": 8}, {"window": 64}])
def test_a_state_of_other_sizes_is_refused(sizes):
    learner = OnlineLearner(**sizes)
    teach(learner, 100)
    with pytest.raises(ValueError, match="state"):
        OnlineLearner().restore(learner.state())


def test_numbers_that_contradict_each_other_are_refused():
    learner = OnlineLearner()
    teach(learner, 100)
    state = learner.state()
    state["memory"]["keys"][0]["numbers"][0, 1] = 33  # lengths of a key that holds 32
    with pytest.raises(ValueError, match="lengths that it does not hold"):
        OnlineLearner().restore(state)


def test_lengths_that_were_never_observed_are_not_in_the_state():
    """A new array holds whatever was in memory before."""
    learner = OnlineLearner()
    learner.observe(learner.forecast(Prompt("hello"), None), 7.0)
    (recent,) = learner.state()["memory"]["recent"]
    assert (recent["logs"][0, 1:] == 0).all()


def test_keys_with_different_secrets_have_nothing_in_common():
    prompt = Prompt("words of the prompt " * 10, "m", "s")
    with_secret, with_another, without = (set(keys_of(prompt, secret)) for secret in (b"a", b"b", b""))
    assert len(with_secret) == len(with_another) == len(without) == 5
    assert with_secret.isdisjoint(with_another)
    assert with_secret.isdisjoint(without)


def test_entries_come_back_in_the_order_of_their_use():
    recent, again = RecentlyUsed[str, list[int]](3, list), RecentlyUsed[str, list[int]](2, list)
    for key in "abcab":
        recent.used(key)
    assert [key for key, _ in recent.entries()] == ["c", "a", "b"]
    again.fill(recent.entries())
    assert [key for key, _ in again.entries()] == ["a", "b"]


def test_no_slice_takes_a_large_part_of_the_time_that_the_state_takes():
    """An event loop stands still for a slice. The least over some rounds, because the machine is shared."""
    learner = OnlineLearner()
    draw = np.random.default_rng(0)
    for number in range(12_000):
        prompt = Prompt(f"{number} words that nobody asks twice, more than thirty-two", f"model {number % 30}")
        learner.observe(learner.forecast(prompt, Prediction(draw.lognormal(4.0, 1.0, 15).tolist())), 10.0)
    assert len(learner.memory) == 10_000
    parts = []
    for _ in range(5):
        saving, slices_s = learner.saving(), []
        while True:
            began_s = time.thread_time()
            try:
                next(saving)
            except StopIteration:
                break
            slices_s.append(time.thread_time() - began_s)
        parts.append(max(slices_s) / sum(slices_s))
    assert min(parts) < 0.1
