"""Figures of runs: their contents, and that they are drawn only on request."""

import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from missing_modules import without

from llmserve.__main__ import main
from llmserve.commands.simulate import Scenario, engines, prepare, run
from llmserve.runtime.installation import pip_install
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.figures import Story, comparison_figure, latency_figure, timeline_figure, waiting_figure
from llmserve.simulation.report import BatchRecorder, Recorder

PNG = b"\x89PNG"
ticks = mpl.rc_context({"xtick.labelbottom": True, "ytick.labelleft": True})  # tests draw without


def story(tmp_path: Path, trace: str, label: str = "1 bin", **values: object) -> Story:
    """The story of a trace with lines of arrival_s,input_tokens,output_tokens; a token takes 1 s."""
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n" + trace)
    scenario = Scenario(trace=str(path), step_s=1.0, barrier=True, **values)  # type: ignore[arg-type]
    config = SchedulingConfig(bins=1, batch_size=2, release="full", queue_requests_max=10**9).resolved(barrier=True)
    work = prepare(scenario, config)
    recorder = BatchRecorder(len(work))
    run(scenario, config, work, recorder=recorder)
    return Story(label, recorder, work.trace, engines(scenario, config, []))


@ticks
def test_a_timeline_shows_the_share_of_the_slots_time_that_goes_into_answers(tmp_path: Path) -> None:
    """Batches of lengths 2 and 4, then 6 and 6: 18 of 20 slot-seconds."""
    run_story = story(tmp_path, "0,0,2\n0,0,4\n0,0,6\n0,0,6\n")
    figure = timeline_figure([run_story])
    assert figure is not None
    assert figure.axes[0].get_title(loc="left") == "1 bin: answers grow in 90% of the time that slots are in use"
    assert figure.axes[0].get_xlim() == (0.0, 10.0)
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["engine0"]


def test_a_prefill_is_part_of_the_answer(tmp_path: Path) -> None:
    """A prefill of 3 s for both: the answer of 2 tokens is complete at 5 of 7 s."""
    figure = timeline_figure([story(tmp_path, "0,1,2\n0,2,4\n", prefill_s_per_token=1.0)])
    assert figure is not None
    assert "86%" in figure.axes[0].get_title(loc="left")


def test_stories_share_one_axis_of_time(tmp_path: Path) -> None:
    stories = [story(tmp_path, "0,0,2\n1,0,4\n2,0,6\n2,0,6\n", label) for label in ("1 bin", "2 bins")]
    figure = timeline_figure(stories)
    assert figure is not None
    assert [axes.get_title(loc="left")[:6] for axes in figure.axes] == ["1 bin:", "2 bins"]
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim() == (1.0, 11.0)


def test_waiting_is_split_into_forming_a_batch_and_waiting_for_an_engine(tmp_path: Path) -> None:
    """The first request waits 1 s for its batch; the second two come together at 2 s and wait 3 s for the engine."""
    figure = waiting_figure(story(tmp_path, "0,0,4\n1,0,4\n2,0,6\n2,0,6\n"))
    assert figure is not None
    forming, engine = (bars[0].get_height() for bars in figure.axes[0].containers)
    assert (forming, engine) == ((1 + 0 + 0 + 0) / 4, (0 + 0 + 3 + 3) / 4)


def test_the_latency_figure_names_percentiles(tmp_path: Path) -> None:
    figure = latency_figure(story(tmp_path, "0,0,4\n0,0,4\n"))
    assert figure is not None
    assert {text.get_text() for text in figure.axes[0].texts} == {"4 s", "0 s"}


def test_a_run_that_completed_nothing_has_no_figures(tmp_path: Path) -> None:
    empty = story(tmp_path, "0,0,4\n", last_batch="drop")
    assert latency_figure(empty) is None
    assert waiting_figure(empty) is None
    assert timeline_figure([empty]) is None


FOLDER_OF_A_RUN = ["latency.png", "timeline.png", "waiting.png"]


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("--barrier --bins 4", FOLDER_OF_A_RUN),
        ("--slots 4 --engines 2", FOLDER_OF_A_RUN),
        ("--barrier --seeds 2", FOLDER_OF_A_RUN),
        ("--barrier --engine h100-llama-3.1-8b:4 --engine 7xh100-llama-3.1-8b", FOLDER_OF_A_RUN),
        ("--barrier --bins 1 --release full --batch-size 200 --last-batch drop", []),
        ("--barrier --sweep load=0.3,0.6 --sweep bins=1,4 --seeds 2", ["sweep.png"]),
        ("--barrier --sweep release=full,greedy", ["sweep.png"]),
        ("--sweep load=0.3", ["sweep.png"]),
    ],
)
def test_the_command_draws_into_a_folder(flags: str, names: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "a" / "folder"
    assert main(["simulate", "--requests", "150", *flags.split(), "--plot", str(folder)]) == 0
    assert sorted(path.name for path in folder.iterdir()) == names
    assert all(path.read_bytes()[:4] == PNG for path in folder.iterdir())


@ticks
def test_settings_other_than_numbers_are_drawn_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    from llmserve.simulation.estimates import Estimate, Repeated

    names = ("throughput_per_s", "latency_s_mean", "latency_s_p95")
    cases = [
        Repeated((1,), {name: Estimate(float(place + 1)) for name in names}, (), {"arrival_rate": value})
        for place, value in enumerate(("3", "20", "inf"))
    ]
    throughput, latency = comparison_figure(cases).axes
    assert [text.get_text() for text in throughput.get_xticklabels()] == ["3", "20", "inf"]
    assert throughput.lines[0].get_xdata().tolist() == [0, 1, 2]  # type: ignore[union-attr]
    assert latency.get_ylim()[0] == 0


def test_without_matplotlib_a_plot_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without(monkeypatch, "matplotlib")
    assert main(["simulate", "--requests", "100000000", "--plot", str(tmp_path / "folder")]) == 2
    assert capsys.readouterr().err == f"llmserve: --plot needs matplotlib: {pip_install('plot')}\n"
    assert not (tmp_path / "folder").exists()


def test_an_impossible_folder_is_an_error_of_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["simulate", "--requests", "10", "--plot", str(tmp_path / "file" / "folder")]) == 2
    assert "cannot make the folder" in capsys.readouterr().err


def test_the_recorder_of_batches_keeps_the_same_times_as_the_plain_one() -> None:
    scenario = Scenario(requests=500, barrier=True, seed=3)
    config = SchedulingConfig(bins=4, release="full", queue_requests_max=10**9).resolved(barrier=True)
    work = prepare(scenario, config)
    plain, full = Recorder(len(work)), BatchRecorder(len(work))
    assert run(scenario, config, work, recorder=plain) == run(scenario, config, work, recorder=full)
    assert sorted(request_id for start in full.starts for request_id in start.request_ids) == list(range(500))
    assert all(np.isclose(full.started_s[start.request_ids[0]], start.started_s) for start in full.starts)


def test_a_run_without_a_plot_loads_no_matplotlib() -> None:
    script = (
        "import sys; from llmserve.__main__ import main\n"
        "main(['simulate', '--requests', '10', '--sweep', 'bins=1,2', '--json'])\n"
        "print('matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
