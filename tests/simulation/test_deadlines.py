"""`simulate --slo-s`: the share of answers in time under each order, and where it is reported."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmserve.__main__ import main
from llmserve.commands.simulate import Scenario, prepare, run, simulate
from llmserve.scheduling.lengths import ENOUGH
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.figures import Story, comparison_figure, timeline_figure, waiting_figure
from llmserve.simulation.report import BatchRecorder, Summary
from llmserve.simulation.scenario import engines

OVERLOAD = ["simulate", "--barrier", "--engines", "2", "--load", "1.5", "--requests", "1000", "--slo-s", "8,30"]


class DeadlineRun:
    """A run of requests, each (arrival, output tokens, deadline) in seconds, on an engine that takes 1 s per token."""

    def __init__(
        self, folder: Path, requests: list[tuple[float, float, float]], streaming: float = 0.0, **config: Any
    ) -> None:
        path = folder / "trace.csv"
        lines = [f"{arrival_s},0,{tokens}\n" for arrival_s, tokens, _ in requests]
        path.write_text("arrival_s,input_tokens,output_tokens\n" + "".join(lines))
        scenario = Scenario(trace=str(path), step_s=1.0, barrier=True, streaming=streaming)
        self.scheduling = SchedulingConfig(**{"bins": 1, "batch_size": 1, **config}).resolved(barrier=True)
        work = prepare(scenario, self.scheduling)
        lengths = tuple([tokens for _, tokens, _ in requests] * ENOUGH)  # so that each bin has its own lengths
        deadlines_s = np.array([deadline_s for _, _, deadline_s in requests])
        work = replace(work, scores=lengths, lengths=lengths, deadlines_s=deadlines_s)
        self.recorder = BatchRecorder(len(work))
        self.summary: Summary = run(scenario, self.scheduling, work, recorder=self.recorder)
        self.story = Story(
            self.scheduling.order or "", self.recorder, work.trace, engines(scenario, self.scheduling, [])
        )


def test_the_share_in_time_is_of_all_arrivals(tmp_path: Path) -> None:
    """One ends at 3 s, in time; one at 6 s, a second late; one still waits at its deadline and fails."""
    summary = DeadlineRun(tmp_path, [(0, 3, 5), (0, 3, 5), (0, 3, 5)], order="fffs").summary
    assert summary.completed == 2
    assert summary.elapsed_s == 6.0
    assert summary.in_time_share == pytest.approx(1 / 3)
    assert summary.goodput_per_s == pytest.approx(1 / 6)
    assert summary.preempted == 0


def test_an_answer_exactly_at_its_deadline_is_in_time(tmp_path: Path) -> None:
    assert DeadlineRun(tmp_path, [(0.1, 0.2, 0.1 + 0.2)]).summary.in_time_share == 1.0


def test_the_earliest_deadline_first_is_in_time_where_first_come_first_served_is_not(tmp_path: Path) -> None:
    """Two requests arrive while the first runs; the second of them is urgent."""
    requests = [(0, 2, 10), (0.5, 2, 10), (1, 2, 4.5)]
    assert DeadlineRun(tmp_path, requests, order="fffs").summary.in_time_share == pytest.approx(2 / 3)
    assert DeadlineRun(tmp_path, requests, order="edf").summary.in_time_share == 1.0


BURST = [(0.0, 20.0, 100.0), *[(1.0, 2.0, 5.0)] * 4]  # one long answer, and four short ones that cannot wait for it
FLEX = {"order": "flex", "bins": None, "edges": (10.0,), "batch_size": 4}


def test_a_preempted_request_is_counted_and_runs_again(tmp_path: Path) -> None:
    """The four run from 1 to 3 s, then the preempted request runs from its beginning."""
    summary = DeadlineRun(tmp_path, BURST, **FLEX).summary
    assert (summary.preempted, summary.in_time_share, summary.elapsed_s) == (1, 1.0, 23.0)


def test_without_preemption_no_request_is_stopped(tmp_path: Path) -> None:
    summary = DeadlineRun(tmp_path, BURST, **FLEX, preemption="off").summary
    assert (summary.preempted, summary.completed, summary.in_time_share) == (0, 1, 0.2)


def test_an_answer_is_not_preempted_after_its_first_byte(tmp_path: Path) -> None:
    """The client sees the long answer's first byte after its first token, at 1 s: before the four come, or after."""
    long, *four = BURST
    for come_s, preempted in ((0.9, 1), (1.1, 0)):
        requests = [long, *[(come_s, tokens, deadline_s) for _, tokens, deadline_s in four]]
        assert DeadlineRun(tmp_path, requests, streaming=1.0, **FLEX).summary.preempted == preempted
        assert DeadlineRun(tmp_path, requests, streaming=0.0, **FLEX).summary.preempted == 1, (
            "its client does not stream"
        )


def test_a_request_that_runs_again_streams_again(tmp_path: Path) -> None:
    """Preempted at 0.9 s, it starts again at 2.9 s and answers at 3.9 s: arrivals at 4 s do not preempt it."""
    requests = [BURST[0], *[(0.9, 2.0, 5.0)] * 4, *[(4.0, 2.0, 8.0)] * 4]
    summary = DeadlineRun(tmp_path, requests, streaming=1.0, **FLEX).summary
    assert (summary.preempted, summary.completed) == (1, 5)


def test_a_scheduler_that_does_not_preempt_gets_no_events_of_first_bytes(tmp_path: Path) -> None:
    texts = {}
    for streaming in (0.0, 1.0):
        scenario = Scenario(requests=50, barrier=True, slo_s=(8.0,), streaming=streaming)
        for preemption in ("on", "off"):
            path = tmp_path / f"{streaming}-{preemption}"
            simulate(scenario, SchedulingConfig(order="flex", preemption=preemption), journal_path=path)  # type: ignore[arg-type]
            texts[streaming, preemption] = path.read_text()
    assert texts[1.0, "on"].count("AnswerBegan") >= 50 * 0.5, "every request that ran"
    assert texts[0.0, "off"] == texts[1.0, "off"]
    assert "AnswerBegan" not in texts[0.0, "on"]


def test_streaming_requests_are_random_and_change_nothing_else() -> None:
    config = SchedulingConfig().resolved(barrier=False)
    no_streams, some_streams = (
        prepare(Scenario(requests=4_000, slo_s=(8.0, 30.0), streaming=s), config) for s in (0.0, 0.25)
    )
    assert not no_streams.streaming
    assert abs(len(some_streams.streaming) - 1_000) < 4 * np.sqrt(4_000 * 0.25 * 0.75)  # four standard deviations
    assert no_streams.deadlines_s is not None
    assert some_streams.deadlines_s is not None
    assert no_streams.deadlines_s.tolist() == some_streams.deadlines_s.tolist()
    assert no_streams.trace.output_tokens.tolist() == some_streams.trace.output_tokens.tolist()


def test_figures_separate_preempted_from_completed_work(tmp_path: Path) -> None:
    """28 of the 29 occupied slot-seconds went into answers; one was wasted."""
    story = DeadlineRun(tmp_path, BURST, **FLEX).story
    timeline, waiting = timeline_figure([story]), waiting_figure(story)
    assert timeline is not None
    assert waiting is not None
    assert timeline.axes[0].get_title(loc="left").startswith("flex: answers grow in 97% of the time")
    assert "preempted" in [text.get_text() for text in timeline.legends[0].get_texts()]
    forming = waiting.axes[0].containers[0]
    assert [bar.get_height() for bar in forming] == [0.0, 3.0]  # the long answer waits until its last start


def test_preempted_requests_that_were_never_answered_have_no_end(tmp_path: Path) -> None:
    story = DeadlineRun(tmp_path, [(0.0, 20.0, 21.0), *BURST[1:]], **FLEX).story
    assert np.isnan(story.recorder.ended_s[0])
    figure = timeline_figure([story])
    assert figure is not None
    assert figure.axes[0].get_xlim() == (0.0, 3.0)


def test_deadlines_are_drawn_with_equal_probabilities() -> None:
    scenario = Scenario(requests=4_000, slo_s=(8.0, 30.0), seed=5)
    work = prepare(scenario, SchedulingConfig().resolved(barrier=False))
    assert work.deadlines_s is not None
    slos_s, counts = np.unique(np.round(work.deadlines_s - work.trace.arrivals_s, 6), return_counts=True)
    assert slos_s.tolist() == [8.0, 30.0]
    assert abs(counts[0] - 2_000) < 4 * np.sqrt(1_000)  # four standard deviations


def test_deadlines_change_neither_arrivals_nor_lengths() -> None:
    config = SchedulingConfig().resolved(barrier=False)
    plain, dated = (prepare(Scenario(requests=50, slo_s=slo_s), config) for slo_s in ((), (1.0,)))
    assert plain.deadlines_s is None
    assert plain.trace.arrivals_s.tolist() == dated.trace.arrivals_s.tolist()
    assert plain.trace.output_tokens.tolist() == dated.trace.output_tokens.tolist()


def test_without_deadlines_no_output_mentions_them() -> None:
    summary = simulate(Scenario(requests=50), SchedulingConfig())
    assert (summary.in_time_share, summary.goodput_per_s, summary.preempted) == (None, None, None)


def test_under_overload_flex_is_in_time_more_often_than_edf_and_fffs() -> None:
    scenario = Scenario(requests=1_000, barrier=True, engines=2, load=1.5, slo_s=(8.0, 30.0))
    shares = {}
    for order in ("fffs", "edf", "flex"):
        summary = simulate(scenario, SchedulingConfig(order=order))  # type: ignore[arg-type]
        assert summary.in_time_share is not None
        shares[order] = summary.in_time_share
    assert shares["flex"] > shares["edf"] + 0.05
    assert shares["flex"] > shares["fffs"] + 0.05


def test_the_table_and_the_json_have_the_share_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*OVERLOAD, "--order", "flex", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert 0.8 < result["in_time_share"] < 1
    assert main([*OVERLOAD, "--order", "flex"]) == 0
    rows = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in _rows(capsys)}
    assert rows["in time"] == f"{result['in_time_share']:.1%}"
    assert rows["in time/s"] == f"{result['goodput_per_s']:.4f}"
    assert rows["preempted"] == f"{result['preempted']:,}"


def test_a_sweep_has_a_column_for_the_share_in_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*OVERLOAD, "--sweep", "order=fffs,flex", "--plot", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "in time" in out
    assert [line.split("│")[1].strip() for line in out.splitlines() if line.startswith("│")] == ["fffs", "flex"]
    assert (tmp_path / "sweep.png").exists()


def test_deadlines_themselves_can_be_swept(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*OVERLOAD[:-2], "--order", "edf", "--sweep", "slo-s=8;8,30", "--json"]) == 0
    strict, mixed = json.loads(capsys.readouterr().out)
    assert strict["settings"] == {"slo_s": "8"}
    assert strict["estimates"]["in_time_share"]["mean"] < mixed["estimates"]["in_time_share"]["mean"]


def test_a_comparison_is_drawn_with_shares_only_where_all_cases_have_deadlines() -> None:
    from llmserve.simulation.estimates import Estimate, Repeated

    def case(*names: str) -> Repeated:
        metrics = ("throughput_per_s", "latency_s_mean", "latency_s_p95", *names)
        return Repeated((1,), {name: Estimate(0.5) for name in metrics}, (), {"load": "1"})

    dated, undated = case("in_time_share"), case()
    assert [axes.get_title() for axes in comparison_figure([dated]).axes][2:] == ["Answered in time, share of requests"]
    assert len(comparison_figure([dated, undated]).axes) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--slo-s 0", "slo_s (the command line): expected numbers, more than 0, not '0'"),
        ("--slo-s 1,inf", "slo_s: the number must be finite, not '1,inf'"),
        (
            "--order flex --preemption-factor 1",
            "preemption_factor (the command line): expected a number, more than 1, not '1'",
        ),
    ],
)
def test_invalid_flags_are_an_error_of_one_line(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--requests", "10", *flags.split()]) == 2
    assert capsys.readouterr().err == f"llmserve: {message}\n"


def _rows(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]


@pytest.mark.parametrize(("load", "least"), [(1.0, -0.008), (1.1, 0.1)])
def test_flex_meets_about_as_many_deadlines_as_edf_at_capacity_and_more_above_it_where_slots_refill(
    load: float, least: float
) -> None:
    scenario = Scenario(
        requests=4_000,
        lengths="lognormal:4.8,0.9,1500",
        slots=16,
        engines=2,
        slo_s=(6.0, 25.0),
        predictions="quantiles:0.5",
        load=load,
        seed=31,
    )
    flex, edf = (simulate(scenario, SchedulingConfig(order=order)).in_time_share for order in ("flex", "edf"))
    assert flex is not None
    assert edf is not None
    assert flex >= edf + least
