"""The script that measures engines: the fake engine's known step time, a simulation's journal, and errors."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fake_nvml import FakeNvml, Gpu
from missing_modules import without
from script_module import load_script

from bins.curve import Curve
from bins.fitting import Observation
from bins.profile import Profile
from llmserve.__main__ import main as llmserve
from llmserve.commands import profile as profiling
from llmserve.engines import measuring
from llmserve.engines.power import GpuEnergy
from llmserve.engines.timed.server import FakeEngine
from llmserve.runtime.installation import pip_install

STEP_S, PREFILL_S = 0.01, 0.1


script = load_script("profile_engine")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the machine's GPUs; a test that needs a GPU adds its own."""
    monkeypatch.setitem(sys.modules, "pynvml", None)


async def run(*argv: object) -> None:
    """Run the command beside the engine that runs in this event loop."""
    await asyncio.to_thread(script.main, [str(word) for word in argv])


def plan(**changes: Any) -> Any:
    return measuring.MeasuringPlan(**{"sizes": (1, 4), "output_tokens": 8, "rounds": 1, "seed": 0, **changes})


# ---- an engine ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("barrier", [False, True])
async def test_the_fake_engines_step_and_prefill_are_found(
    barrier: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The fake steps cost the same at every size. A timer is about a millisecond late, never early."""
    path, figure = tmp_path / "profile.json", tmp_path / "profile.png"
    async with FakeEngine(slots=8, step_s=STEP_S, prefill_s=PREFILL_S, barrier=barrier) as engine:
        flags = ["--sizes", "8,1,4", "--output-tokens", 32, "--rounds", 1, "--output", path, "--plot", figure]
        await run("--engine", engine.url, "--busy-power-w", 300, "--idle-power-w", 60, *flags)
        bodies = [json.loads(body) for body in engine.bodies]
    profile = Profile.load(path)
    assert profile.step_s.at([1, 8]) == pytest.approx([STEP_S, STEP_S], rel=0.2)
    assert profile.prefill_s == pytest.approx(PREFILL_S, rel=0.4)
    assert profile.step_s.sizes == (1, 4, 8)
    assert profile.step_s.error < 0.1
    assert profile.power_w([1, 8]) == pytest.approx([300, 300])
    assert (profile.name, profile.idle_w, profile.energy_source) == ("fake", 60, "modelled")
    assert "fake, batches of 1, 4, 8 sequences with 8 and 32 output tokens, 1 round." in profile.source
    assert "Energy modelled as 300 W while running." in profile.source
    assert figure.read_bytes().startswith(b"\x89PNG")
    # One request to learn, one batch to warm up, then all sizes with two lengths each.
    assert len(bodies) == 1 + 8 + 2 * (1 + 4 + 8)
    assert len({body["prompt"].split()[0] for body in bodies}) == len(bodies)
    assert all(body["min_tokens"] == body["max_tokens"] and body["ignore_eos"] for body in bodies)
    printed = capsys.readouterr()
    assert "batch 6/6: " in printed.err
    assert "fake: step" in printed.out


async def test_the_joules_of_nvml_become_the_profiles_energy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A GPU with a constant 200 W: 200 J for every second of a step, and 200 W when idle."""
    gpu = Gpu(energy_mj=lambda: round(200e3 * time.monotonic()), name="Fake H100")
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(gpu))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(profiling, "IDLE_S", 0.2)
    path = tmp_path / "profile.json"
    async with FakeEngine(step_s=STEP_S) as engine:
        await run("--engine", engine.url, "--sizes", "1,4", "--output-tokens", 16, "--rounds", 1, "--output", path)
    profile = Profile.load(path)
    assert profile.energy_source == "measured"
    assert profile.idle_w == pytest.approx(200, rel=0.02)
    assert profile.step_j.values == pytest.approx([200 * seconds for seconds in profile.step_s.values], rel=0.02)
    assert "fake on Fake H100" in profile.source
    assert "Energy measured by NVML." in profile.source


async def test_a_gpu_without_a_counter_is_sampled_while_batches_run():
    """The power is 400 W while the engine is busy and 100 W otherwise; a sample every 50 ms shows that."""
    async with FakeEngine(step_s=STEP_S) as engine:
        energy = GpuEnergy(FakeNvml(Gpu(power_mw=lambda: 400_000 if engine.running else 100_000)))
        measurement = plan(output_tokens=100)
        measured = await measuring.measure(engine.url, None, measurement, energy, idle_s=0.2, on_batch=lambda *_: None)
    assert measured.idle_w == pytest.approx(100, rel=1e-6)
    long = [batch for batch in measured.batches if batch.tokens == 100]
    assert len(long) == 2
    for batch in long:
        # The interval between two samples counts half at each end.
        assert batch.joules == pytest.approx(400 * batch.seconds, rel=0.1)


async def test_without_a_gpu_and_without_watts_the_profile_has_only_times_and_a_message_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path, figure = tmp_path / "profile.json", tmp_path / "profile.png"
    flags = ["--sizes", "1,2", "--output-tokens", 8, "--rounds", 1, "--output", path, "--plot", figure]
    async with FakeEngine(step_s=0.001) as engine:
        await run("--engine", engine.url, *flags)
    profile = Profile.load(path)
    assert profile.energy_source == "unknown"
    assert profile.source.endswith("1 round. Energy is not known.")
    printed = capsys.readouterr()
    message = "profile_engine: energy is not known: no GPU can be measured here, and --busy-power-w is not given."
    assert printed.err.startswith(message), "the message must come before the measurement"
    assert "step (ms)" in printed.out
    assert "step (J)" not in printed.out
    assert "power (W)" not in printed.out
    assert figure.read_bytes().startswith(b"\x89PNG")


async def test_constant_counters_of_gpus_leave_the_energy_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(Gpu(energy_mj=7)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    flags = ["--sizes", "1,2", "--output-tokens", 8, "--rounds", 1, "--output", tmp_path / "profile.json"]
    async with FakeEngine(step_s=0.001) as engine:
        await run("--engine", engine.url, "--idle-power-w", 90, *flags)
    assert Profile.load(tmp_path / "profile.json").energy_source == "unknown"
    assert "energy is not known: the GPUs counted no joules" in capsys.readouterr().err


@pytest.mark.parametrize("names", [["H100"], ["H100", "P4"]])
async def test_the_counted_gpus_are_named_and_several_cause_a_warning(
    names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    gpus = [Gpu(energy_mj=lambda: round(200e3 * time.monotonic()), name=name) for name in names]
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*gpus))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    flags = ["--sizes", "1,2", "--output-tokens", 8, "--rounds", 1, "--idle-power-w", 9]
    async with FakeEngine(step_s=0.001) as engine:
        await run("--engine", engine.url, *flags, "--output", tmp_path / "profile.json")
    output = capsys.readouterr().err
    if len(names) == 1:
        assert "energy is measured on the GPU H100\n" in output
        assert "warning" not in output
    else:
        assert "energy is measured on 2 GPUs H100, P4\n" in output
        assert "warning: all GPUs are counted; if the engine uses only some, name these in CUDA_VISIBLE" in output


def test_the_idle_power_is_limited_to_the_least_measured_power():
    batches = [Observation(size, tokens, 0.01 * tokens, 2.0 * tokens) for size in (1, 4) for tokens in (8, 32)]
    profile = profiling.profile_of(batches, name="x", origin="Made up", idle_w=203.0)
    assert profile.idle_w == pytest.approx(200.0)
    assert (
        profile.source == "Made up. Energy measured by NVML. Idle power 203 W, taken as 200 W, the least while running."
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--idle-power-w 90", "--idle-power-w needs --busy-power-w"),
        ("--idle-power-w 90 --busy-power-w 80", "--idle-power-w is 90, above --busy-power-w, 80"),
    ],
)
def test_invalid_watts_are_refused_before_anything_is_measured(flags: str, message: str):
    with pytest.raises(SystemExit, match=message):
        script.main(["--engine", "http://127.0.0.1:9", *flags.split()])


def test_without_matplotlib_a_figure_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch):
    without(monkeypatch, "matplotlib")
    with pytest.raises(SystemExit, match=re.escape(f"error: --plot needs matplotlib: {pip_install('plot')}")):
        script.main(["--engine", "http://127.0.0.1:9", "--plot", "profile.png"])


@asynccontextmanager
async def picky_engine(*, counts: bool = True, status: int = 400) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """An engine that refuses unknown fields and ends its n-th answer at n tokens. Yields its URL and the bodies."""
    bodies: list[dict[str, Any]] = []

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        if "min_tokens" in body or status != 400:
            return web.json_response({"error": {"message": "unknown field min_tokens"}}, status=status)
        bodies.append(body)
        tokens = min(len(bodies), body["max_tokens"])
        await asyncio.sleep(0.001 * tokens)
        usage = {"usage": {"prompt_tokens": 3, "completion_tokens": tokens}} if counts else {}
        return web.json_response({"choices": [{"text": "x" * tokens}], **usage})

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", bodies
    finally:
        await runner.cleanup()


async def test_where_lengths_cannot_be_forced_the_true_ones_count():
    async with picky_engine() as (url, bodies):
        measured = await measuring.measure(url, "m", plan(), None, idle_s=0, on_batch=lambda *_: None)
    # One answer of one token to learn, then four to warm up, then batches of 1 and 4 with lengths up to 2 and 8.
    assert [body["max_tokens"] for body in bodies[:5]] == [2, 8, 8, 8, 8]
    batches = plan().batches()
    assert [batch.size for batch in measured.batches] == [size for size, _ in batches]
    answered, longest = 5, []
    for size, tokens_max in batches:
        longest.append(min(answered + size, tokens_max))
        answered += size
    assert [batch.tokens for batch in measured.batches] == longest


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"counts": False}, "the engine neither returns usage.completion_tokens"),
        ({"status": 404}, "the engine answers 404: .*unknown field min_tokens"),
        ({"status": 500}, "the engine answers 500"),
    ],
)
async def test_an_engine_that_cannot_be_measured_is_an_error_of_one_line(engine: dict[str, Any], message: str):
    async with picky_engine(**engine) as (url, _):
        with pytest.raises(SystemExit, match=f"profile_engine: error: {message}"):
            await run("--engine", url, "--model", "m")


def test_a_missing_engine_is_an_error_of_one_line():
    with pytest.raises(SystemExit, match=r"profile_engine: error: .*does not answer"):
        script.main(["--engine", "http://127.0.0.1:9"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--sizes 4", "at least two different sizes"),
        ("--sizes 1,0", "must be a whole number of at least 1, not '0'"),
        ("--output-tokens 1", "a whole number of at least 2"),
        ("--busy-power-w 0", "must be a number of watts above 0, not '0'"),
        ("--busy-power-w warm", "must be a number of watts above 0, not 'warm'"),
        ("--journal x", "not allowed with argument --engine"),
    ],
)
def test_invalid_flags_are_refused(flags: str, message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        script.main(["--engine", "http://127.0.0.1:9", *flags.split()])
    assert message in capsys.readouterr().err


def test_rounds_differ_in_order_and_are_the_same_for_the_same_seed():
    rounds = plan(sizes=(1, 2, 4, 8), rounds=3).batches()
    parts = [rounds[start : start + 8] for start in (0, 8, 16)]
    every = [(size, tokens) for size in (1, 2, 4, 8) for tokens in (2, 8)]
    assert all(sorted(part) == every for part in parts)
    assert parts[0] != parts[1] != parts[2]
    assert rounds == plan(sizes=(1, 2, 4, 8), rounds=3).batches()
    assert rounds != plan(sizes=(1, 2, 4, 8), rounds=3, seed=1).batches()


# ---- a journal ----------------------------------------------------------------------------------------------------


def simulated(path: Path, *flags: str) -> Path:
    command = "simulate --requests 400 --arrival-rate 6 --batch-size 16 --seed 3 --step-s 0.004"
    assert llmserve([*command.split(), "--prefill-s", "0.05", "--journal", str(path), *flags]) == 0
    return path


def test_a_simulations_journal_gives_its_step_and_prefill_exactly(tmp_path: Path):
    journal, path = simulated(tmp_path / "night.jsonl", "--barrier"), tmp_path / "profile.json"
    flags = ["--journal", str(journal), "--busy-power-w", "400", "--idle-power-w", "90", "--output", str(path)]
    script.main(flags)
    profile = Profile.load(path)
    assert profile.step_s.at([1, 16]) == pytest.approx([0.004, 0.004], rel=1e-6)
    assert profile.prefill_s == pytest.approx(0.05, rel=1e-6)
    assert profile.step_s.error == pytest.approx(0.0, abs=1e-6)
    assert (profile.name, profile.idle_w) == ("night", 90)
    assert profile.power_w(8) == pytest.approx(400)
    assert "batches of a journal" in profile.source


def test_a_fit_that_misses_its_measurements_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    journal, path = simulated(tmp_path / "night.jsonl", "--barrier"), tmp_path / "profile.json"
    flags = ["--journal", str(journal), "--output", str(path)]
    script.main(flags)
    assert "Measure again" not in capsys.readouterr().err
    monkeypatch.setattr("bins.profile.FIT_ERROR_MAX", -1.0)
    script.main(flags)
    assert "the fit misses the measured steps by 0%" in capsys.readouterr().err


def test_a_saved_profile_says_whether_to_measure_again(tmp_path: Path):
    """One of the sizes happened to run on a busy machine, with steps ten times as long."""
    path = tmp_path / "profile.json"
    profile = Profile.timed("noisy", Curve.fit([1, 2, 4, 8], [0.01, 0.1, 0.01, 0.01]), slots_max=8, source="a test")
    assert profile.step_s.error > 0.2
    profile.save(path)
    assert "Measure again: llmserve profile, with more --rounds" in Profile.load(path).misfit
    steady = Profile.timed("steady", Curve.fit([1, 2, 4, 8], [0.01, 0.011, 0.012, 0.015]), slots_max=8, source="a test")
    assert steady.misfit == ""


def test_a_journal_without_barrier_batches_is_an_error(tmp_path: Path):
    journal = simulated(tmp_path / "refill.jsonl")
    with pytest.raises(SystemExit, match="no complete batch of a barrier engine"):
        script.main(["--journal", str(journal), "--output", str(tmp_path / "profile.json")])
    with pytest.raises(SystemExit, match="cannot read the journal"):
        script.main(["--journal", str(tmp_path / "none.jsonl")])
    assert not (tmp_path / "profile.json").exists()
