"""The simulated body: known answers of the theory, laws of every run, and the command."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from llmserve.__main__ import main
from llmserve.cluster import journal
from llmserve.errors import ConfigError
from llmserve.scheduling.messages import RequestArrived, StartBatch
from llmserve.scheduling.policies import SchedulingConfig
from llmserve.simulate import Scenario, prepare, simulate
from llmserve.simulation import workload

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
    """Uniform service on [1, 20], B = 128: B / E[t_service,k] of Multi-Bin's eq. 17, to the paper's own 1 %."""
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


def test_one_slot_with_exponential_service_is_an_m_m_1_queue() -> None:
    """Mean latency 1 / (mu - lambda) = 2 s at mu = 1, lambda = 0.5; its standard error at this size is about 1 %."""
    scenario = Scenario(requests=200_000, arrival_rate=0.5, lengths="exponential:1", step_s=1.0, slots=1, seed=5)
    summary = simulate(scenario, scheduling(bins=1, batch_size=1, release="greedy", order="fffs"))
    assert summary.latency_s_mean == pytest.approx(2.0, rel=0.04)
    assert summary.utilisation == pytest.approx(0.5, rel=0.02)


def test_one_slot_with_constant_service_is_an_m_d_1_queue() -> None:
    """Mean waiting rho / (2 mu (1 - rho)) = 0.5 s at mu = 1, lambda = 0.5 (Pollaczek-Khinchine)."""
    scenario = Scenario(requests=200_000, arrival_rate=0.5, lengths="constant:1", step_s=1.0, slots=1, seed=6)
    summary = simulate(scenario, scheduling(bins=1, batch_size=1, release="greedy"))
    assert summary.waiting_s_mean == pytest.approx(0.5, rel=0.04)


def test_littles_law_holds(tmp_path: Path) -> None:
    """Mean number present = arrival rate x mean latency, exactly, over a run that starts and ends empty."""
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
    assert present_s == pytest.approx(summary.latency_s_mean * scenario.requests, rel=1e-9)


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


def test_a_partial_last_batch_is_flushed_or_dropped_as_asked() -> None:
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
TOKENS_MEAN = 211.0  # of Azure's conversations


def conversations(rho: float, seed: int = 1, **values: object) -> Scenario:
    """One barrier engine at rho times the rate of full batches of 32 that waste nothing: 32 / (E[L] step_s(32)).

    Lognormal lengths with about the mean and the 95th percentile of Azure's conversations.
    """
    arrival_rate = rho * 32 / (TOKENS_MEAN * (0.0790e-3 * 32 + 6.54e-3))
    lengths = f"lognormal:{np.log(TOKENS_MEAN) - 0.55**2 / 2},0.55"
    values = {"requests": 6_000, "arrival_rate": arrival_rate, "lengths": lengths, "profile": H100, **values}
    return Scenario(barrier=True, seed=seed, **values)  # type: ignore[arg-type]


def test_a_greedy_barrier_engine_is_the_obvious_loop() -> None:
    """Serve at most 32 of those that wait, oldest first, whenever free: times and joules written out by hand."""
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
    Lognormal lengths are not quite these conversations', hence the width.
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


def test_energy_is_not_known_of_constant_steps() -> None:
    summary = simulate(Scenario(requests=50, barrier=True), scheduling())
    assert (summary.energy_j, summary.energy_j_per_token) == (None, None)
    assert (summary.energy_j_per_request, summary.power_w_mean) == (None, None)


def test_a_refill_engine_that_is_always_full_draws_the_power_of_its_slots() -> None:
    scenario = Scenario(requests=3_000, arrival_rate=np.inf, profile=H100, slots=16, lengths="constant:50")
    summary = simulate(scenario, scheduling(release="greedy"))
    step_s, step_j = 0.0790e-3 * 16 + 6.54e-3, 0.0665 * 16 + 3.162
    assert summary.power_w_mean == pytest.approx(step_j / step_s, rel=0.01)
    assert summary.throughput_per_s == pytest.approx(16 / (50 * step_s), rel=0.01)
    assert summary.utilisation == pytest.approx(1.0, rel=0.01)


# ---- load ----


@pytest.mark.parametrize(
    ("values", "capacity_per_s"),
    [
        ({"barrier": True}, 128 / (1 + 19 * 128 / 129)),
        ({"barrier": True, "engines": 3, "prefill_s": 4.0}, 3 * 128 / (4 + 1 + 19 * 128 / 129)),
        ({"slots": 64}, 64 / (1 + 19 * 64 / 65)),
    ],
)
def test_load_1_is_the_rate_of_full_batches_of_one_bin(values: dict[str, object], capacity_per_s: float) -> None:
    """The longest of B lengths uniform on [1, 20] has mean 1 + 19 B / (B + 1) (Multi-Bin, eq. 17)."""
    scenario = Scenario(lengths="uniform:1,20", load=0.5, **{"step_s": 1.0, **values})  # type: ignore[arg-type]
    work = prepare(scenario, scheduling(batch_size=128))
    assert work.arrival_rate_per_s == pytest.approx(0.5 * capacity_per_s, rel=2e-3)
    assert work.trace.rate_per_s == pytest.approx(work.arrival_rate_per_s, rel=0.03)


def test_load_of_a_profile_takes_its_step_at_the_full_batch() -> None:
    scenario = Scenario(lengths="constant:1", load=0.7, profile="p4-googlenet", barrier=True)
    work = prepare(scenario, scheduling(batch_size=32))
    assert work.arrival_rate_per_s == pytest.approx(0.7 * 32 / (0.3051e-3 * 32 + 1.0524e-3))


def test_one_bin_holds_just_under_load_1_and_not_above_it() -> None:
    def latency_s(load: float) -> float:
        scenario = Scenario(requests=20_000, load=load, barrier=True, seed=2)
        return simulate(scenario, scheduling(bins=1)).latency_s_p50

    assert latency_s(1.3) > 10 * latency_s(0.8)


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


def test_a_trace_can_be_cut_and_hurried(trace: str) -> None:
    work = prepare(Scenario(trace=trace, trace_speed=5.0, requests=2), scheduling(batch_size=8))
    assert work.trace.arrivals_s.tolist() == [0.1, 0.5]
    assert work.trace.output_tokens.tolist() == [100, 50]
    assert work.arrival_rate_per_s == pytest.approx(2 / 0.4)
    assert sorted(work.scores) == [50, 100]


def test_a_compressed_trace_reads_as_the_plain_one(trace: str, tmp_path: Path) -> None:
    (tmp_path / "trace.csv.gz").write_bytes(gzip.compress(TRACE.encode()))
    plain, compressed = workload.read_trace(trace), workload.read_trace(f"{trace}.gz")
    for column in ("arrivals_s", "input_tokens", "output_tokens"):
        assert getattr(plain, column).tolist() == getattr(compressed, column).tolist()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column arrival_s, input_tokens, output_tokens"),
        ("arrival_s,output_tokens\n1,2\n", "no column input_tokens"),
        ("arrival_s,input_tokens,output_tokens\n", "no rows"),
        ("arrival_s,input_tokens,output_tokens\n0,1,5\n1,1,many\n", "row 3: output_tokens must be a number"),
        ("arrival_s,input_tokens,output_tokens\n0,1\n", "row 2: output_tokens must be a number"),
        ("arrival_s,input_tokens,output_tokens\n0,1,0\n", "row 2: output_tokens must be above 0"),
        ("arrival_s,input_tokens,output_tokens\n0,-1,3\n", "row 2: input_tokens must be finite and at least 0"),
        ("arrival_s,input_tokens,output_tokens\nnan,1,3\n", "row 2: arrival_s must be finite"),
        ("arrival_s,input_tokens,output_tokens\n5,1,3\n4,1,3\n", "row 3: arrivals must be in order"),
    ],
)
def test_a_malformed_trace_is_an_error_that_names_its_file_and_row(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        workload.read_trace(str(path))
    assert str(path) in str(error.value)


@pytest.mark.parametrize("damaged", [b"not gzip", gzip.compress(TRACE.encode())[:-12]])
def test_a_damaged_compressed_file_is_an_error_that_names_it(tmp_path: Path, damaged: bytes) -> None:
    path = tmp_path / "bad.csv.gz"
    path.write_bytes(damaged)
    with pytest.raises(ConfigError, match=r"the trace .*bad\.csv\.gz"):
        workload.read_trace(str(path))
    with pytest.raises(ConfigError, match=r"cannot read the lengths file .*bad\.csv\.gz"):
        workload.draw_lengths(f"file:{path}", 1, np.random.default_rng(0))


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


def told(capsys: pytest.CaptureFixture[str], flags: str) -> dict[str, float]:
    """1,000 requests on an H100 that runs batches of up to 8 to their end, unless the flags say otherwise."""
    command = f"simulate --requests 1000 --profile {H100} --batch-size 8 --bins 4 --load 0.4 --seed 1 {flags} --json"
    assert main(command.split()) == 0
    summary: dict[str, float] = json.loads(capsys.readouterr().out)
    return summary


def test_the_command_weighs_energy_and_latency_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--release table --barrier"
    fast, frugal = told(capsys, flags), told(capsys, f"{flags} --energy-weight 20")
    assert frugal["energy_j_per_token"] < 0.92 * fast["energy_j_per_token"]
    assert frugal["latency_s_mean"] > 1.1 * fast["latency_s_mean"]
    assert frugal["batch_size_mean"] > 1.5 * fast["batch_size_mean"]


def test_the_command_keeps_a_latency_target_with_least_energy(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--release table --barrier"
    fast, within = told(capsys, flags), told(capsys, f"{flags} --latency-target-s 6")
    assert fast["latency_s_mean"] < 0.8 * 6
    assert 0.85 * 6 < within["latency_s_mean"] < 1.1 * 6
    assert within["energy_j_per_token"] < 0.92 * fast["energy_j_per_token"]


def test_the_command_makes_batches_as_large_as_a_deadline_allows(capsys: pytest.CaptureFixture[str]) -> None:
    summaries = [told(capsys, f"--release deadline --barrier --latency-target-s {target_s}") for target_s in (10, 30)]
    for summary, target_s in zip(summaries, (10, 30), strict=True):
        assert 0.5 * target_s < summary["latency_s_mean"] < target_s
    assert summaries[1]["batch_size_mean"] > 1.2 * summaries[0]["batch_size_mean"]
    assert summaries[1]["energy_j_per_token"] < summaries[0]["energy_j_per_token"]


def test_the_command_waits_for_full_batches_only_of_engines_that_run_them_to_their_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = f"simulate --requests 300 --profile {H100} --load 0.2 --bins 4 --seed 1"
    for flags, same, title in (
        ("", "--release greedy --batch-size 1", "batches of 1, release greedy, order shortest, 1 refill engine"),
        ("--barrier", "--barrier --release full", "batches of 8, release full, order fffs, 1 barrier engine"),
        ("--release full", "--release full --batch-size 32", "batches of 32, release full, order shortest, 1 refill"),
    ):
        outs = []
        for each in (flags, same):
            assert main([*command.split(), *each.split()]) == 0
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
        ("--profile h100-lama", "did you mean h100-llama-3.1-8b"),
        ("--profile p4-googlenet --slots 64", "of 32 sequences, not 64"),
        ("--load 0.5 --arrival-rate 3", "arrival_rate cannot be given with load"),
        ("--load 0", "load"),
        ("--load 0.5 --step-s 0", "no capacity"),
        ("--trace /nowhere.csv", "no trace '/nowhere.csv'"),
        ("--trace t.csv --lengths constant:3", "lengths cannot be given with trace"),
        ("--trace t.csv --load 0.5", "load cannot be given with trace"),
        ("--trace-speed 2", "no trace to speed up"),
        ("--predictions quantiles:-1", "is not one of"),
        ("--release table", "release table needs --profile"),
        ("--energy-weight 20", "energy_weight is of no use under release greedy, only under table"),
        ("--latency-target-s 9 --barrier", "latency_target_s is of no use under release full, only under table and"),
        ("--latency-target-s 0", "latency_target_s"),
    ],
)
def test_what_makes_no_sense_is_said_in_one_line(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--requests", "10", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_what_makes_no_sense_leaves_an_earlier_journal_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text("of an earlier run")
    for flags in ("--release table", "--edges 5,5 --bins 3"):
        assert main(["simulate", "--requests", "10", *flags.split(), "--journal", str(path)]) == 2
    assert path.read_text() == "of an earlier run"


# ---- workloads ----


def test_lengths_come_from_a_column_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,5,100\n1,6,200\n")
    rng = np.random.default_rng(0)
    assert set(workload.draw_lengths(f"file:{path}", 50, rng)) == {100, 200}
    assert set(workload.draw_lengths(f"file:{path}:input_tokens", 50, rng)) == {5, 6}
    with pytest.raises(ConfigError, match="no column 'tokens'"):
        workload.draw_lengths(f"file:{path}:tokens", 1, rng)


def test_lengths_come_from_a_plain_list_of_numbers(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("3\n4\n")
    assert set(workload.draw_lengths(f"file:{path}", 50, np.random.default_rng(0))) == {3, 4}


def test_lengths_come_from_a_compressed_file_too(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv.gz"
    path.write_bytes(gzip.compress(b"output_tokens\n3\n4\n"))
    assert set(workload.draw_lengths(f"file:{path}", 50, np.random.default_rng(0))) == {3, 4}


@pytest.mark.parametrize("text", ["", "output_tokens\n", "output_tokens\nmany\n", "output_tokens\n-3\n"])
def test_a_file_without_usable_lengths_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match="lengths file"):
        workload.draw_lengths(f"file:{path}", 1, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("text", "mean"),
    [("uniform:1,20", 10.5), ("exponential:50", 50), ("lognormal:3,0.5", np.exp(3.125)), ("constant:7", 7)],
)
def test_distributions_have_their_means(text: str, mean: float) -> None:
    lengths = workload.draw_lengths(text, 100_000, np.random.default_rng(0))
    assert lengths.min() > 0
    assert lengths.mean() == pytest.approx(mean, rel=0.02)


def test_poisson_arrivals_have_their_rate_and_infinite_means_all_at_once() -> None:
    arrivals_s = workload.poisson_arrivals(4.0, 40_000, np.random.default_rng(0))
    assert arrivals_s[-1] == pytest.approx(10_000, rel=0.02)
    assert np.diff(arrivals_s).std() == pytest.approx(0.25, rel=0.03)
    assert not workload.poisson_arrivals(np.inf, 5, np.random.default_rng(0)).any()


def test_predicted_quantiles_tell_the_error_that_the_medians_have() -> None:
    """The true length is below the quantile of level p in a share p of the cases, but for the lengths' own spread."""
    lengths = np.full(40_000, 100.0)
    predictions = workload.predict("quantiles:0.5", lengths, np.random.default_rng(0))
    assert predictions is not None
    assert np.std(np.log(predictions.medians / 100)) == pytest.approx(0.5, rel=0.02)
    quantiles = np.outer(predictions.medians, predictions.quantiles)  # (requests, levels)
    assert (lengths[:, None] <= quantiles).mean(axis=0) == pytest.approx((np.arange(15) + 0.5) / 15, abs=0.01)


def test_requests_carry_their_quantiles_around_their_median() -> None:
    trace = workload.Trace(np.array([1.0, 2.0]), np.array([100.0, 10.0]), np.array([5.0, 6.0]))
    predictions = workload.predict("quantiles:0.3", trace.output_tokens, np.random.default_rng(0))
    assert predictions is not None
    for (at_s, request), arrival_s in zip(workload.requests(trace, predictions), (1.0, 2.0), strict=True):
        assert at_s == arrival_s
        assert len(request.quantiles) == 15
        assert request.quantiles[7] == request.predicted_tokens == predictions.medians[request.id]
        assert list(request.quantiles) == sorted(request.quantiles)
        assert request.prompt_tokens == 5 + request.id


def test_first_edges_go_by_the_risk_of_predicted_quantiles() -> None:
    lengths = {"lengths": "lognormal:5,0.5", "requests": 10}
    known = prepare(Scenario(predictions="quantiles:0.8", **lengths), scheduling(batch_size=8))  # type: ignore[arg-type]
    oracle = prepare(Scenario(**lengths), scheduling(batch_size=8))  # type: ignore[arg-type]
    longest_of_8 = np.exp(0.8 * 1.4236)  # about, of its median: the expected largest of 8 normals is 1.4236
    assert np.median(known.scores) > 0.9 * longest_of_8 * np.median(oracle.scores)
