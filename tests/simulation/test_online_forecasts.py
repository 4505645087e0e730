"""`llmserve simulate --predictions online:FILE`: forecasts by a learner that learns each answer when it ends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from llmserve.__main__ import main
from llmserve.errors import ConfigError
from llmserve.live import journal
from llmserve.request import Request
from llmserve.scheduling.messages import BatchEnded, ForecastsRevised, RequestArrived, RequestEnded
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.learning import SimulatedLearning
from llmserve.simulation.online import OnlineRows
from llmserve.simulation.prompt_rows import read_answers
from llmserve.simulation.scenario import Answers, Scenario, prepare


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    """Answers of two templates: 5 and about 100 tokens."""
    rng = np.random.default_rng(0)
    rows = [
        {"prompt": f"A short answer, please, to question {number}", "output_tokens": 5}
        if number % 2
        else {"prompt": f"Tell a long story about number {number}", "output_tokens": int(rng.integers(80, 120))}
        for number in range(300)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({**row, "model": "m"}) + "\n" for row in rows))
    return str(path)


def steps_of(prompts: str, path: Path, *flags: str) -> list[journal.Step]:
    """The steps of a run, whose journal is written to the path."""
    words = ["simulate", "--predictions", f"online:{prompts}", "--journal", str(path), "--json", *flags]
    assert main(words) == 0
    header, steps = journal.read(path)
    assert journal.replay(header, steps) == steps
    return steps


@dataclass(frozen=True)
class CountForecast:
    lengths: tuple[float, ...]

    @property
    def median(self) -> float | None:
        return self.lengths[0] if self.lengths else None


class Counter:
    """Forecasts the number of answers learnt so far, and notes the learnt rows."""

    def __init__(self) -> None:
        self.learnt: list[str] = []

    def forecast(self, row: str) -> CountForecast:
        return CountForecast((float(len(self.learnt)),) if self.learnt else ())

    def revise(self, row: str, forecast: CountForecast) -> CountForecast:
        return self.forecast(row)

    def observe(self, row: str, forecast: CountForecast) -> None:
        self.learnt.append(row)


def learning_of(learner: Counter, rows: Sequence[str]) -> SimulatedLearning:
    return SimulatedLearning(OnlineRows(np.array(rows, dtype=object), lambda: learner), {})


def test_an_answer_is_learnt_when_it_ends_and_not_before() -> None:
    learner = Counter()
    forecasts = learning_of(learner, ["a", "b", "c", "d"])
    assert forecasts.predicted(Request(0)) == Request(0)
    assert forecasts.predicted(Request(1)) == Request(1)
    forecasts.learn(RequestArrived(Request(1)))
    assert learner.learnt == []
    forecasts.learn(RequestEnded("gpu0", 1, "completed", 7.0))
    assert learner.learnt == ["b"]
    assert forecasts.predicted(Request(2)) == Request(2, predicted_tokens=1.0, quantiles=(1.0,))
    assert forecasts.predicted(Request(3)).predicted_tokens == 1.0
    forecasts.learn(BatchEnded("gpu0", 0, {0: 5.0, 3: 6.0}))
    assert learner.learnt == ["b", "a", "d"]


def test_an_answer_that_was_aborted_is_not_learnt_before_its_second_run_ends() -> None:
    learner = Counter()
    forecasts = learning_of(learner, ["a"])
    forecasts.predicted(Request(0))
    forecasts.learn(RequestEnded("gpu0", 0, "cancelled"))
    assert learner.learnt == []
    forecasts.learn(RequestEnded("gpu0", 0, "completed", 7.0))
    assert learner.learnt == ["a"]


@pytest.mark.parametrize("flags", [[], ["--barrier", "--batch-size", "4"]])
def test_every_request_gets_its_forecast_at_its_arrival_by_the_answers_until_then(
    flags: list[str], prompts: str, tmp_path: Path
) -> None:
    steps = steps_of(prompts, tmp_path / "journal", "--arrival-rate", "2", *flags)
    ended, arrived = 0, 0
    for step in steps:
        event = step.event
        if isinstance(event, RequestEnded | BatchEnded):
            ended += 1
        elif isinstance(event, RequestArrived):
            assert (event.request.predicted_tokens is None) == (ended == 0)
            arrived += 1
    assert arrived == 300
    assert ended


def test_the_requests_of_a_burst_get_forecasts_while_they_wait(prompts: str, tmp_path: Path) -> None:
    events = [step.event for step in steps_of(prompts, tmp_path / "journal", "--arrival-rate", "inf")]
    requests = [event.request for event in events if isinstance(event, RequestArrived)]
    assert len(requests) == 300
    assert all(request.predicted_tokens is None for request in requests)
    revised = {part.request_id for event in events if isinstance(event, ForecastsRevised) for part in event.revisions}
    assert len(revised) > 280
    ended = [event.output_tokens for event in events if isinstance(event, RequestEnded)]
    assert np.mean(ended[:150]) < 0.7 * np.mean(ended[150:]), "short answers overtake long ones"


def test_templates_are_learnt_during_the_run(prompts: str, tmp_path: Path) -> None:
    steps = steps_of(prompts, tmp_path / "journal", "--arrival-rate", "2")
    events = [step.event for step in steps]
    predicted = {e.request.id: e.request.predicted_tokens for e in events if isinstance(e, RequestArrived)}
    lengths = {e.request_id: e.output_tokens for e in events if isinstance(e, RequestEnded)}
    late = range(150, 300)
    errors = [abs((predicted[number] or 0.0) - lengths[number]) for number in late]
    assert np.mean(errors) < 15
    assert np.mean([abs(50 - lengths[number]) for number in late]) > 40


def test_each_row_of_the_file_is_one_request(prompts: str) -> None:
    answers = read_answers(prompts, None, learning=True)
    settings = SchedulingConfig().resolved(barrier=False)
    work = prepare(Scenario(predictions=f"online:{prompts}"), settings, answers)
    assert sorted(work.trace.output_tokens) == sorted(answers.output_tokens)
    assert work.online is not None
    assert len({row.prompt.text for row in work.online.rows}) == 300
    assert [row.output_tokens for row in work.online.rows] == work.trace.output_tokens.tolist()
    assert (work.scores, work.lengths) == ((), ()), "a server that has learnt nothing has no sample"
    more = prepare(Scenario(predictions=f"online:{prompts}", requests=450), settings, answers)
    assert more.online is not None
    counts = np.unique([row.prompt.text for row in more.online.rows], return_counts=True)[1]
    assert sorted(counts) == [1] * 150 + [2] * 150


def test_the_seed_decides_everything(prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journals = []
    for number, seed in enumerate((1, 1, 2)):
        path = tmp_path / f"journal{number}"
        steps_of(prompts, path, "--load", "0.9", "--order", "shortest", "--seed", str(seed))
        journals.append(path.read_bytes())
    assert journals[0] == journals[1] != journals[2]


def test_runs_in_several_processes_are_the_same(prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for jobs in ("1", "2"):
        flags = ["--predictions", f"online:{prompts}", "--seeds", "2", "--jobs", jobs, "--json"]
        assert main(["simulate", *flags]) == 0
        printed.append(json.loads(capsys.readouterr().out))
    assert printed[0] == printed[1]


def test_shortest_first_gains_from_what_is_learnt(prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = f"predictions=oracle,online:{prompts},none"
    flags = ["--load", "0.95", "--slots", "2", "--order", "shortest", "--requests", "300", "--seeds", "3", "--json"]
    assert main(["simulate", "--prompts", prompts, "--sweep", sweep, *flags]) == 0
    results = json.loads(capsys.readouterr().out)
    oracle, online, none = (result["estimates"]["latency_s_mean"]["mean"] for result in results)
    assert max(oracle, online) < 0.9 * none


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--prompts other.jsonl", "prompts must be the file of predictions"),
        ("--lengths constant:5", "lengths cannot be given with predictions"),
        ("--lengths-factor 2", "lengths_factor cannot be given with predictions"),
        ("--trace absent.csv", "trace cannot be given with predictions"),
    ],
)
def test_settings_that_the_rows_decide_are_refused(
    flags: str, message: str, prompts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = flags.format(prompts=prompts).split()
    assert main(["simulate", "--predictions", f"online:{prompts}", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_cannot_be_read_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--predictions", "online:absent.jsonl"]) == 2
    assert "absent.jsonl" in capsys.readouterr().err


def test_a_script_must_pass_the_rows(prompts: str) -> None:
    scenario = Scenario(predictions=f"online:{prompts}")
    with pytest.raises(ConfigError, match="without the rows for a learner"):
        prepare(scenario, SchedulingConfig().resolved(barrier=False), Answers(np.ones(3), np.ones(3)))
