"""Grouped refill: when slots are handed over, the passes, and the costs. No vLLM is needed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.client import MODEL
from kit.rows import Row
from questions.grouped_refill import costs, passes, report
from questions.grouped_refill import run as benchmark
from questions.grouped_refill.costs import Costs
from questions.grouped_refill.slots import GroupedSlots

from llmserve.engines.timed.server import FakeEngine

# ---- when slots are handed over -----------------------------------------------------------------------------------


def test_single_slots_are_refilled_as_soon_as_they_are_free():
    slots = GroupedSlots(2, group=1)
    assert slots.arrived(0, 1, 2, 3) == [0, 1]
    assert slots.ended() == [2]
    assert slots.ended() == [3]


def test_freed_slots_wait_until_the_group_is_free():
    slots = GroupedSlots(4, group=2)
    assert slots.arrived(*range(8)) == [0, 1, 2, 3]
    assert slots.ended() == []
    assert slots.ended() == [4, 5]
    assert slots.ended() == []
    assert slots.ended() == [6, 7]


def test_all_free_slots_are_handed_over_not_only_those_of_the_group():
    slots = GroupedSlots(8, group=2)
    assert slots.arrived(0) == [0]
    assert slots.arrived(1, 2, 3, 4, 5) == [1, 2, 3, 4, 5]


def test_fewer_waiting_requests_need_fewer_free_slots():
    slots = GroupedSlots(4, group=4)
    assert slots.arrived(*range(6)) == [0, 1, 2, 3]
    assert slots.ended() == []
    assert slots.ended() == [4, 5], "as many slots are free as requests wait"
    assert slots.arrived(6) == []
    assert slots.ended() == [6], "alone, it waits for no group"


@given(
    count=st.integers(1, 9),
    share=st.floats(0, 1),
    moves=st.lists(st.integers(0, 4), max_size=80),  # 0: a request ends; else so many arrive
)
def test_every_request_is_sent_once_in_order_and_never_beyond_the_slots(count: int, share: float, moves: list[int]):
    group = 1 + int(share * (count - 1))
    slots, sent, arrived, ended = GroupedSlots(count, group), [], 0, 0

    def move(arriving: int) -> None:
        nonlocal arrived, ended
        waiting, free = len(slots.waiting) + arriving, count - slots.running + (not arriving)
        if arriving:
            sent.extend(new := slots.arrived(*range(arrived, arrived + arriving)))
        else:
            sent.extend(new := slots.ended())
        arrived, ended = arrived + arriving, ended + (not arriving)
        assert len(new) == (min(free, waiting) if free >= min(group, waiting) else 0)
        assert slots.running == len(sent) - ended <= count

    for arriving in moves:
        if arriving or slots.running:
            move(arriving)
    while slots.running:
        move(0)
    assert sent == list(range(arrived)), "no request waits for ever"


# ---- passes -------------------------------------------------------------------------------------------------------


def load_of(*tokens: int, arrivals_s: tuple[float, ...] | None = None) -> passes.Load:
    times = np.zeros(len(tokens)) if arrivals_s is None else np.array(arrivals_s)
    return passes.Load([[20 + index] for index in range(len(tokens))], np.array(tokens), times)


async def test_an_engine_gets_requests_in_groups():
    """Of four running answers the two short ones end first: the fifth request waits for both."""
    load = load_of(2, 10, 40, 60, 2, 2)
    async with FakeEngine(model=MODEL, slots=4, step_s=0.005) as engine:
        single = await passes.one_pass(engine.url, load, GroupedSlots(4, 1))
        grouped = await passes.one_pass(engine.url, load, GroupedSlots(4, 2))
        assert engine.running_max == 4
    assert [answer.tokens for answer in grouped] == list(load.tokens)
    assert single[0].end_s <= single[4].handed_over_s < single[1].end_s
    assert grouped[1].end_s <= grouped[4].handed_over_s == grouped[5].handed_over_s
    for answer in (*single, *grouped):
        assert answer.arrival_s <= answer.handed_over_s < answer.first_s <= answer.end_s


async def test_requests_are_sent_at_their_times():
    async with FakeEngine(model=MODEL, slots=4, step_s=0.001) as engine:
        answers = await passes.one_pass(engine.url, load_of(1, 1, 1, arrivals_s=(0, 0.05, 0.1)), GroupedSlots(4, 2))
    assert [answer.handed_over_s >= answer.arrival_s for answer in answers] == [True] * 3
    assert answers[1].handed_over_s < answers[2].arrival_s, "a request does not wait for a second one"


async def test_an_answer_of_another_length_is_an_error():
    class Short(FakeEngine):
        def _answer(self, body: Any, *, chat: bool) -> Any:
            body.max_tokens -= 1
            return super()._answer(body, chat=chat)

    async with Short(model=MODEL, step_s=0.001) as engine:
        with pytest.raises(ExceptionGroup):
            await passes.one_pass(engine.url, load_of(5, 5), GroupedSlots(4, 1))


def test_loads_differ_in_order_only():
    first, second = (passes.burst(40, 48, np.random.default_rng(seed), 1800) for seed in (1, 2))
    assert list(first.tokens) != list(second.tokens)
    assert sorted(first.tokens) == sorted(second.tokens)
    assert first.tokens.mean() == pytest.approx(48, rel=0.05)
    lengths = [len(prompt) for prompt in first.prompts]
    assert 256 <= min(lengths) <= max(lengths) <= 1024
    assert math.exp(np.log(lengths).mean()) == pytest.approx(512, rel=0.01)
    assert all(passes.SPECIAL_TOKENS <= token < 1800 for prompt in first.prompts for token in prompt)


def test_throughput_while_requests_wait_counts_the_refills():
    """Two slots; refills at 1, 2, 3 and 4 s. The last one only ends the time."""
    times = [(0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 9)]
    answers = [passes.Answer(10, 0.0, begin_s, begin_s + 0.5, end_s) for begin_s, end_s in times]
    numbers = passes.summary(answers, 2)
    assert numbers["tokens_per_s"] == pytest.approx(60 / 9)
    assert numbers["tokens_per_s_saturated"] == pytest.approx(30 / 3)
    assert numbers["requests_per_s_saturated"] == pytest.approx(3 / 3)
    assert numbers["latency_s_mean"] == pytest.approx(24 / 6)
    assert numbers["first_token_s_mean"] == pytest.approx(10 / 6 + 0.5)


def test_steps_with_prompts_are_those_with_more_tokens_than_slots():
    name, labels = "vllm:iteration_tokens_total_bucket", 'engine="0",model_name="m"'
    text = "\n".join(f'{name}{{{labels},le="{le}"}} {n}.0' for le, n in (("8.0", 3), ("16.0", 50), ("+Inf", 62)))
    assert dict(passes.STEPS.findall(text)) == {"16.0": "50.0", "+Inf": "62.0"}


# ---- costs --------------------------------------------------------------------------------------------------------


def some_costs(interruption_s: float) -> Costs:
    """Steps of 10 ms + 1 ms a sequence; prompts of 100 ms."""
    steps = {count: 0.010 + 0.001 * count for count in costs.SEQUENCES}
    return Costs(steps, {size: 0.1 + interruption_s / size for size in costs.GROUPS})


def test_costs_are_recovered():
    found = some_costs(0.02)
    assert found.line == pytest.approx((0.010, 0.001))
    assert found.interruption == pytest.approx((0.02, 0.1))
    assert found.request_s(8, 1, 48) == pytest.approx(48 * (0.01 / 8 + 0.001) + 0.1 + 0.02)


def test_groups_gain_below_the_break_even_length_and_lose_above():
    found = some_costs(0.02)
    tokens = found.break_even_tokens(8, 4)
    for factor, gains in ((0.9, True), (1.1, False)):
        assert (found.request_s(8, 4, factor * tokens) < found.request_s(8, 1, factor * tokens)) is gains
    assert some_costs(0.0).break_even_tokens(8, 4) == pytest.approx(0, abs=1e-6), "without a cost groups always lose"


def test_a_gain_needs_an_interruption_of_some_cost():
    needed_s = some_costs(0.0).interruption_for(1.1, 16, 4, 48)
    found = some_costs(needed_s)
    assert found.request_s(16, 1, 48) / found.request_s(16, 4, 48) == pytest.approx(1.1)


def test_the_papers_threshold_solves_its_equation():
    share = costs.threshold_share(0.05, 0.01, 50)
    assert share / (1 - share) + math.log(1 - share) == pytest.approx(0.1)
    assert costs.threshold_share(0.0, 0.01, 50) == pytest.approx(0, abs=1e-4)


# ---- results ------------------------------------------------------------------------------------------------------


def passes_of(group: int, *tokens_per_s: float, load: str = "burst", latency_s: float = 1.0) -> list[Row]:
    case = {"setting": "default", "load": load, "slots": 8, "group": group}
    numbers = dict.fromkeys(report.RATIOS, 1.0) | {"latency_s_mean": latency_s}
    return [
        Row({**case, "round": n}, numbers | {"tokens_per_s": rate, "tokens_per_cpu_s": rate})
        for n, rate in enumerate(tokens_per_s)
    ]


def test_ratios_to_single_slots_are_taken_within_a_round():
    rows = report.compared([*passes_of(1, 10.0, 100.0), *passes_of(2, 11.0, 110.0)])
    assert [row.ratios["single"]["tokens_per_s"] for row in rows] == pytest.approx([1.0, 1.1])


@pytest.mark.parametrize(
    ("group", "answer"),
    [
        (passes_of(4, 11.5), "Yes: groups reach at most 1.150"),
        (passes_of(4, 10.5), "No: groups reach at most 1.050"),
        (passes_of(4, 11.5, latency_s=1.2), "No: groups reach at most 1.150"),
        ([*passes_of(4, 10.5), *passes_of(4, 11.5, load="poisson-0.9")], "No: groups reach at most 1.050"),
    ],
)
def test_the_verdict_needs_throughput_and_latency(group: list[Row], answer: str):
    single = [*passes_of(1, 10.0), *passes_of(1, 10.0, load="poisson-0.9")]
    assert report.verdict(report.compared([*single, *group])).startswith(answer)


def test_a_server_replaces_its_own_part_and_the_figure_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file, figure = tmp_path / "results.json", tmp_path / "figure.png"
    section = {"flags": [], "rounds": 1, "tokens_mean": 48, "weights": 20_000_000, "read_gb_per_s": 10.0}
    section["costs"] = {"step_s": some_costs(0).step_s, "prompt_s": some_costs(0).prompt_s}
    numbers = passes.summary([passes.Answer(4, 0, n // 2, n // 2 + 0.5, n // 2 + 1) for n in range(8)], 2)
    rows = [*passes_of(1, 10.0), *passes_of(2, 11.0)]
    rows = [Row(row.case, {**numbers, "steps": 1.0, **row.numbers}) for row in rows]
    other = [Row({**row.case, "setting": "small budget"}, row.numbers) for row in rows]
    benchmark.write(file, "small budget", section, other)
    benchmark.write(file, "default", section, rows)
    benchmark.write(file, "default", section, rows)
    found = json.loads(file.read_text())
    assert list(found["settings"]) == ["default", "small budget"]
    assert len(found["rows"]) == 4
    benchmark.main(["--report", "--output", str(file), "--plot", str(figure)])
    assert figure.stat().st_size > 10_000
    assert "Yes: groups reach at most 1.100" in capsys.readouterr().out
