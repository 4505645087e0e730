"""The campaign for a GPU, rehearsed on a CPU: the same code but for captured graphs, device events and NVML."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from demo.test_embedded_generation import ROTARY, Numbers, answers  # noqa: E402
from gpu import bins_part, energy_part, page, predictor_part, profile_part, refill_part, step_times  # noqa: E402
from gpu.campaign import PARTS, results_of, steps_of  # noqa: E402
from gpu.device import Device, PretendedNvml, gpu_of  # noqa: E402
from gpu.engine import loaded, warmed_up  # noqa: E402
from gpu.machine import LEVELS, Machine, OutOfSlots, RunningEngine  # noqa: E402
from gpu.models import fused_llama, random_llama  # noqa: E402
from gpu.noted import Noted  # noqa: E402
from gpu.plans import FULL, TINY, CampaignPlan  # noqa: E402
from gpu.shapes import PROMPT_WORDS, SHAPES, prompt_for  # noqa: E402
from gpu.steps import BadOutput, CampaignStep, Clock, NotYet, Results, in_order, planned, run_steps  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from bins.profile import Profile  # noqa: E402
from llmserve.demo import static_batch  # noqa: E402
from llmserve.demo.fusing import fuse  # noqa: E402
from llmserve.demo.generation import LanguageModel  # noqa: E402
from llmserve.demo.sampling import Sampling  # noqa: E402

ROOT = Path(__file__).parents[2]
GPU = ROOT / "scripts/lab/gpu"
CAMPAIGN = GPU / "campaign.py"
PROMPTS = [[5, 6, 7, 8, 9], [11], [3, 1, 4, 1, 5, 9, 2, 6]]
ON = "pretended-gpu"
FILES_MAX = 8  # that a GPU machine may send home


# ---- the whole of it ----------------------------------------------------------------------------------------------


def rehearse(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(CAMPAIGN), "--tiny", "--output", str(folder), *flags],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
    )


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("campaign")
    done = rehearse(folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_a_rehearsal_measures_every_part(rehearsed: Path) -> None:
    for part, module in PARTS.items():
        content = json.loads((rehearsed / ON / f"{part}.json").read_text())
        assert content["steps"], part
        assert not content["failed"]
        assert content["setting"].keys() == set(module.SETTING)
        assert content["device"] == "Pretended GPU, 80 GiB"
        assert content["runs"][0]["energy"] == "energy counter"
        assert content["runs"][0]["command"] == "python scripts/lab/gpu/campaign.py --minutes 8 --tiny"
    assert len([path for path in rehearsed.rglob("*") if path.is_file()]) < FILES_MAX


@pytest.mark.slow
def test_what_is_done_is_not_measured_again(rehearsed: Path, tmp_path: Path) -> None:
    before = {path.name: json.loads(path.read_text())["steps"] for path in (rehearsed / ON).glob("*.json")}
    again = rehearse(tmp_path, "--earlier", str(rehearsed), "--minutes", "0.2")
    assert again.returncode == 0, again.stderr
    assert "16 of 16 steps are done" in again.stderr
    assert {path.name: json.loads(path.read_text())["steps"] for path in (tmp_path / ON).glob("*.json")} == before


@pytest.mark.slow
def test_results_of_other_settings_are_not_mixed(rehearsed: Path, tmp_path: Path) -> None:
    other = rehearse(rehearsed, "--lengths", "uniform:5,50")
    assert other.returncode == 1
    assert "is of other settings" in other.stderr
    assert "Traceback" not in other.stderr
    apart = rehearse(tmp_path, "--lengths", "uniform:5,50", "--earlier", str(rehearsed), "--minutes", "0.11")
    assert "not gone on from" in apart.stderr
    assert (tmp_path / ON / "profile.json").exists(), "the profile does not depend on the lengths"
    assert not (tmp_path / ON / "bins.json").exists()


@pytest.mark.slow
def test_the_parts_say_what_was_measured(rehearsed: Path) -> None:
    folder = rehearsed / ON
    profile = profile_part.profile(Results.read(folder, "profile"), "tiny", ON)
    assert profile.name == f"{ON}-tiny"
    assert profile.energy_source == "measured"
    assert profile.power_w_min == pytest.approx(240, rel=0.05)  # the pretended GPU always draws that
    gains = [row for row in bins_part.gains(Results.read(folder, "bins")) if row["batch_size"] == 4]
    assert {(row["bins"], row["predictions"]) for row in gains} == {
        *((bins, "oracle") for bins in (1, 2, bins_part.WINDOW)),
        *((bins, "predicted") for bins in (2, bins_part.WINDOW)),
    }
    assert next(row for row in gains if row["bins"] == 1)["gain"] == 1.0
    saved = energy_part.savings(Results.read(folder, "energy"))
    assert [row["release"] for row in saved] == list(energy_part.RELEASES)
    assert saved[2]["latency_target_s"] == pytest.approx(energy_part.STRETCH * saved[0]["latency_s_p95"], rel=1e-5)
    assert saved[2]["plans"] >= 1
    burst = refill_part.rows(Results.read(folder, "refill"))
    assert [row["order"] for row in burst] == ["fffs", "boost"]
    assert all(len(row["latencies_s"]) == row["requests"] == TINY.burst for row in burst)
    assert burst[1]["latency_s_mean"] < burst[0]["seconds"]
    times = Results.read(folder, "predictor").steps[predictor_part.TIMES]
    assert times["difference"] < 1e-4


@pytest.mark.slow
def test_steps_are_measured_by_their_worth(rehearsed: Path) -> None:
    values = {module.PART: [] for module in PARTS.values()}
    results = results_of(rehearsed / ON, TINY, "")
    steps = {(step.part, step.name): step.value for step in steps_of(tuple(PARTS), TINY, None, results, None)}
    for part, of in results.items():
        values[part] = [steps[part, name] for name in of.steps]
        assert values[part] == sorted(values[part])


@pytest.mark.slow
def test_the_page_has_a_table_for_each_part(rehearsed: Path) -> None:
    text = page.page(rehearsed, ("tiny",))
    assert page.NOTHING not in text
    assert page.NO_DEVICE not in text
    assert text.count("| ---") >= 6
    assert "## Pretended GPU, 80 GiB" in text
    assert f"The profile `{ON}-tiny`: a step" in text
    for part, module in PARTS.items():
        figure = rehearsed / ON / f"{part}.png"
        module.draw(Results.read(rehearsed / ON, part), figure, TINY)
        assert figure.read_bytes().startswith(b"\x89PNG")
        figure.unlink()


@pytest.mark.slow
def test_a_clock_forty_times_too_fast_ends_the_run_in_time_with_whole_results(tmp_path: Path) -> None:
    """Eight minutes are twelve seconds by that clock: nearly every step meets its deadline, in mid-work."""
    began_s = time.monotonic()
    done = rehearse(tmp_path, "--minutes", "8", "--pace", "40")
    assert time.monotonic() - began_s < 12 + 60  # imports on a busy machine, and the end of what was killed
    assert "gave way after" in done.stderr
    contents = [json.loads(path.read_text()) for path in (tmp_path / ON).glob("*.json")]
    assert contents
    assert any("GaveWay" in why for content in contents for why in content["failed"].values())
    assert not list(tmp_path.rglob("*.new"))
    again = rehearse(tmp_path, "--parts", "predictor")  # goes on where the first stopped
    assert again.returncode == 0, again.stderr
    assert "1 of 1 steps are done" in again.stderr


def test_the_page_says_what_was_not_measured(tmp_path: Path) -> None:
    text = page.page(tmp_path)
    assert page.NO_DEVICE in text
    assert "|" not in text
    Results(tmp_path / "h100", "predictor", {}, "NVIDIA H100 80GB HBM3, 80 GiB").put("x", 1)
    (tmp_path / "h100" / "notes.txt").write_text("The predictor waited for a lock.\n")
    text = page.page(tmp_path)
    assert text.count(page.NOTHING) == len(PARTS) - 1
    assert "The predictor waited for a lock." in text


def test_the_committed_page_is_that_of_the_committed_results() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(page.RESULTS), "run scripts/lab/gpu/page.py"
    for folder in page.devices(page.RESULTS):
        measured = Results.read(folder, "profile")
        for shape in FULL.shapes:
            path = page.PROFILES / f"{profile_part.profile_name(folder.name, shape)}.json"
            assert path.exists() == (profile_part.batches_of(measured, shape) is not None)
            if path.exists():
                assert Profile.load(path).name == path.stem


# ---- on a machine without network ---------------------------------------------------------------------------------


def run_on_machine(folder: Path, minutes: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """scripts/lab/gpu/run with an empty folder of wheels: pip is a stand-in, as all packages are here, and nothing is
    imported before the campaign, for this disk has torch in its cache.
    """
    wheels, programs = folder / "wheels", folder / "bin"
    for made in (wheels, programs):
        made.mkdir(exist_ok=True)
    python = programs / "python3"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] || [ "$2" = pip ] || exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return subprocess.run(
        [GPU / "run", wheels, folder / "out", "--minutes", minutes, "--tiny", "--parts", "predictor"],
        env={**os.environ, "PATH": f"{path or programs}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=330,
    )


@pytest.mark.slow
def test_one_line_runs_a_campaign_and_brings_few_files_home(tmp_path: Path) -> None:
    done = run_on_machine(tmp_path, "5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 steps are done" in done.stdout
    files = sorted(path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.*"))
    assert files == ["campaign.log", f"{ON}/predictor.json"]


@pytest.mark.slow
def test_a_campaign_that_ignores_everything_ends_with_its_minutes(tmp_path: Path) -> None:
    deaf = tmp_path / "deaf"
    deaf.mkdir()
    (deaf / "python3").write_text('#!/bin/sh\n[ "$2" = pip ] && exit\ntrap "" TERM INT\nsleep 99 & wait; sleep 99\n')
    (deaf / "python3").chmod(0o755)
    began_s = time.monotonic()
    done = run_on_machine(tmp_path, "0.2", str(deaf))
    assert time.monotonic() - began_s < 12 + 3
    assert done.returncode == 124
    assert "did not end in time" in done.stdout


# ---- the order ----------------------------------------------------------------------------------------------------


def full_steps(tmp_path: Path, plan: CampaignPlan = FULL) -> list[CampaignStep]:
    results = results_of(tmp_path, plan, "")
    return in_order(steps_of(tuple(PARTS), plan, None, results, None), results)


def test_the_most_valuable_comes_first_across_the_parts(tmp_path: Path) -> None:
    order = full_steps(tmp_path)
    assert [step.part for step in order[:18]] == [
        *["profile"] * 4,
        *["bins"] * 5,
        *["energy"] * 3,
        *["refill"] * 2,
        *["energy"] * 3,
        "predictor",
    ]
    assert {step.name for step in order[:4]} == {
        f"{shape}: {what} of 1, 8, 32, 128" for shape in ("llama-1b", "llama-8b") for what in ("steps", "batches")
    }
    assert all(step.name.startswith("batches of 32: ") for step in order[4:9])
    assert [step.name for step in order[9:12]] == [f"{release} at load 0.1" for release in energy_part.RELEASES]
    assert [step.name for step in order[12:14]] == ["32 slots: fffs", "32 slots: boost"]
    assert all("256" in step.name for step in order[-4:])


def test_eight_minutes_are_enough_for_costs_bins_refill_and_the_lowest_load(tmp_path: Path) -> None:
    fits = [step.name for step, _, fits in planned(full_steps(tmp_path), 8 * 60.0) if fits]
    assert fits[9:14] == [step.name for step in full_steps(tmp_path)[9:14]]
    two_runs = sum(takes_s for _, takes_s, _ in list(planned(full_steps(tmp_path), 1e9))[:17])
    assert two_runs < (8 + 4) * 60.0, "a second run of four minutes ends (d)"


def test_what_failed_before_comes_after_what_is_worth_nearly_as_much(tmp_path: Path) -> None:
    results = {"part": Results(tmp_path, "part", {})}
    results["part"].fail("first", RuntimeError("no luck"))
    results["part"].put("third", 3)
    order = in_order(
        [step("first", 1), step("last", 4, value=4), step("second", 2, value=3), step("third", 3)], results
    )
    assert [step.name for step in order] == ["second", "first", "last"]


def test_the_plan_prints_what_fits_and_what_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Results(tmp_path / "h100", "predictor", FULL.setting("prompts"), "NVIDIA H100").put(predictor_part.TIMES, 1)
    flags = ["--plan", "--minutes", "8", "--output", str(tmp_path)]
    said = subprocess.run([sys.executable, CAMPAIGN, *flags], capture_output=True, text=True, check=True).stdout
    lines = {line.split("│")[1].strip(): line for line in said.splitlines() if line.startswith("│")}
    assert "h100" in said
    assert "done" in lines["predictor: times"]
    assert "measured" in lines["profile: llama-8b: batches of 1, 8, 32, 128"]
    assert "left" in lines["profile: llama-8b: batches of 256"]


# ---- steps --------------------------------------------------------------------------------------------------------


class Site:
    """Where no process runs."""

    def __init__(self) -> None:
        self.kills = 0
        self.notes: list[str] = []

    def kill(self) -> None:
        self.kills += 1

    def taken_notes(self) -> list[str]:
        notes, self.notes = self.notes, []
        return notes


def step(name: str, value_measured: object, about_s: float = 0.0, value: int = 1) -> CampaignStep:
    async def measure() -> object:
        if isinstance(value_measured, Exception):
            raise value_measured
        return value_measured

    return CampaignStep("part", name, value, about_s, measure)


async def test_a_step_that_fails_does_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = {"part": Results(tmp_path, "part", {"seed": 0})}
    await run_steps([step("a", 1), step("b", ValueError("no such kernel")), step("c", 3)], results, Clock(1), Site())
    assert results["part"].steps == {"a": 1, "c": 3}
    assert results["part"].failed == {"b": "ValueError: no such kernel"}
    assert capsys.readouterr().err.count("part: b: failed after") == 2, "it is tried twice"
    again = {"part": Results(tmp_path, "part", {"seed": 0})}
    await run_steps(in_order([step("a", 9), step("b", 2)], again), again, Clock(1), Site())
    assert again["part"].steps == {"a": 1, "b": 2, "c": 3}
    assert again["part"].failed == {}


async def test_a_step_that_would_take_too_long_is_left(tmp_path: Path) -> None:
    results = {"part": Results(tmp_path, "part", {})}
    left = await run_steps([step("long", 1, about_s=100), step("short", 2, about_s=10)], results, Clock(1), Site())
    assert results["part"].steps == {"short": 2}
    assert [step.name for step in left] == ["long"]


async def test_a_step_that_hangs_gives_way_at_its_own_deadline(tmp_path: Path) -> None:
    async def hang() -> None:
        await asyncio.sleep(3600)

    results, site = {"part": Results(tmp_path, "part", {})}, Site()
    steps = [CampaignStep("part", "hangs", 1, 1.0, hang), step("next", 2)]
    began_s = time.monotonic()
    await run_steps(steps, results, Clock(8, pace=100.0), site)
    deadline_s = steps[0].deadline_s("") / 100
    assert 2 * deadline_s < time.monotonic() - began_s < 2 * deadline_s + 5.0
    assert results["part"].steps == {"next": 2}
    assert results["part"].failed["hangs"] == f"GaveWay: gave way after {deadline_s:.1f} s"
    assert site.kills == 2 * 2  # at the deadline, and before the next step; it is tried twice


async def test_a_step_that_needs_another_waits_for_it_and_has_not_failed(tmp_path: Path) -> None:
    results = {"part": Results(tmp_path, "part", {})}
    luck = iter([RuntimeError("a hiccup"), "measured"])

    async def at_the_second_try() -> object:
        if isinstance(outcome := next(luck), Exception):
            raise outcome
        return outcome

    async def dependent() -> str:
        if "costs" not in results["part"].steps:
            raise NotYet("the costs are not measured")
        return "forecast"

    steps = [
        CampaignStep("part", "costs", 1, 0.0, at_the_second_try),
        CampaignStep("part", "bins", 2, 0.0, dependent),
        *(step("refill", 3, value=3), step("energy", 4, value=4)),
    ]
    assert await run_steps(steps, results, Clock(1), Site()) == []
    assert list(results["part"].steps) == ["refill", "costs", "bins", "energy"]
    assert results["part"].failed == {}


async def test_a_step_whose_need_is_never_met_is_left(tmp_path: Path) -> None:
    results = {"part": Results(tmp_path, "part", {})}
    steps = [step("bins", NotYet("the costs are not measured")), step("other", 1)]
    left = await run_steps(steps, results, Clock(1), Site())
    assert [step.name for step in left] == ["bins"]
    assert results["part"].failed == {}


async def test_notes_stand_beside_the_step_that_they_belong_to(tmp_path: Path) -> None:
    results, site = {"part": Results(tmp_path, "part", {})}, Site()
    site.notes = ["the engine now runs without graphs"]
    await run_steps([step("a", 1), step("b", 2)], results, Clock(1), site)
    assert Results.read(tmp_path, "part").notes == {"a": ["the engine now runs without graphs"]}
    results["part"].put("a", 2)
    assert Results.read(tmp_path, "part").notes == {}


def test_other_settings_and_devices_are_refused(tmp_path: Path) -> None:
    Results(tmp_path, "part", {"rows": (1, 2)}, "A100, 40 GiB").put("a", 1)
    assert Results(tmp_path, "part", {"rows": (1, 2)}, "A100, 40 GiB").steps == {"a": 1}
    with pytest.raises(BadOutput, match="other settings"):
        Results(tmp_path, "part", {"rows": (1, 4)})
    with pytest.raises(BadOutput, match="another device"):
        Results(tmp_path, "part", {"rows": (1, 2)}, "A100, 80 GiB")


def test_a_run_that_is_killed_while_it_writes_leaves_whole_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = Results(tmp_path, "part", {})
    results.put("a", 1)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        results.put("b", 2)
    assert Results.read(tmp_path, "part").steps == {"a": 1}


# ---- the device ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla T4", "t4"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "h100-mig-1g.10gb"),
    ],
)
def test_results_are_named_after_the_gpu(name: str, key: str) -> None:
    assert Device(name, 80.0).key == key


def gpu_with(nvml: PretendedNvml):
    return gpu_of(nvml, counter_s=0.02, watched_s=0.01)


def test_name_and_memory_are_those_that_nvml_tells() -> None:
    gpu = gpu_with(PretendedNvml(name="NVIDIA H200"))
    assert str(gpu.device) == "NVIDIA H200, 80 GiB"
    assert gpu.others == ""
    assert gpu.energy_by == "energy counter"


@pytest.mark.parametrize(
    ("nvml", "said"),
    [
        (PretendedNvml(processes=2), "2 other processes"),
        (PretendedNvml(used_gib=40.0), "40.0 GiB of memory in use"),
        (PretendedNvml(busy_percent=60), "busy for 60 % of the time"),
        (PretendedNvml(processes=1, used_gib=3.0), "1 other process, 3.0 GiB of memory in use"),
    ],
)
def test_a_gpu_that_somebody_else_uses_is_told(nvml: PretendedNvml, said: str, tmp_path: Path) -> None:
    gpu = gpu_with(nvml)
    assert gpu.others == said
    assert Machine("cpu", gpu, tmp_path).facts["others"] == said
    results = Results(tmp_path / "h100", "predictor", {}, str(gpu.device))
    results.begin("python campaign.py", **Machine("cpu", gpu, tmp_path).facts)
    results.put("x", 1)
    assert f"not free when this run began: {said}" in page.page(tmp_path)


@pytest.mark.parametrize("nvml", [PretendedNvml(counter=False), PretendedNvml(moves=False)], ids=["none", "stands"])
def test_without_a_counter_that_counts_power_is_integrated(nvml: PretendedNvml) -> None:
    gpu = gpu_with(nvml)
    assert gpu.energy_by == "integrated power"
    assert gpu.energy is not None
    before_j = gpu.energy.energy_j(100.0)
    gpu.energy.sample(100.5)
    assert gpu.energy.energy_j(101.0) - before_j == pytest.approx(nvml.power_w)


# ---- engines that fail --------------------------------------------------------------------------------------------

FRAGILE = """
import argparse, json, pathlib, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

parser = argparse.ArgumentParser()
for flag in ("--shape", "--device", "--batch-size-max", "--columns", "--notes", "--port"):
    parser.add_argument(flag)
for flag in ("--refill", "--no-compile", "--no-graphs"):
    parser.add_argument(flag, action="store_true")
args = parser.parse_args()
FAILURE
pathlib.Path(args.notes).with_suffix(".size").write_text("4")

class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

HTTPServer(("127.0.0.1", int(args.port)), Health).serve_forever()
"""


@pytest.fixture
def fragile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    """Makes a machine whose engines start with this line of Python, which may fail."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(failure: str, start_s: float = 20.0) -> Machine:
        (tmp_path / "fragile.py").write_text(FRAGILE.replace("FAILURE", failure))
        return Machine("cpu", gpu_with(PretendedNvml()), tmp_path, engines="fragile", start_s=start_s)

    return make


async def test_an_engine_that_crashes_while_it_compiles_starts_without(fragile) -> None:
    machine = fragile("if not args.no_compile: sys.exit('Triton: ptxas was killed')")
    assert (await machine.engine("tiny", 4, 30)).batch_size_max == 4
    (note,) = machine.taken_notes()
    assert "now runs with --no-compile: Triton: ptxas was killed" in note
    assert (await machine.engine("tiny", 8, 30)).url  # begins with what worked
    assert machine.taken_notes() == []
    await machine.stop_engine()


async def test_an_engine_that_hangs_at_its_start_is_killed_and_starts_in_the_surest_way(fragile) -> None:
    machine = fragile("if not args.no_graphs: time.sleep(3600)", start_s=1.5)
    began_s = time.monotonic()
    await machine.engine("tiny", 4, 30)
    assert time.monotonic() - began_s < 15
    assert len(machine.taken_notes()) == len(LEVELS) - 1
    await machine.stop_engine()


async def test_an_engine_that_starts_in_no_way_says_why_and_the_next_is_tried_with_all_again(fragile) -> None:
    machine = fragile("sys.exit('no CUDA device')")
    with pytest.raises(RuntimeError, match="no CUDA device"):
        await machine.engine("tiny", 4, 30)
    machine = fragile("")
    await machine.engine("tiny", 4, 30)
    assert machine.taken_notes() == []
    await machine.stop_engine()


def state_of(pid: int) -> str:
    """The letter of /proc; "" for a process that is gone."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.read_text().rpartition(")")[2].split()[0] if stat.exists() else ""


async def test_killing_leaves_no_process_of_a_step(fragile, tmp_path: Path) -> None:
    child = "import subprocess; print(subprocess.Popen(['sleep', '3600']).pid, file=open(args.notes + '.pid', 'w'))"
    machine = fragile(f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {child}")
    await machine.engine("tiny", 4, 30)
    pid = int((tmp_path / "notes.json.pid").read_text())
    os.kill(pid, 0)
    began_s = time.monotonic()
    await machine.stop_engine()
    assert time.monotonic() - began_s < 3
    assert state_of(pid) in ("", "Z", "X")


def test_an_engine_with_too_few_slots_is_no_engine_for_a_step() -> None:
    RunningEngine("", 64).need(64)
    with pytest.raises(OutOfSlots, match="batches of 128 do not fit into memory, only of 64"):
        RunningEngine("", 64).need(128)


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache has room for four sequences with 128 columns."""
    allocate = static_batch._ColumnsLayer.lazy_initialization

    def limited(layer, keys, values) -> None:
        if layer._places > 4 * 128:
            raise torch.OutOfMemoryError("CUDA out of memory")
        allocate(layer, keys, values)

    monkeypatch.setattr(static_batch._ColumnsLayer, "lazy_initialization", limited)


@pytest.mark.usefixtures("little_memory")
def test_the_largest_batch_without_memory_makes_room_for_the_next_smaller() -> None:
    model, noted = loaded("tiny", "cpu"), Noted()
    model.context_tokens = 100
    assert warmed_up(model, 16, noted) == 4
    assert noted.notes == [
        "out of memory at batches of 16: the largest batch has 8",
        "out of memory at batches of 8: the largest batch has 4",
    ]


@pytest.mark.usefixtures("little_memory")
def test_a_step_without_memory_is_noted_and_the_smaller_ones_are_timed() -> None:
    noted = Noted()
    with torch.inference_mode():
        model = fused_llama("tiny", "cpu", compiles=False)
        timed = step_times.measure(model, SHAPES["tiny"], [1, 2, 4], [64, 120, 200], 1e9, noted)
    assert [(step["rows"], step["context"]) for step in timed["steps"]] == [
        *((rows, context) for rows in (1, 2) for context in (64, 120, 200)),
        *((4, context) for context in (64, 120)),
    ]
    assert all(step["floor_s"] > 0 and step["spread"] >= 0 for step in timed["steps"])
    assert "out of memory in a step of 4 sequences with context 200" in noted.notes


def test_warnings_of_an_engine_are_noted_once(tmp_path: Path) -> None:
    noted = Noted(tmp_path / "notes.json")
    for _ in range(2):
        static_batch.log.warning("cannot capture a graph: %s", "not permitted")
    assert json.loads((tmp_path / "notes.json").read_text()) == noted.notes == ["cannot capture a graph: not permitted"]


# ---- the models ---------------------------------------------------------------------------------------------------


def test_a_step_of_the_8b_shape_reads_15_gb() -> None:
    """Llama-3.1-8B has 8.03 billion weights, half a billion of which are embeddings of which a step reads a row."""
    assert SHAPES["llama-8b"].step_bytes(1, 0) == pytest.approx(2 * (8.03e9 - 128_256 * 4096), rel=0.001)
    assert SHAPES["llama-1b"].step_bytes(1, 0) == pytest.approx(2 * 1.236e9, rel=0.001)
    cached = SHAPES["llama-8b"].step_bytes(10, 100) - SHAPES["llama-8b"].step_bytes(10, 0)
    assert cached == 10 * 100 * 131_072


def test_the_weights_of_a_step_are_counted_as_the_model_has_them() -> None:
    model = random_llama("tiny", "cpu")
    norms = sum(weight.numel() for name, weight in model.named_parameters() if "norm" in name)
    embeddings = model.model.embed_tokens.weight.numel()
    assert SHAPES["tiny"].step_parameters == sum(w.numel() for w in model.parameters()) - norms - embeddings


def test_answers_have_the_length_that_the_prompt_says() -> None:
    model = loaded("tiny", "cpu")
    ids = model.text_ids(prompt_for(17))
    assert len(ids) == PROMPT_WORDS
    row = model.row(ids, 5, Sampling(temperature=0.0), ignore_eos=True)
    other = model.row(model.text_ids("no number"), 5, Sampling(temperature=0.0))
    model.run([row, other], lambda _: None)
    assert (row.output_tokens, other.output_tokens) == (17, 5)


def test_equal_prompts_are_other_inputs_for_the_model() -> None:
    model = loaded("tiny", "cpu")
    rows = [model.row(model.text_ids(prompt_for(17)), None, Sampling(temperature=0.0)) for _ in range(2)]
    assert all(len(row.prompt_ids) == PROMPT_WORDS for row in rows)
    assert list(rows[0].prompt_ids) != list(rows[1].prompt_ids)


def network() -> LlamaForCausalLM:
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**ROTARY)).eval()


def test_a_fused_model_answers_as_before() -> None:
    fused = network()
    assert fuse(fused, lambda function: function) == ["normalisation", "gate", "rotation"]
    expected = answers(LanguageModel(Numbers(), network(), static=True), PROMPTS, [20, 30, 10])
    assert answers(LanguageModel(Numbers(), fused, static=True), PROMPTS, [20, 30, 10]) == expected


def test_what_cannot_be_compiled_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def broken(function):
        def run(*inputs):
            raise RuntimeError("no C compiler is found")

        return run

    model = network()
    assert fuse(model, broken) == ["normalisation"]
    assert "no C compiler is found" in caplog.text
    assert answers(LanguageModel(Numbers(), model), PROMPTS[:1], [5])


def test_what_stops_compiling_at_a_later_shape_runs_plainly_from_there(caplog: pytest.LogCaptureFixture) -> None:
    def fragile(function):
        def run(*inputs, **options):
            if inputs[0].shape[-2] > 1:  # a prefill
                raise RuntimeError("no kernel for this shape")
            return function(*inputs, **options)

        return run

    fused = network()
    assert fuse(fused, fragile) == ["normalisation", "rotation"]  # the gate is tried with two rows at once
    expected = answers(LanguageModel(Numbers(), network(), static=True), PROMPTS, [20, 30, 10])
    assert answers(LanguageModel(Numbers(), fused, static=True), PROMPTS, [20, 30, 10]) == expected
    assert "no kernel for this shape" in caplog.text
