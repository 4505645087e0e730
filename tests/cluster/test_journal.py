"""Journal files: what cannot be read is said with its line."""

from pathlib import Path

import pytest

from llmserve.cluster import journal
from llmserve.cluster.journal import Header, Journal
from llmserve.errors import JournalError
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.group_rates import Replan
from llmserve.scheduling.messages import EngineReady, PlanChanged, RequestArrived, RequestEnded, ServingGroup
from llmserve.scheduling.policies import SchedulingConfig

HEADER = Header(SchedulingConfig(bins=2, edges=(10.0,)).resolved(barrier=True), (1.0, 2.0))


def written(path: Path) -> Path:
    with Journal(HEADER, path=path) as book:
        scheduler = HEADER.scheduler()
        for now_s, event in enumerate([EngineReady(EngineInfo("e", 1, True)), RequestArrived(Request(1, 5.0))]):
            book.append(float(now_s), event, scheduler.handle(event, float(now_s)))
    return path


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    header, steps = journal.read(written(tmp_path / "j"))
    assert header == HEADER
    assert [step.event for step in steps] == [EngineReady(EngineInfo("e", 1, True)), RequestArrived(Request(1, 5.0))]
    assert journal.replay(header, steps) == steps


def test_groups_are_in_the_header_and_changes_of_their_plan_among_the_events(tmp_path: Path) -> None:
    left = ServingGroup("left", ("e",), ("m",))
    right = ServingGroup("right", ("f",), ("n",), (("chat", "m"),))
    header = Header(HEADER.scheduling, groups=(left, right), replan=Replan(60.0, (("chat", "m", 2.0),)))
    events = [
        EngineReady(EngineInfo("e", 1, True)),
        RequestArrived(Request(1, 5.0, model="m")),
        PlanChanged((right,)),
        EngineReady(EngineInfo("f", 1, True)),
        RequestEnded("e", 1, "completed", 4.0),
    ]
    with Journal(header, path=tmp_path / "j") as book:
        scheduler = header.scheduler()
        for now_s, event in enumerate(events):
            book.append(float(now_s), event, scheduler.handle(event, float(now_s)))
    read, steps = journal.read(tmp_path / "j")
    assert read == header
    assert [step.event for step in steps] == events
    assert journal.replay(read, steps) == steps


def test_groups_that_contradict_each_other_are_an_error() -> None:
    left = ServingGroup("left", ("e",), ("m",))
    with pytest.raises(ValueError, match="name 'left' is in two groups"):
        Header(HEADER.scheduling, groups=(left, left)).scheduler()


def test_a_last_line_cut_short_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "j")
    path.write_bytes(path.read_bytes()[:-10])
    assert len(journal.read(path)[1]) == 1


def test_a_line_that_is_not_a_step_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "j")
    path.write_bytes(path.read_bytes() + b'{"now_s": "late"}\n')
    with pytest.raises(JournalError, match="line 4"):
        journal.read(path)


@pytest.mark.parametrize("text", ["", "nonsense\n"])
def test_a_file_that_is_no_journal_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "j"
    path.write_text(text)
    with pytest.raises(JournalError):
        journal.read(path)


def test_a_file_that_cannot_be_opened_is_an_error() -> None:
    with pytest.raises(JournalError, match="cannot read"):
        journal.read(Path("/nowhere/journal"))
    with pytest.raises(JournalError, match="cannot write"):
        Journal(HEADER, path=Path("/nowhere/journal"))
