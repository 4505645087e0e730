"""The command: `llmserve plan`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from missing_modules import without

from llmserve.__main__ import main
from llmserve.commands.plan import LINE_EVERY_S, SearchProgress
from llmserve.errors import ConfigError
from llmserve.planning import Instance, Model, Plan, Stream, plan
from llmserve.runtime.installation import pip_install

ROOT = Path(__file__).resolve().parents[2]
MODELS = 6


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    """Six models of 1 GPU's load each on 6 GPUs in two groups of at most 4: as printed, one group is overloaded."""
    models = tuple(Model(f"m{k}", 2.0, 1.0, 10.0, goodput_per_s=10.0) for k in range(MODELS))
    streams = tuple(Stream(f"s{k}", f"m{k}", rate_per_s=10.0) for k in range(MODELS))
    path = tmp_path / "instance.json"
    Instance(streams, models, gpus=6, gpu_memory_gb=16.0, group_gpus_max=4, groups=2).save(path)
    return path


def output(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_the_table_shows_the_groups(problem: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--instance", str(problem)]) == 0
    out = output(capsys)
    assert "6 streams of 6 models on 6 GPUs of 16 GB, at most 2 groups of 4" in out
    assert "group-1 │ 3 │ 100% │ 6 │ 3 │" in out
    assert "Each model can bear 3 times its average load alone: the optimum." in out
    assert "Overloaded" not in out


def test_overloaded_groups_of_printed_plans_are_marked(problem: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--instance", str(problem), "--as-printed"]) == 0
    out = output(capsys)
    assert "as printed: without regard to groups' loads" in out
    assert "group-1 │ 4 │ 150% ! │ 12 │ 4 │ m0, m1, m2, m3 and 2 more" in out
    assert "2 GPUs are unused: no group may have more GPUs." in out
    assert "Overloaded (!): 1 of 1 groups, group-1 to 1.50 times its capacity." in out


def test_the_table_uses_singular_and_plural(problem: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model("m", 2.0, 1.0, 10.0, goodput_per_s=10.0)
    Instance(
        (Stream("s", "m", rate_per_s=5.0),), (model,), gpus=2, gpu_memory_gb=16.0, group_gpus_max=1, groups=1
    ).save(problem)
    assert main(["plan", "--instance", str(problem)]) == 0
    out = output(capsys)
    assert "1 stream of 1 model on 2 GPUs of 16 GB, at most 1 group of 1" in out
    assert "1 GPU is unused: no group may have more GPUs." in out


def test_json_is_the_plan_that_output_writes(problem: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert main(["plan", "--instance", str(problem), "--json", "--output", str(path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(path.read_text())
    assert printed["burst_tolerance"] == 3.0
    solution = Plan.load(path)
    assert {solution.group_of(f"s{k}", f"m{k}") for k in range(MODELS)} == {"group-1", "group-2"}
    assert solution.group_of("s0", "another") is None


def test_a_previous_plan_keeps_models_in_their_groups(
    problem: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = [("odd", ["m1", "m3", "m5"]), ("even", ["m0", "m2", "m4"])]
    previous = tmp_path / "before.json"
    previous.write_text(json.dumps({"groups": [{"name": name, "gpus": 3, "models": of} for name, of in groups]}))
    assert main(["plan", "--instance", str(problem), "--previous", str(previous), "--json"]) == 0
    replanned = json.loads(capsys.readouterr().out)
    assert [(group["name"], group["models"]) for group in replanned["groups"]] == groups
    assert replanned["moves"] == 0
    assert main(["plan", "--instance", str(problem), "--previous", str(previous)]) == 0
    assert "Models that move to another group: 0." in output(capsys)


@pytest.mark.parametrize("form", [[], ["--as-printed"]])
def test_a_figure_is_drawn(problem: Path, tmp_path: Path, form: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.png"
    assert main(["plan", "--instance", str(problem), "--plot", str(path), *form]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_failure_to_draw_is_reported_after_the_plan(
    problem: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(path: Path) -> str:
        assert main(["plan", "--instance", str(problem), "--json", "--plot", str(path)]) == 2
        out, error = capsys.readouterr()
        assert json.loads(out)["groups"]
        return error

    nowhere = tmp_path / "no-such-folder" / "plan.png"
    assert failed(nowhere) == f"llmserve: --plot: cannot write {nowhere}: No such file or directory\n"
    assert "--plot: cannot draw" in failed(tmp_path / "plan.xyz")


@pytest.mark.parametrize(
    ("missing", "line"),
    [
        ("matplotlib", f"--plot needs matplotlib: {pip_install('plot')}"),
        ("scipy", f"planning needs scipy: {pip_install('plan')}"),
    ],
)
def test_without_its_extra_the_command_fails_before_it_reads_anything(
    missing: str, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, missing)
    assert main(["plan", "--instance", "nowhere.json", "--plot", "plan.png"]) == 2
    assert capsys.readouterr() == ("", f"llmserve: {line}\n")


def test_an_instance_without_a_plan_is_a_failure(problem: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem.write_text(problem.read_text().replace('"gpus": 6', '"gpus": 5'))
    assert main(["plan", "--instance", str(problem)]) == 1
    assert "the load needs 6 GPUs, 1 more than the 5 there are" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--time-limit-s", "0"], "--time-limit-s must be above 0, not 0"),
        (["--previous", "nowhere.json"], "cannot read the plan nowhere.json: No such file"),
        (["--output", "no-such-folder/plan.json"], "cannot write the plan no-such-folder/plan.json: No such file"),
        (["--out", "plan.json"], "unknown argument --out; did you mean --output?"),
    ],
)
def test_invalid_flags_are_an_error_of_one_line(
    problem: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--instance", str(problem), *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_an_unknown_key_of_an_instance_is_named(problem: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem.write_text(problem.read_text().replace("gpu_memory_gb", "gpu_memory"))
    assert main(["plan", "--instance", str(problem)]) == 2
    assert f"the instance {problem}: unknown key 'gpu_memory'; did you mean gpu_memory_gb?" in capsys.readouterr().err


def test_planning_without_a_solver_names_the_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a server that plans again. The totals fit; only the integer programme shows that whole models do not."""
    models = tuple(Model(f"m{k}", 9.0, 1.0, 10.0) for k in range(3))
    streams = tuple(Stream("s", model.name, gpus_needed=0.1) for model in models)
    without(monkeypatch, "scipy")
    with pytest.raises(ConfigError, match=f"planning needs scipy: {re.escape(pip_install('plan'))}"):
        plan(Instance(streams, models, gpus=4, gpu_memory_gb=16.0, group_gpus_max=4, groups=2))


def test_progress_is_printed_in_lines_from_time_to_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 1.0, LINE_EVERY_S + 1, LINE_EVERY_S + 2])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    with SearchProgress() as progress:
        progress(None, 9.0)
        progress(None, 8.0)
        progress(5.0, 8.0)
    assert capsys.readouterr().err == f"no plan yet, at most 8, after {LINE_EVERY_S + 1:.1f} s\n"


def test_the_script_is_the_command(problem: Path) -> None:
    command = [sys.executable, "-m", "llmserve", "plan", "--instance", str(problem), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env={"PYTHONPATH": "."})
    assert json.loads(done.stdout)["burst_tolerance"] == 3.0
