"""The simulated body: known results of theory, laws of every run, and the command."""

import gc
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from llmserve.__main__ import main
from llmserve.commands.simulate import Case, Scenario, prepare, run, run_cases, simulate
from llmserve.errors import ConfigError
from llmserve.live import journal
from llmserve.scheduling.messages import RequestArrived, StartBatch
from llmserve.settings.dispatch import DispatchConfig
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.progress import RunsProgress
from llmserve.simulation.prompt_rows import read_answers
from llmserve.simulation.report import Recorder
from llmserve.simulation.scenario import Answers
from predictor.prompt import Prompt

ISSUE_COMMAND = (
    "simulate --bins 8 --batch-size 8 --arrival-rate 5 --requests 10000 --lengths lognormal:5.2,0.8 --step-s 0.01 "
    "--engines 2 --barrier --predictions oracle --seed 1"
)


def scheduling(**values: object) -> SchedulingConfig:
    return SchedulingConfig(**{"release": "full", "queue_requests_max": 10**9, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bins", "throughput_per_s"), [(1, 6.4475), (2, 8.4342), (4, 9.9703), (8, 10.9692)], ids=lambda value: str(value)
)
def test_saturated_throughput_is_that_of_theorem_4_2(bins: int, throughput_per_s: float) -> None:
    """Uniform service on [1, 20], B = 128: B / E[t_service,k] of Multi-Bin's eq. 17, within the paper's 1 %."""
    scenario = Scenario(
        requests=64_000,
        arrival_rate=np.inf,
        lengths="uniform:1,20",
        step_s=1.0,
        barrier=True,
        last_batch="drop",
        seed=3,
    )
    summary = simulate(scenario, scheduling(bins=bins, batch_size=128, edges_refit_every=0))
    assert summary.throughput_per_s == pytest.approx(throughput_per_s, rel=0.01)


def erlang_c(servers: int, offered: float) -> float:
    """Probability that an arrival waits in M/M/c; offered : arrival rate times mean service, below servers."""
    terms = [offered**n / math.factorial(n) for n in range(servers)]
    last = offered**servers / math.factorial(servers) * servers / (servers - offered)
    return last / (sum(terms) + last)


@pytest.mark.parametrize(
    ("lengths", "servers", "waiting_s"),
    [
        ("exponential:1", 1, 0.5 / (1 - 0.5)),  # M/M/1: rho / (mu (1 - rho))
        ("constant:1", 1, 0.5 * 1.0 / (2 * (1 - 0.5))),  # M/D/1, Pollaczek-Khinchine: lambda E[S^2] / (2 (1 - rho))
        ("uniform:0,2", 1, 0.5 * 4 / 3 / (2 * (1 - 0.5))),  # M/G/1
        ("lognormal:-0.32,0.8", 1, 0.5 * math.exp(0.64) / (2 * (1 - 0.5))),  # M/G/1, also of mean 1
        ("exponential:1", 3, erlang_c(3, 1.5) / (3 - 1.5)),  # M/M/3
    ],
    ids=["M/M/1", "M/D/1", "M/G/1 uniform", "M/G/1 lognormal", "M/M/3"],
)
def test_independent_slots_have_the_known_waiting_times(lengths: str, servers: int, waiting_s: float) -> None:
    """The theory's mean waiting lies in the 95 % confidence interval of six runs, at half of the slots' capacity."""
    scenario = Scenario(requests=6_000, arrival_rate=0.5 * servers, lengths=lengths, step_s=1.0, slots=servers, seed=1)
    config = scheduling(bins=1, batch_size=1, release="greedy", order="fffs").resolved(barrier=False)
    with RunsProgress(6) as progress:
        (repeated,) = run_cases([Case(scenario, config, DispatchConfig())], 6, 1, progress)
    waiting = repeated.estimates["waiting_s_mean"]
    assert waiting.low is not None
    assert waiting.high is not None
    assert waiting.low <= waiting_s <= waiting.high
    assert waiting.half_width < 0.2 * waiting_s
    assert repeated.estimates["utilisation"].mean == pytest.approx(0.5, rel=0.02)


LITTLE = {
    "barrier, full": (Scenario(barrier=True), {"bins": 4}),
    "barrier, greedy, three engines": (Scenario(barrier=True, engines=3), {"release": "greedy"}),
    "barrier, window": (Scenario(barrier=True, engines=2), {"release": "window"}),
    "barrier, timeout, two profiles": (
        Scenario(barrier=True, engine=("2xh100-llama-3.1-8b:4", "h100-llama-3.1-8b"), arrivals="mmpp:5,20"),
        {"release": "timeout", "batch_wait_s": 2.0},
    ),
    "refill, greedy, two engines": (Scenario(engines=2, look_ahead=2, prefill_s=0.3), {"release": "greedy"}),
    "refill, full, all at once": (Scenario(arrival_rate=np.inf), {"batch_size": 4}),
    "constant arrivals, mistaken bins": (
        Scenario(barrier=True, arrivals="constant", predictions="neighbour:4,0.2"),
        {"bins": 4},
    ),
}


@pytest.mark.parametrize(("scenario", "values"), LITTLE.values(), ids=LITTLE)
def test_littles_law_holds(scenario: Scenario, values: dict[str, object]) -> None:
    """Mean number present = completions per second x mean latency, exactly, in a run that starts and ends empty."""
    scenario = msgspec.structs.replace(scenario, requests=1_500, step_s=None if scenario.engine else 0.005, seed=2)
    summary = simulate(scenario, scheduling(**values))
    assert summary.completed == 1_500
    assert summary.in_system_mean == pytest.approx(summary.throughput_per_s * summary.latency_s_mean, rel=1e-9)
    assert summary.in_system_mean > 0.1


@pytest.mark.parametrize(
    ("last_batch", "values"),
    [("drop", {"bins": 8}), ("flush", {"queue_requests_max": 20}), ("drop", {"queue_requests_max": 20, "bins": 3})],
)
def test_requests_that_are_refused_or_dropped_are_present_until_they_leave(
    last_batch: str, values: dict[str, object]
) -> None:
    scenario = Scenario(requests=1_500, arrival_rate=9.0, barrier=True, last_batch=last_batch, seed=2)  # type: ignore[arg-type]
    config = scheduling(**values).resolved(barrier=True)
    work = prepare(scenario, config)
    recorder = Recorder(len(work))
    summary = run(scenario, config, work, recorder=recorder)
    unanswered = {id_: left_s for id_, left_s in recorder.left_s.items() if np.isnan(recorder.ended_s[id_])}
    assert len(unanswered) == 1_500 - summary.completed > 0
    last_s = np.nanmax(recorder.ended_s)
    stayed_s = sum(max(0.0, min(left_s, last_s) - recorder.arrived_s[id_]) for id_, left_s in unanswered.items())
    present_s = summary.latency_s_mean * summary.completed + stayed_s
    assert summary.in_system_mean * summary.elapsed_s == pytest.approx(present_s, rel=1e-9)


def test_the_number_present_is_the_schedulers_count(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    scenario = Scenario(requests=2_000, arrival_rate=3.0, barrier=True, engines=2, step_s=0.005, seed=2)
    summary = simulate(scenario, scheduling(bins=4), journal_path=path)
    _, steps = journal.read(path)
    scheduler = journal.read(path)[0].scheduler()
    present_s, last_s, present = 0.0, 0.0, 0
    for step in steps:
        present_s += present * (step.now_s - last_s)
        scheduler.handle(step.event, step.now_s)
        last_s, present = step.now_s, len(scheduler.requests)
    assert present_s == pytest.approx(summary.in_system_mean * summary.elapsed_s, rel=1e-9)


def test_same_seed_gives_the_same_journal_byte_for_byte(tmp_path: Path) -> None:
    scenario = Scenario(requests=500, barrier=True, engines=2, predictions="lognormal:0.5", seed=9)
    for name in ("a", "b"):
        simulate(scenario, scheduling(release="timeout", batch_wait_s=2.0), journal_path=tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("release", ["full", "timeout", "greedy"])
@pytest.mark.parametrize("barrier", [True, False])
def test_a_journal_replays_to_itself(tmp_path: Path, release: str, barrier: bool) -> None:
    path = tmp_path / "journal.jsonl"
    scenario = Scenario(requests=600, arrival_rate=4.0, barrier=barrier, engines=2, predictions="lognormal:0.4", seed=4)
    simulate(scenario, scheduling(release=release, batch_wait_s=1.0, edges_refit_every=50), journal_path=path)
    header, steps = journal.read(path)
    assert sum(isinstance(action, StartBatch) for step in steps for action in step.actions) > 50
    assert journal.replay(header, steps) == steps


def test_a_journal_of_other_decisions_does_not_replay(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    simulate(Scenario(requests=100, barrier=True), scheduling(batch_size=4), journal_path=path)
    header, steps = journal.read(path)
    other = journal.Header(scheduling(batch_size=5).resolved(barrier=True), header.scores, header.lengths)
    assert journal.replay(other, steps) != steps


def test_a_partial_last_batch_is_flushed_or_dropped_as_set() -> None:
    config = scheduling(bins=1, batch_size=8)
    for last_batch, completed in (("flush", 20), ("drop", 16)):
        scenario = Scenario(requests=20, arrival_rate=np.inf, barrier=True, last_batch=last_batch)  # type: ignore[arg-type]
        assert simulate(scenario, config).completed == completed


def test_timeout_release_bounds_the_wait_in_a_bin() -> None:
    scenario = Scenario(requests=300, arrival_rate=0.5, lengths="constant:1", step_s=0.001, engines=4, barrier=True)
    summary = simulate(scenario, scheduling(release="timeout", batch_wait_s=3.0, batch_size=64))
    assert 2.0 < summary.waiting_s_p99 <= 3.0 + 1e-9


def test_bins_gain_on_a_barrier_engine_and_cost_nothing_on_a_refill_engine() -> None:
    def throughput(bins: int, barrier: bool) -> float:
        scenario = Scenario(requests=4_000, arrival_rate=np.inf, barrier=barrier, seed=1)
        return simulate(scenario, scheduling(bins=bins)).throughput_per_s

    assert throughput(8, True) > 1.5 * throughput(1, True)
    assert throughput(8, False) > 0.98 * throughput(1, False)


# ---- profiles ----

H100 = "h100-llama-3.1-8b"
TOKENS_MEAN = 211.0  # as in Azure's conversations


def conversations(rho: float, seed: int = 1, **values: object) -> Scenario:
    """One barrier engine at rho times the rate of full batches of 32 without waste: 32 / (E[L] step_s(32)).

    Lognormal lengths with about the mean and the 95th percentile of Azure's conversations.
    """
    arrival_rate = rho * 32 / (TOKENS_MEAN * (0.0790e-3 * 32 + 6.54e-3))
    lengths = f"lognormal:{np.log(TOKENS_MEAN) - 0.55**2 / 2},0.55"
    values = {"requests": 6_000, "arrival_rate": arrival_rate, "lengths": lengths, "profile": H100, **values}
    return Scenario(barrier=True, seed=seed, **values)  # type: ignore[arg-type]


def test_a_greedy_barrier_engine_equals_a_simple_loop() -> None:
    """Serve at most 32 waiting requests, oldest first, whenever free: times and joules by hand."""
    scenario = conversations(0.3)
    work = prepare(scenario, scheduling(bins=1, batch_size=32))
    arrivals_s, lengths = work.trace.arrivals_s, work.trace.output_tokens
    ended_s, sizes, busy_j, busy_s, free_s, first = np.zeros(len(work)), [], 0.0, 0.0, 0.0, 0
    while first < len(work):
        now_s = max(free_s, arrivals_s[first])
        size = min(32, int(np.searchsorted(arrivals_s, now_s, side="right")) - first)
        longest = lengths[first : first + size].max()
        free_s = now_s + longest * (0.0790e-3 * size + 6.54e-3)
        busy_s += free_s - now_s
        busy_j += longest * (0.0665 * size + 3.162)
        ended_s[first : first + size] = free_s
        sizes.append(size)
        first += size
    elapsed_s = free_s - arrivals_s[0]
    summary = simulate(scenario, scheduling(bins=1, batch_size=32, release="greedy"))
    assert summary.latency_s_p95 == pytest.approx(np.percentile(ended_s - arrivals_s, 95))
    assert summary.batch_size_mean == pytest.approx(np.mean(sizes))
    assert summary.energy_j == pytest.approx(busy_j + 90 * (elapsed_s - busy_s))
    assert summary.power_w_mean == pytest.approx(summary.energy_j / elapsed_s)  # type: ignore[operator]
    assert summary.energy_j_per_token == pytest.approx(summary.energy_j / lengths.sum())  # type: ignore[operator]
    assert summary.energy_j_per_request == pytest.approx(summary.energy_j / len(work))  # type: ignore[operator]


def test_waiting_saves_energy_at_low_load_for_latency_and_fewer_bins_are_better_in_both() -> None:
    """The pattern of a table made on Azure's conversations at rho = 0.1 (mean batch, J/token, p50 / p95 s):

    1 bin greedy 4.3, 1.39, 4.4 / 6.9; 8 bins greedy 2.6, 1.39, 7.3 / 12.8; 1 bin of 16 or 15 s 16.0, 0.78, 8.2 / 14.2.
    Lognormal lengths differ slightly from these conversations, hence the wide tolerances.
    """
    greedy = simulate(conversations(0.1), scheduling(bins=1, batch_size=32, release="greedy"))
    binned = simulate(conversations(0.1), scheduling(bins=8, batch_size=32, release="greedy"))
    patient = simulate(conversations(0.1), scheduling(bins=1, batch_size=16, release="timeout", batch_wait_s=15.0))
    joules = [summary.energy_j_per_token for summary in (greedy, binned, patient)]
    assert joules == [pytest.approx(1.39, rel=0.15), pytest.approx(1.39, rel=0.15), pytest.approx(0.78, rel=0.15)]
    assert greedy.batch_size_mean == pytest.approx(4.3, rel=0.15)
    assert binned.batch_size_mean == pytest.approx(2.6, rel=0.15)
    assert patient.batch_size_mean == pytest.approx(16.0, rel=0.05)
    assert greedy.latency_s_p50 < binned.latency_s_p50 < patient.latency_s_p50
    assert greedy.latency_s_p95 < 0.7 * patient.latency_s_p95


def test_constant_steps_have_no_known_energy() -> None:
    summary = simulate(Scenario(requests=50, barrier=True), scheduling())
    assert (summary.energy_j, summary.energy_j_per_token) == (None, None)
    assert (summary.energy_j_per_request, summary.power_w_mean) == (None, None)


def test_an_always_full_refill_engine_draws_the_power_of_its_slots() -> None:
    scenario = Scenario(requests=3_000, arrival_rate=np.inf, profile=H100, slots=16, lengths="constant:50")
    summary = simulate(scenario, scheduling(release="greedy"))
    step_s, step_j = 0.0790e-3 * 16 + 6.54e-3, 0.0665 * 16 + 3.162
    assert summary.power_w_mean == pytest.approx(step_j / step_s, rel=0.01)
    assert summary.throughput_per_s == pytest.approx(16 / (50 * step_s), rel=0.01)
    assert summary.utilisation == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize(
    ("values", "config"),
    [
        ({"barrier": True, "engines": 2}, {"bins": 4}),
        ({"slots": 4, "engines": 2, "arrival_rate": 9.0}, {"bins": 4, "release": "greedy"}),
        ({"barrier": True, "arrival_rate": 9.0, "slo_s": (4.0, 20.0)}, {"order": "flex", "release": None}),
    ],
)
def test_a_run_leaves_no_reference_cycles(values: dict[str, Any], config: dict[str, object]) -> None:
    def garbage(requests: int) -> int:
        gc.collect()
        gc.disable()  # collect all objects, also those from before and after the run
        try:
            simulate(Scenario(requests=requests, **values), scheduling(**config))
            return gc.collect()
        finally:
            gc.enable()

    garbage(100)  # one-time imports and objects
    assert garbage(2_000) - garbage(100) < 200, "far fewer than one per request"


def test_the_garbage_collector_is_enabled_again_after_a_run() -> None:
    simulate(Scenario(requests=10), scheduling())
    assert gc.isenabled()


# ---- traces ----

TRACE = "arrival_s,model,output_tokens,input_tokens\n0.5,m,100,7\n2.5,m,50,0\n2.5,m,10,9\n"


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return str(path)


def test_a_trace_is_replayed_in_order_with_its_lengths_and_prompts(trace: str, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    scenario = Scenario(trace=trace, slots=1, step_s=0.1)
    summary = simulate(scenario, scheduling(release="greedy", order="fffs"), journal_path=path)
    events = [(step.now_s, step.event) for step in journal.read(path)[1]]
    arrived = [(at_s, event.request) for at_s, event in events if isinstance(event, RequestArrived)]
    assert [(at_s, request.predicted_tokens, request.prompt_tokens) for at_s, request in arrived] == [
        (0.5, 100, 7),
        (2.5, 50, 0),
        (2.5, 10, 9),
    ]
    assert summary.elapsed_s == pytest.approx(16.0)
    assert summary.completed == 3


SHARING = """arrival_s,input_tokens,output_tokens,session,prefix,prefix_tokens
0,3000,10,a,tools,1000
20,3000,10,b,tools,1000
40,3500,10,a,tools,1000
"""


def test_engines_with_a_kv_cache_compute_what_prompts_share_once(tmp_path: Path) -> None:
    """The second prompt finds 62 blocks of the prefix, the third the whole first prompt with nine tokens answered."""
    path = tmp_path / "trace.csv"
    path.write_text(SHARING)
    scenario = Scenario(trace=str(path), kv_tokens=16_000, step_s=0.1, prefill_s_per_token=0.001)
    summary = simulate(scenario, scheduling(release="greedy", batch_size=1, order="fffs"))
    cached = 62 * 16 + 188 * 16
    assert summary.cached_share == pytest.approx(cached / 9_500)
    assert summary.latency_s_mean * 3 == pytest.approx(3 * 10 * 0.1 + 0.001 * (9_500 - cached))


def test_memory_that_is_short_makes_requests_wait(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(SHARING.replace("\n20,", "\n0,").replace("\n40,", "\n0,"))
    ample, short = (
        simulate(Scenario(trace=str(path), kv_tokens=kv_tokens), scheduling(release="greedy", order="fffs"))
        for kv_tokens in (16_000, 4_000)
    )
    assert short.latency_s_mean > 1.5 * ample.latency_s_mean


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_tokens": 4_000, "barrier": True}, "kv_tokens: only without barrier"),
        ({"kv_tokens": 4_000, "load": 0.5}, "kv_tokens: only without barrier"),
        ({"step_tokens": 100}, "step_tokens: only with kv_tokens"),
    ],
)
def test_settings_that_have_no_meaning_with_a_kv_cache_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(Scenario(**settings), scheduling())


def test_a_request_larger_than_the_kv_cache_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(SHARING)
    assert main(["simulate", "--trace", str(path), "--kv-tokens", "2000"]) == 2
    assert "more than the KV cache" in capsys.readouterr().err


def test_a_trace_is_replayed_at_the_set_load_or_rate(trace: str) -> None:
    """On one barrier engine batches of 1 of lengths 100, 50 and 10 take 5.33 s on average at 0.1 s per token."""
    options = {"trace": trace, "step_s": 0.1, "barrier": True}
    loaded = prepare(Scenario(load=0.8, **options), scheduling(batch_size=1))  # type: ignore[arg-type]
    assert loaded.arrival_rate_per_s == pytest.approx(0.8 * 3 / 16)
    assert loaded.trace.rate_per_s == pytest.approx(loaded.arrival_rate_per_s)
    rated = prepare(Scenario(arrival_rate=6.0, **options), scheduling(batch_size=1))  # type: ignore[arg-type]
    assert np.diff(rated.trace.arrivals_s).tolist() == pytest.approx([1 / 3, 0.0])


@pytest.mark.parametrize("options", [{"lengths": "constant:7"}, {"trace": None}, {"prompts": "p"}])
def test_answers_can_be_made_longer(options: dict[str, str | None], trace: str) -> None:
    scenario = Scenario(
        requests=3, lengths_factor=2.0, **{**options, **({"trace": trace} if "trace" in options else {})}
    )
    answers = Answers(np.array([4.0]), np.array([1.0]))
    lengths = prepare(scenario, scheduling(batch_size=1), answers).trace.output_tokens.tolist()
    assert lengths == ([200, 100, 20] if "trace" in options else [8.0] * 3 if "prompts" in options else [14.0] * 3)


def test_a_trace_can_be_cut_and_accelerated(trace: str) -> None:
    work = prepare(Scenario(trace=trace, trace_speed=5.0, requests=2), scheduling(batch_size=8))
    assert work.trace.arrivals_s.tolist() == [0.1, 0.5]
    assert work.trace.output_tokens.tolist() == [100, 50]
    assert work.arrival_rate_per_s == pytest.approx(1 / 0.4)
    assert sorted(work.scores) == [50, 100]


# ---- prompts ----


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    """A record of two answers, as `serve --record` writes it."""
    rows = [
        {"prompt": "Count from 3 to 9.", "model": "llmserve-demo", "output_tokens": 13, "finish_reason": "stop"},
        {"prompt": "Count from 1 to 150.", "model": "llmserve-demo", "output_tokens": 400, "finish_reason": "stop"},
    ]
    path = tmp_path / "record.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_each_request_is_a_row_of_the_prompts_file(prompts: str) -> None:
    answers = read_answers(prompts, None)
    assert answers.output_tokens.tolist() == [13, 400]
    assert answers.input_tokens.tolist() == [len("Count from 3 to 9.") / 4, len("Count from 1 to 150.") / 4]
    work = prepare(Scenario(requests=2_000, prompts=prompts), scheduling(batch_size=8), answers)
    long = work.trace.output_tokens == 400
    assert (work.trace.output_tokens[~long] == 13).all()
    assert long.mean() == pytest.approx(0.5, abs=0.05)
    assert (work.trace.input_tokens[long] == 5.0).all()
    assert set(work.scores) == {13, 400}


def test_a_trained_predictor_predicts_the_answers_of_prompts(prompts: str) -> None:
    import predictor
    from predictor.predict import LengthPredictor

    answers = read_answers(prompts, str(predictor.DEMO))
    expected = LengthPredictor.load(predictor.DEMO).predict(
        [Prompt("Count from 3 to 9.", "llmserve-demo"), Prompt("Count from 1 to 150.", "llmserve-demo")]
    )
    assert answers.forecasts == pytest.approx(expected.astype(float))
    scenario = Scenario(requests=50, prompts=prompts, predictions=f"predictor:{predictor.DEMO}")
    work = prepare(scenario, scheduling(batch_size=8).resolved(barrier=True), answers)
    assert work.predictions is not None
    assert work.predictions.quantiles is not None
    for tokens, median, quantiles in zip(
        work.trace.output_tokens, work.predictions.medians, work.predictions.quantiles, strict=True
    ):
        row = 0 if tokens == 13 else 1
        assert quantiles == pytest.approx(expected[row])
        assert median == pytest.approx(np.median(expected[row]))
    assert len(set(work.scores)) == 2, "bins use the risk of the predictions"


def test_the_output_tokens_of_prompts_may_be_in_a_column_of_another_name(prompts: str) -> None:
    path = Path(prompts).with_name("renamed.jsonl")
    path.write_text(Path(prompts).read_text().replace("output_tokens", "response_tokens"))
    assert read_answers(f"{path}:response_tokens", None).output_tokens.tolist() == [13, 400]


def test_the_command_serves_prompts_with_a_trained_predictor(prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
    import predictor

    flags = ["--requests", "300", "--barrier", "--bins", "2", "--prefill-s-per-token", "0.01", "--json"]
    assert main(["simulate", "--prompts", prompts, "--predictions", f"predictor:{predictor.DEMO}", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["completed"] == 300


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--prompts /nowhere.jsonl", "/nowhere.jsonl"),
        ("--prompts {prompts}:tokens", "no usable row"),
        ("--prompts {prompts} --predictions predictor:/nowhere", "/nowhere is not a predictor's folder"),
        ("--predictions predictor:/nowhere", "a trained predictor needs --prompts"),
        ("--prompts {prompts} --lengths constant:3", "lengths cannot be given with prompts"),
    ],
)
def test_unusable_prompts_are_an_error_of_one_line(
    flags: str, message: str, prompts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *flags.format(prompts=prompts).split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


# ---- the command ----


def test_the_command_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ISSUE_COMMAND.split(), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["completed"] == 10_000
    for key in ("throughput_per_s", "latency_s_mean", "latency_s_p50", "latency_s_p95", "latency_s_p99", "elapsed_s"):
        assert summary[key] > 0
    assert 0 < summary["batch_fill_mean"] <= 1
    assert 0 < summary["utilisation"] <= 1


def test_the_command_reports_energy_with_a_profile(capsys: pytest.CaptureFixture[str]) -> None:
    command = f"simulate --requests 200 --load 0.5 --barrier --profile {H100} --release greedy --seed 1"
    assert main([*command.split(), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert 90 < summary["power_w_mean"] < 600
    assert summary["energy_j"] == pytest.approx(summary["energy_j_per_request"] * 200)
    assert summary["latency_s_p50"] < summary["latency_s_p90"] < summary["latency_s_p95"]
    assert main(command.split()) == 0
    out = capsys.readouterr().out
    assert "energy/token (J)" in out
    assert "200 requests at " in out


def run_command(capsys: pytest.CaptureFixture[str], flags: str) -> dict[str, float]:
    """1,000 requests on an H100 barrier engine with batches of up to 8, unless the flags set other values."""
    command = f"simulate --requests 1000 --profile {H100} --batch-size 8 --bins 4 --load 0.4 --seed 1 {flags} --json"
    assert main(command.split()) == 0
    summary: dict[str, float] = json.loads(capsys.readouterr().out)
    return summary


def test_the_command_weighs_energy_and_latency_as_set(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--release table --barrier"
    fast, frugal = run_command(capsys, flags), run_command(capsys, f"{flags} --energy-weight 20")
    assert frugal["energy_j_per_token"] < 0.92 * fast["energy_j_per_token"]
    assert frugal["latency_s_mean"] > 1.1 * fast["latency_s_mean"]
    assert frugal["batch_size_mean"] > 1.5 * fast["batch_size_mean"]


def test_the_command_keeps_a_latency_target_with_least_energy(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--release table --barrier"
    fast, within = run_command(capsys, flags), run_command(capsys, f"{flags} --latency-target-s 6")
    assert fast["latency_s_mean"] < 0.8 * 6
    assert 0.85 * 6 < within["latency_s_mean"] < 1.1 * 6
    assert within["energy_j_per_token"] < 0.92 * fast["energy_j_per_token"]


def test_the_command_forms_batches_as_large_as_a_deadline_allows(capsys: pytest.CaptureFixture[str]) -> None:
    summaries = [
        run_command(capsys, f"--release deadline --barrier --latency-target-s {target_s}") for target_s in (10, 30)
    ]
    for summary, target_s in zip(summaries, (10, 30), strict=True):
        assert 0.5 * target_s < summary["latency_s_mean"] < target_s
    assert summaries[1]["batch_size_mean"] > 1.2 * summaries[0]["batch_size_mean"]
    assert summaries[1]["energy_j_per_token"] < summaries[0]["energy_j_per_token"]


def test_the_command_has_the_defaults_of_the_server_for_each_kind_of_engine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = f"simulate --requests 300 --profile {H100} --load 0.2 --bins 4 --seed 1"
    for flags, same, title in (
        ("", "--release greedy --batch-size 1", "batches of 1, release greedy, order boost, 1 refill engine"),
        ("--barrier", "--barrier --release greedy", "batches of 8, release greedy, order fffs, 1 barrier engine"),
        ("--release full", "--release full --batch-size 32", "batches of 32, release full, order boost, 1 refill"),
    ):
        outs = []
        for options in (flags, same):
            assert main([*command.split(), *options.split()]) == 0
            outs.append(" ".join(capsys.readouterr().out.split()))
        assert outs[0] == outs[1]
        assert title in outs[0]


def test_the_command_replays_a_trace_whole(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--trace", trace, "--json", "--release", "greedy"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["completed"] == 3
    assert summary["energy_j"] is None


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ISSUE_COMMAND.split()) == 0
    out = capsys.readouterr().out
    assert "requests/s" in out
    assert "waiting (s)" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lengths gaussian:3", "'gaussian:3' is not one of"),
        ("--lengths uniform:9,3", "LO <= HI"),
        ("--lengths lognormal:5.2", "is not one of"),
        ("--lengths lognormal:5.2,-1", "SIGMA at least 0"),
        ("--lengths constant:-5", "above 0"),
        ("--predictions lognormal:nan", "is not one of"),
        ("--batch-wait-s inf", "finite"),
        ("--edges 10,nan --bins 3", "finite"),
        ("--lengths file:/nowhere.csv", "no lengths file"),
        ("--predictions psychic", "'psychic' is not one of"),
        ("--arrival-rate 0", "arrival_rate"),
        ("--bins 0", "bins"),
        ("--batch-size 0", "batch_size"),
        ("--requests 0", "requests"),
        ("--edges 5,5 --bins 3", "strictly increasing"),
        ("--batch-sise 4", "did you mean --batch-size?"),
        ("--profile h100-llama-3.1-8b --step-s 0.01", "step_s cannot be given with profile"),
        ("--profile h100-llama-3.1-8b --prefill-s 0", "prefill_s cannot be given with profile"),
        ("--profile h100-lama", "or h100-llama-3.1-8b?"),
        ("--profile p4-googlenet --slots 64", "of 32 sequences, not 64"),
        ("--load 0.5 --arrival-rate 3", "arrival_rate cannot be given with load"),
        ("--load 0", "load"),
        ("--load 0.5 --step-s 0", "no finite capacity"),
        ("--trace /nowhere.csv", "no trace '/nowhere.csv'"),
        ("--trace t.csv --lengths constant:3", "lengths cannot be given with trace"),
        ("--trace t.csv --arrivals constant", "arrivals cannot be given with trace"),
        ("--trace t.csv --trace-speed 2 --load 0.5", "load cannot be given with trace_speed"),
        ("--trace-speed 2", "no trace to speed up"),
        ("--arrivals mmpp:3", "mmpp:RATIO,HIGH_S[,LOW_S]"),
        ("--lengths lognormal:800,1", "lengths 'lognormal:800,1'"),
        ("--engine=", "engine: '' is not [COUNTx]PROFILE[:SLOTS]"),
        ("--engine h100-llama-3.1-8b --profile h100-llama-3.1-8b", "profile cannot be given with engine"),
        ("--engine h100-llama-3.1-8b --engines 2", "engines cannot be given with engine"),
        ("--engine 2xh100-lama", "or h100-llama-3.1-8b?"),
        ("--engine p4-googlenet:64", "of 32 sequences, not 64"),
        ("--engine h100-llama-3.1-8b --engine p4-googlenet --release table", "engines of one kind"),
        ("--profile h100-llama-3.1-8b --prefill-s-per-token 1", "prefill_s_per_token cannot be given with profile"),
        ("--predictions neighbour:4,0.7", "neighbour:K,P with"),
        ("--predictions quantiles:-1", "is not one of"),
        ("--release table", "release table needs --profile"),
        ("--energy-weight 20", "energy_weight has no effect under release greedy, only under table"),
        ("--latency-target-s 9 --barrier", "latency_target_s has no effect under release window, only under table and"),
        ("--latency-target-s 0", "latency_target_s"),
    ],
)
def test_invalid_flags_are_an_error_of_one_line(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--requests", "10", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_invalid_flags_leave_an_earlier_journal_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text("of an earlier run")
    for flags in ("--release table", "--edges 5,5 --bins 3"):
        assert main(["simulate", "--requests", "10", *flags.split(), "--journal", str(path)]) == 2
    assert path.read_text() == "of an earlier run"


def test_first_edges_use_the_risk_of_predicted_quantiles() -> None:
    lengths = {"lengths": "lognormal:5,0.5", "requests": 10}
    by_risk = prepare(Scenario(predictions="quantiles:0.8", **lengths), scheduling(batch_size=8))  # type: ignore[arg-type]
    oracle = prepare(Scenario(**lengths), scheduling(batch_size=8))  # type: ignore[arg-type]
    longest_of_8 = np.exp(
        0.8 * 1.4236
    )  # approximately, as a multiple of the median: the expected largest of 8 normals is 1.4236
    assert np.median(by_risk.scores) > 0.9 * longest_of_8 * np.median(oracle.scores)
