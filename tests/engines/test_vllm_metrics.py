"""Load, memory and slots in metrics."""

import random
from typing import Any

import pytest

from llmserve.engines.dialects import SGLANG_METRICS, Told, vllm_metrics
from llmserve.engines.vllm_metrics import SlotsLearner

TEXT = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
vllm:cache_config_info{block_size="32",kv_cache_size_tokens="1280",num_gpu_blocks="40"} 1.0
vllm:cache_config_info{block_size="32",kv_cache_size_tokens="1280",num_gpu_blocks="40"} 1.0
"""


def load(running: int, waiting: int, tokens_max: int | None = None) -> Told:
    return Told(running=running, waiting=waiting, tokens_max=tokens_max)


def read_load(text: str) -> Told | None:
    return vllm_metrics(text.encode())


def test_load_is_summed_over_the_ranks_of_an_engine() -> None:
    assert read_load(TEXT) == load(7, 2, 2560)


def test_older_versions_report_blocks_and_their_size() -> None:
    text = 'vllm:num_requests_running 0.0\nvllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n'
    assert read_load(text) == load(0, 0, 1_600)


def test_counts_that_are_repeated_for_each_priority_count_once() -> None:
    text = 'sglang:num_running_reqs{dp_rank="0",priority=""} 3\nsglang:num_running_reqs{dp_rank="0",priority="7"} 3\n'
    assert SGLANG_METRICS(text.encode()) == load(3, 0)


def test_missing_metrics_stay_unknown() -> None:
    assert read_load("vllm:num_requests_running 0.0\n") == load(0, 0)
    assert read_load(
        'vllm:num_requests_running 0.0\nvllm:cache_config_info{kv_cache_size_tokens="None"} 1.0\n'
    ) == load(0, 0)
    assert read_load("process_cpu_seconds_total 3.5\n") is None


@pytest.mark.parametrize("count", ["+Inf", "-Inf", "NaN", "-1", "1e308", "1e400", "3e9", "many"])
def test_counts_that_are_no_number_of_requests_are_unknown(count: str) -> None:
    assert read_load(f"vllm:num_requests_running {count}\n") is None
    assert read_load(f"vllm:num_requests_running 1\nvllm:num_requests_waiting {count}\n") is None


@pytest.mark.parametrize("tokens", ["0", "9" * 15, "9" * 5_000])
def test_a_cache_of_no_size_or_an_absurd_one_is_unknown(tokens: str) -> None:
    cache = f'vllm:cache_config_info{{kv_cache_size_tokens="{tokens}"}} 1.0\n'
    assert read_load(f"vllm:num_requests_running 0.0\n{cache}") == load(0, 0)


def test_an_engine_that_always_claims_to_be_full_does_not_grow_without_end() -> None:
    learner = SlotsLearner(8, look_ahead=2)
    for _ in range(2_000):
        learner.observe(load(1 << 31, 0))
    assert learner.slots == 1 << 16


def test_the_number_of_slots_is_found_from_above_and_from_below() -> None:
    """An engine of unknown size is kept as full as the guess allows; probes come from time to time."""
    rng = random.Random(2)
    for slots, guess in ((8, 256), (1_000, 256), (1_000, 8), (4, 8), (256, 256), (1, 64)):
        learner = SlotsLearner(guess, look_ahead=1)
        for _ in range(40):
            in_flight = learner.slots + 1
            learner.observe(load(min(in_flight, slots), max(0, in_flight - slots)))
            if rng.random() < 0.3:  # an idle engine teaches nothing
                learner.observe(load(0, 0))
        assert slots <= learner.slots <= slots + 1 or (slots, guess) == (256, 256)
        assert learner.slots <= 1.3 * slots + 1


def test_few_slots_double_until_something_waits() -> None:
    learner = SlotsLearner(8, look_ahead=2)
    estimates = []
    for _ in range(8):
        in_flight = learner.slots + 2
        estimates.append(learner.observe(load(min(in_flight, 100), max(0, in_flight - 100))))
    assert estimates[:4] == [17, 35, 71, 143]
    assert not SlotsLearner(8, 2).limit_reached
    assert (estimates[5:], learner.limit_reached) == ([100] * 3, True)


def test_slots_found_before_are_where_the_search_continues() -> None:
    """Also when the engine now has fewer or more."""
    before = SlotsLearner(8, look_ahead=2)
    for _ in range(8):
        in_flight = before.slots + 2
        before.observe(load(min(in_flight, 100), max(0, in_flight - 100)))
    for slots in (100, 40, 300):
        learner = SlotsLearner(8, look_ahead=2)
        learner.restore(before.state())
        assert (learner.slots, learner.limit_reached) == (100, True)
        for _ in range(20):
            in_flight = learner.slots + 3
            learner.observe(load(min(in_flight, slots), max(0, in_flight - slots)))
        assert slots <= learner.slots <= slots + 1


@pytest.mark.parametrize("state", [{}, {"slots": 0, "limit_reached": True}, {"slots": "8", "limit_reached": True}])
def test_a_state_of_something_else_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no state of an engine's slots"):
        SlotsLearner(8, 2).restore(state)


def test_a_probe_between_arrival_and_first_step_changes_nothing() -> None:
    learner = SlotsLearner(64, look_ahead=0)
    learner.observe(load(10, 30))
    assert learner.observe(load(40, 0)) == 64
