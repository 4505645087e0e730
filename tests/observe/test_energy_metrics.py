"""Measured joules, and joules and watts in /metrics and in the benchmark's table."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_nvml import FakeNvml, Gpu
from front import Front, StartFront, until
from prometheus_client.parser import text_string_to_metric_families
from test_energy import IDLE_W, ended, power_w, profile, timed

from bins.curve import Curve
from bins.dispatch import DispatchPlan, DispatchTable, Observed
from llmserve.commands import bench
from llmserve.commands.simulate import Scenario, simulate
from llmserve.engines.power import GpuEnergy
from llmserve.engines.timed.server import FakeEngine
from llmserve.errors import ConfigError
from llmserve.live.cluster import LiveCluster
from llmserve.live.fleet import Fleet
from llmserve.live.journal import Header, Journal
from llmserve.observe.energy import EnergyMeter, MeasuredEnergy
from llmserve.observe.metrics import Metrics
from llmserve.request import Batch, Request
from llmserve.scheduling.messages import (
    Action,
    DispatchSolved,
    Event,
    RequestArrived,
    RequestEnded,
    SolveDispatch,
    StartBatch,
    TimerFired,
)
from llmserve.server.serving import serving
from llmserve.settings.dispatch import DispatchConfig
from llmserve.settings.policies import SchedulingConfig
from llmserve.settings.tree import Config, EngineConfig, ServerConfig

# ---- measured -------------------------------------------------------------------------------------------------------


async def sampled(energy: MeasuredEnergy, clock: Callable[[], float], joules: float) -> None:
    """Return once the energy has reached so many joules."""
    async with energy.sampling(clock):
        await until(lambda: energy.joules(clock()) == pytest.approx(joules))


async def test_measured_joules_are_the_gpus_counter_in_joules():
    gpu = Gpu(energy_mj=1_000)
    energy = MeasuredEnergy(GpuEnergy(FakeNvml(gpu)), of_all_work=True)
    gpu.energy_mj = 3_500
    assert energy.joules(1.0) == 0.0, "the counter has not been read yet"
    await sampled(energy, lambda: 1.0, 2.5)


async def test_reading_joules_does_not_wait_for_the_gpus():
    """The GPUs' driver does not answer, nor does the thread that reads it."""
    answers = threading.Event()
    gpu = Gpu(energy_mj=0)
    energy = MeasuredEnergy(GpuEnergy(FakeNvml(gpu)), of_all_work=True)
    threads: list[int] = []

    def slow_mj() -> int:
        threads.append(threading.get_ident())
        answers.wait(30)
        return 2_000

    gpu.energy_mj = slow_mj
    scraped = Scraped(energy)
    async with energy.sampling(lambda: 1.0):
        await until(lambda: bool(threads))
        assert scraped.samples("llmserve_energy") == {"llmserve_energy_joules_total{nvml}": 0.0}
        assert not answers.is_set()
        answers.set()
        await until(lambda: energy.joules(1.0) == 2.0)
    assert threading.get_ident() not in threads


async def test_power_is_sampled_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two scrapes the power rises and falls again: the trapezoids in between include that."""
    monkeypatch.setattr("llmserve.observe.energy.SAMPLE_EVERY_S", 0.001)
    now_s = 0.0
    gpu = Gpu(power_mw=0)
    energy = MeasuredEnergy(GpuEnergy(FakeNvml(gpu)), of_all_work=True)

    reads = 0

    def clock() -> float:
        nonlocal reads
        reads += 1
        return now_s

    async def rest_at(at_s: float, power_mw: int) -> None:
        """Stay so until a whole reading has begun and ended."""
        nonlocal now_s
        now_s, gpu.power_mw = at_s, power_mw
        before = reads
        await until(lambda: reads >= before + 3)

    async with energy.sampling(clock):
        for at_s, power_mw in ((0.0, 0), (1.0, 200_000), (2.0, 200_000), (3.0, 0)):
            await rest_at(at_s, power_mw)
    assert energy.joules(3.0) == pytest.approx(100 + 200 + 100)


# ---- /metrics -------------------------------------------------------------------------------------------------------


class FixedMeter:
    """Draws 50 W from time 0 on."""

    source = "modelled"

    def __init__(self, *, of_all_work: bool = True) -> None:
        self.of_all_work = of_all_work

    def joules(self, now_s: float) -> float:
        return 50.0 * now_s


class Scraped:
    """Metrics of a journal that the test writes, at a time that the test sets."""

    def __init__(self, *meters: EnergyMeter, energy_known: bool = True) -> None:
        self.now_s = 0.0
        header = Header(SchedulingConfig().resolved(barrier=True))
        cluster = LiveCluster(header.scheduler(), Fleet([]), Journal(header), clock=lambda: self.now_s)
        self.metrics = Metrics(cluster, 8, meters, energy_known=energy_known)
        self._journal = cluster.journal

    def step(self, event: Event, *actions: Action) -> None:
        self._journal.append(self.now_s, event, actions)

    def samples(self, *prefixes: str) -> dict[str, float]:
        return samples(self.metrics.render().decode(), *prefixes)


def samples(text: str, *prefixes: str) -> dict[str, float]:
    """Samples of the exposition whose names begin with a prefix; a source stands in braces."""
    all_samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        sample.name + (f"{{{sample.labels['source']}}}" if "source" in sample.labels else ""): sample.value
        for sample in all_samples
        if sample.name.startswith(prefixes)
    }


def test_joules_are_shared_among_the_completed_requests_and_their_tokens():
    scraped = Scraped(FixedMeter())
    scraped.now_s = 2.0
    assert scraped.samples("llmserve_energy") == {"llmserve_energy_joules_total{modelled}": 100.0}
    for request in (Request(1), Request(2, choices=3), Request(3)):
        scraped.step(RequestArrived(request), StartBatch("a", Batch(request.id, 0, (request,), 0.0, 1)))
    scraped.step(ended(1, tokens=10.0))
    scraped.step(ended(2, tokens=5.0))  # tokens of each of its three choices
    scraped.step(RequestEnded("a", 3, "failed", 99.0))
    scraped.now_s = 3.0
    assert scraped.samples("llmserve_energy", "llmserve_output_tokens_total") == {
        "llmserve_energy_joules_total{modelled}": 150.0,
        "llmserve_energy_joules_per_output_token{modelled}": 150.0 / 25,
        "llmserve_energy_joules_per_request{modelled}": 150.0 / 2,
        "llmserve_output_tokens_total": 25.0,
    }


def test_requests_without_tokens_have_joules_per_request_and_none_per_token():
    scraped = Scraped(FixedMeter())
    scraped.step(RequestArrived(Request(1)))
    scraped.step(ended(1, tokens=0.0))
    assert sorted(scraped.samples("llmserve_energy")) == [
        "llmserve_energy_joules_per_request{modelled}",
        "llmserve_energy_joules_total{modelled}",
    ]


def test_joules_of_some_engines_are_not_divided_among_all_requests():
    scraped = Scraped(FixedMeter(of_all_work=False))
    scraped.step(RequestArrived(Request(1)))
    scraped.step(ended(1, tokens=10.0))
    scraped.now_s = 2.0
    assert scraped.samples("llmserve_energy") == {"llmserve_energy_joules_total{modelled}": 100.0}


def test_without_a_meter_there_are_no_energy_metrics_and_without_a_plan_no_dispatch_metrics():
    text = Scraped().metrics.render().decode()
    assert "energy" not in text
    assert "dispatch" not in text
    assert "arrival_rate" not in text


def plan(queues: int = 2, **fields: Any) -> DispatchPlan:
    table = DispatchTable((0, 1), (), (), (1.0,), (1.0,), 1.0)
    return DispatchPlan((0,) * (4 - queues) + tuple(range(queues)), (table,) * queues, **fields)


def observed(*rates_per_s: float) -> Observed:
    return Observed(rates_per_s, ((10.0,),) * len(rates_per_s), engines=1, slots=1, queues=1)


PLANNED = ("llmserve_dispatch", "llmserve_arrival_rate")


def test_the_current_plan_and_its_expectations_are_metrics():
    scraped = Scraped()
    scraped.step(TimerFired(), SolveDispatch(observed(0.0, 0.0)))
    assert scraped.samples(*PLANNED) == {"llmserve_dispatch_plans_total": 0.0}
    scraped.step(DispatchSolved(plan()))
    assert scraped.samples(*PLANNED) == {"llmserve_dispatch_plans_total": 1.0, "llmserve_dispatch_queues": 2.0}
    scraped.step(TimerFired(), SolveDispatch(observed(1.5, 0.25)))
    expected = {"latency_target_s": 2.0, "response_s_mean": 1.75, "power_w_mean": 310.0, "target_met": False}
    scraped.step(DispatchSolved(plan(1, **expected)))
    assert scraped.samples(*PLANNED) == {
        "llmserve_dispatch_plans_total": 2.0,
        "llmserve_arrival_rate_per_second": 1.75,
        "llmserve_dispatch_queues": 1.0,
        "llmserve_dispatch_response_seconds_expected": 1.75,
        "llmserve_dispatch_power_watts_expected": 310.0,
        "llmserve_dispatch_target_met": 0.0,
    }
    scraped.step(DispatchSolved(plan(1, **{**expected, "target_met": True})))
    assert scraped.samples("llmserve_dispatch_target_met") == {"llmserve_dispatch_target_met": 1.0}


def test_unknown_watts_are_no_metric():
    scraped = Scraped(energy_known=False)
    scraped.step(DispatchSolved(plan(1, response_s_mean=1.75, power_w_mean=0.4)))
    assert scraped.samples("llmserve_dispatch_response", "llmserve_dispatch_power") == {
        "llmserve_dispatch_response_seconds_expected": 1.75
    }


@pytest.mark.parametrize("fields", [{"response_s_mean": 1.0}, {"latency_target_s": 2.0}], ids=["target", "expectation"])
def test_a_target_is_neither_met_nor_missed_without_a_target_or_an_expectation(fields: dict[str, float]):
    scraped = Scraped()
    scraped.step(DispatchSolved(plan(**fields)))
    assert scraped.samples("llmserve_dispatch_target_met") == {}


# ---- a live server --------------------------------------------------------------------------------------------------


@pytest.fixture
def profile_file(tmp_path: Path) -> str:
    profile().save(tmp_path / "profile.json")
    return str(tmp_path / "profile.json")


async def scrape(front: Front, *prefixes: str) -> dict[str, float]:
    async with front.session.get(f"{front.url}/metrics") as response:
        return samples(await response.text(), *prefixes)


async def complete(front: Front, **fields: Any) -> None:
    async with front.post(**fields) as response:
        assert response.status == 200
        await response.read()


async def test_a_live_batch_draws_its_power_while_it_runs(start_front: StartFront, profile_file: str) -> None:
    """The bounds are exact: the engine runs at least its steps' time, and at most while the client waits."""
    total = "llmserve_energy_joules_total{modelled}"
    async with FakeEngine(slots=4, step_s=0.01, barrier=True) as engine:
        front = await start_front(
            engine,
            barrier=True,
            scheduling={"batch_size": 4, "release": "full", "bins": 1},
            dispatch=DispatchConfig(profile=(profile_file,)),
        )
        first_s = time.monotonic()
        metrics_before = await scrape(front, "llmserve_energy")
        began_s = time.monotonic()
        await asyncio.gather(*(complete(front, max_tokens=tokens) for tokens in (60, 5, 20, 40)))
        await until(lambda: not front.cluster.scheduler.requests)
        waited_s = time.monotonic() - began_s
        metrics_after = await scrape(front, "llmserve_energy")
        scraped_s = time.monotonic() - first_s
    assert sorted(metrics_before) == [total]
    most_j = waited_s * power_w(4) + (scraped_s - waited_s) * IDLE_W
    assert 60 * 0.01 * power_w(4) <= metrics_after[total] - metrics_before[total] <= most_j
    assert metrics_after["llmserve_energy_joules_per_request{modelled}"] * 4 == pytest.approx(metrics_after[total])
    assert metrics_after["llmserve_energy_joules_per_output_token{modelled}"] * 125 == pytest.approx(
        metrics_after[total]
    )


def test_plans_that_are_not_the_best_are_counted_by_reason():
    scraped = Scraped()
    scraped.step(TimerFired(), SolveDispatch(observed(1.0, 1.0)))
    assert scraped.samples("llmserve_dispatch_fallbacks") == {}
    for reason in ("overload", "", "unsolved", "overload"):
        scraped.step(DispatchSolved(plan(fallback=reason)))
    text = scraped.metrics.render().decode()
    assert 'llmserve_dispatch_fallbacks_total{reason="overload"} 2.0' in text
    assert 'llmserve_dispatch_fallbacks_total{reason="unsolved"} 1.0' in text
    assert scraped.samples("llmserve_dispatch_plans") == {"llmserve_dispatch_plans_total": 4.0}


@pytest.mark.parametrize(
    ("step_s", "reason", "message"),
    [
        (0.001, "unsolved", "a decision process of fake could not be solved at"),
        (1e6, "overload", "no dispatch plan of fake carries"),
    ],
)
async def test_a_server_says_and_counts_that_its_plan_is_not_the_best(
    step_s: float,
    reason: str,
    message: str,
    start_front: StartFront,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    def unsolvable(*_: object) -> None:
        raise np.linalg.LinAlgError("singular")

    monkeypatch.setattr("bins.smdp_model.Equations.solve", unsolvable)
    profile(step_s=Curve.affine(0.0, step_s), idle_w=0.0).save(tmp_path / "profile.json")
    async with FakeEngine(slots=4, step_s=0.001, barrier=True) as engine:
        front = await start_front(
            engine,
            barrier=True,
            scheduling={"batch_size": 4, "release": "table", "bins": 1},
            dispatch=DispatchConfig(profile=(str(tmp_path / "profile.json"),), energy_weight=1e9),
        )
        for _ in range(64):  # until the arrival rate is known
            await complete(front, max_tokens=5)
        await until(lambda: message in caplog.text)
        async with front.session.get(f"{front.url}/metrics") as response:
            assert f'llmserve_dispatch_fallbacks_total{{reason="{reason}"}}' in await response.text()


async def test_a_server_whose_release_follows_a_plan_has_its_metrics(
    start_front: StartFront, profile_file: str
) -> None:
    async with FakeEngine(slots=4, step_s=0.001, barrier=True) as engine:
        front = await start_front(
            engine,
            barrier=True,
            scheduling={"batch_size": 4, "release": "table", "bins": 2},
            dispatch=DispatchConfig(profile=(profile_file,), energy_weight=1.0),
        )
        for _ in range(12):
            await complete(front, max_tokens=5)
        await until(lambda: any(isinstance(step.event, DispatchSolved) for step in front.cluster.journal.steps))
        metrics = await scrape(front, *PLANNED)
    assert metrics["llmserve_dispatch_plans_total"] >= 1
    assert metrics["llmserve_dispatch_queues"] in (1.0, 2.0)


async def scrape_until(front: Front, name: str, value: float) -> dict[str, float]:
    """Energy metrics once `name` has this value: readings of the GPUs come with a delay."""
    async with asyncio.timeout(30):
        while (metrics := await scrape(front, "llmserve_energy")).get(name) != value:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return metrics


async def test_the_gpus_of_this_machine_are_measured_while_the_server_runs(
    start_front: StartFront, monkeypatch: pytest.MonkeyPatch, profile_file: str
) -> None:
    gpu = Gpu(energy_mj=0)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(gpu))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, dispatch=DispatchConfig(profile=(profile_file,)))
        gpu.energy_mj = 12_000
        await complete(front, max_tokens=4)
        await until(lambda: not front.cluster.scheduler.requests)
        metrics = await scrape_until(front, "llmserve_energy_joules_total{nvml}", 12.0)
    assert metrics["llmserve_energy_joules_per_output_token{nvml}"] == 3.0
    assert metrics["llmserve_energy_joules_per_request{nvml}"] == 12.0
    assert metrics["llmserve_energy_joules_total{modelled}"] > 0


async def test_beside_a_remote_engine_the_joules_of_this_machine_are_not_divided(
    start_front: StartFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(energy_mj=0)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(gpu))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, "http://engine.invalid:8001", wait=False)
        await until(lambda: any(front.cluster.engines_ready.values()))
        await complete(front, max_tokens=4)
        gpu.energy_mj = 12_000
        metrics = await scrape_until(front, "llmserve_energy_joules_total{nvml}", 12.0)
    assert metrics == {"llmserve_energy_joules_total{nvml}": 12.0}


# A stand-in for an interpreter that has vLLM: when asked with -c, it confirms that vLLM is installed.
STAND_IN = """#!{python}
import os, sys
if sys.argv[1] != "-c":
    port = sys.argv[sys.argv.index("--port") + 1]
    os.execv(sys.executable, [sys.executable, "-m", "llmserve.engines.timed", "--port", port])
"""


@pytest.mark.parametrize(
    ("replicas", "beside", "joules"), [(1, False, 100.0), (2, False, 101.0), (None, False, 111.0), (1, True, 111.0)]
)
async def test_only_the_gpus_that_engines_may_use_are_counted(
    replicas: int | None,
    beside: bool,
    joules: float,
    start_front: StartFront,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Replicas take one GPU each, the third GPU first; an engine that already runs here may use any visible GPU."""
    gpus = [Gpu(energy_mj=0, uuid=f"GPU-{name}") for name in "abcd"]
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*gpus))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0,1")
    (tmp_path / "python").write_text(STAND_IN.format(python=sys.executable))
    (tmp_path / "python").chmod(0o755)
    async with FakeEngine() as other:
        engines = EngineConfig(
            engine=("vllm", other.url) if beside else ("vllm",),
            model="m",
            replicas=replicas,
            engine_python=str(tmp_path / "python"),
            engine_log_folder=str(tmp_path),
        )
        front = await start_front(engines=engines)
        for gpu, drawn_j in zip(gpus, (1, 10, 100, 1000), strict=True):
            gpu.energy_mj = 1_000 * drawn_j
        metrics = await scrape_until(front, "llmserve_energy_joules_total{nvml}", joules)
    assert metrics == {"llmserve_energy_joules_total{nvml}": joules}


async def test_a_profile_without_energy_serves_without_joules(
    start_front: StartFront, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    timed().save(tmp_path / "profile.json")
    async with FakeEngine(slots=4, step_s=0.001, barrier=True) as engine:
        front = await start_front(
            engine,
            barrier=True,
            scheduling={"batch_size": 4, "release": "table", "bins": 1},
            dispatch=DispatchConfig(profile=(str(tmp_path / "profile.json"),)),
        )
        for _ in range(3):
            await complete(front, max_tokens=5)
        metrics = await scrape(front, "llmserve_energy", "llmserve_dispatch")
    assert "llmserve_dispatch_plans_total" in metrics
    assert not [name for name in metrics if "energy" in name or "power" in name]
    assert "the profile timed has no energy" in caplog.text


def test_a_simulation_with_a_profile_without_energy_reports_none(tmp_path: Path) -> None:
    timed().save(tmp_path / "profile.json")
    scenario = Scenario(requests=50, barrier=True, profile=str(tmp_path / "profile.json"))
    summary = simulate(scenario, SchedulingConfig(batch_size=4, release="greedy"))
    assert summary.completed == 50
    assert (summary.energy_j, summary.energy_j_per_token, summary.power_w_mean) == (None, None, None)


async def test_nvml_is_shut_down_when_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(Gpu(energy_mj=0))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    async with FakeEngine() as engine:
        async with serving(Config(server=ServerConfig(port=0), engines=EngineConfig(engine=(engine.url,)))):
            assert nvml.open == 1
        assert nvml.open == 0


async def test_local_gpus_do_not_count_for_a_remote_engine(
    start_front: StartFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(Gpu(energy_mj=0)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    front = await start_front("http://engine.invalid:8001", wait=False)
    assert await scrape(front, "llmserve_energy") == {}


async def test_an_invalid_profile_is_an_error_for_every_release(start_front: StartFront) -> None:
    with pytest.raises(
        ConfigError, match=r"'h100' is neither a shipped profile nor a file; shipped profiles are h100-llama"
    ):
        await start_front("http://127.0.0.1:9", wait=False, dispatch=DispatchConfig(profile=("h100",)))


# ---- the benchmark's table ------------------------------------------------------------------------------------------


def rows(**joules: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Rows of arrangements by name; each run answers two prompts with 10 and 30 tokens."""
    runs = {
        name: [bench.BenchRun(1.0, [10, 30], ["a", "a"], [0.5, 1.0], joules_of_run) for joules_of_run in of]
        for name, of in joules.items()
    }
    runs[bench.BASELINE.name] = runs.pop("plain")
    return bench.rows(runs, np.poly1d([0.01, 0.0]))


def test_joules_of_a_run_are_divided_by_its_tokens_and_requests_with_the_median_over_rounds():
    (row,) = rows(plain=[{"modelled": joules} for joules in (80.0, 800.0, 120.0)])
    assert (row["joules_per_token"], row["joules_per_request"], row["energy_source"]) == (3.0, 60.0, "modelled")


def test_measured_joules_precede_modelled_ones():
    (row,) = rows(plain=[{"modelled": 80.0, "nvml": 40.0}])
    assert (row["joules_per_token"], row["energy_source"]) == (1.0, "nvml")


def test_the_table_names_the_source_and_is_blank_without_one(capsys: pytest.CaptureFixture[str]):
    results = rows(plain=[{"modelled": 80.0}], direct=[{}])
    assert [row["energy_source"] for row in results] == [None, "modelled"]
    bench.print_table(results, "a title")
    output = capsys.readouterr().out
    assert "joules: modelled" in output
    assert "None" not in output
    bench.print_table(rows(plain=[{}]), "a title")
    assert "joules" not in capsys.readouterr().out


async def test_the_benchmark_reads_the_servers_counter_before_and_after_each_run(
    start_front: StartFront, profile_file: str
) -> None:
    async with FakeEngine(slots=4, step_s=0.01, model=bench.MODEL) as engine:
        front = await start_front(engine, slots=4, dispatch=DispatchConfig(profile=(profile_file,)))
        done = await bench.run(front.url, ["a", "b", "c", "d"], None)
        plain = await bench.run(engine.url, ["a"], None)
    assert plain.joules == {}
    assert done.joules["modelled"] >= 16 * 0.01 * power_w(4)  # 16 tokens each; exact, for the power is affine
    assert sum(done.lengths) == 64


async def test_a_server_without_metrics_has_no_joules() -> None:
    async with FakeEngine() as engine, bench.client_of(engine.url) as client:
        assert await bench.joules(client) == {}
