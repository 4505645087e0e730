"""Load and memory in metrics."""

import pytest

from llmserve.engines.dialects import SGLANG_METRICS, Told, vllm_metrics

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


@pytest.mark.parametrize(("label", "told"), [("True", None), ("False", False), ("None", None)])
def test_an_engine_tells_that_it_keeps_no_prompts(label: str, told: bool | None) -> None:
    row = f'vllm:cache_config_info{{enable_prefix_caching="{label}",kv_cache_size_tokens="1280"}} 1.0'
    read = vllm_metrics(f"vllm:num_requests_running 0.0\n{row}\n".encode())
    assert read is not None
    assert (read.prefix_cache, read.tokens_max) == (told, 1280)


@pytest.mark.parametrize("count", ["+Inf", "-Inf", "NaN", "-1", "1e308", "1e400", "3e9", "many"])
def test_counts_that_are_no_number_of_requests_are_unknown(count: str) -> None:
    assert read_load(f"vllm:num_requests_running {count}\n") is None
    assert read_load(f"vllm:num_requests_running 1\nvllm:num_requests_waiting {count}\n") is None


@pytest.mark.parametrize("tokens", ["0", "9" * 15, "9" * 5_000])
def test_a_cache_of_no_size_or_an_absurd_one_is_unknown(tokens: str) -> None:
    cache = f'vllm:cache_config_info{{kv_cache_size_tokens="{tokens}"}} 1.0\n'
    assert read_load(f"vllm:num_requests_running 0.0\n{cache}") == load(0, 0)


@pytest.mark.parametrize(
    ("row", "started_s"),
    [
        ("process_start_time_seconds 1.79584594231e+09", 1795845942.31),
        ("process_start_time_seconds 17", 17.0),
        ("process_start_time_seconds 1e", None),
        ("process_start_time_seconds NaN", None),
        ("", None),
    ],
)
def test_the_start_of_the_process_is_read(row: str, started_s: float | None) -> None:
    told = vllm_metrics(f"vllm:num_requests_running 0.0\n{row}\n".encode())
    assert told is not None
    assert told.started_s == started_s
