"""Journal files: unreadable lines are named."""

from pathlib import Path

import msgspec
import pytest
from papers.shepherd.worker import SimulatedWorker

from bins.profile import StepTimes
from llmserve.errors import JournalError
from llmserve.forecasts.lengths import Made
from llmserve.live import journal
from llmserve.live.cluster import LiveCluster
from llmserve.live.fleet import Fleet
from llmserve.live.journal import Header, Journal, Step
from llmserve.request import Call, EngineInfo, Request, Wire
from llmserve.scheduling.lengths import Learned
from llmserve.scheduling.messages import (
    EngineReady,
    PreemptBatch,
    RequestArrived,
    RequestEnded,
    TimerFired,
)
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.cluster import SimulatedCluster
from llmserve.wire.terms import forwarded_terms
from predictor.prompt import Prompt

HEADER = Header(SchedulingConfig(bins=2, edges=(10.0,)).resolved(barrier=True), (1.0, 2.0))


def written(path: Path) -> Path:
    with Journal(HEADER, path=path) as book:
        scheduler = HEADER.scheduler()
        for now_s, event in enumerate([EngineReady(EngineInfo("e", 1, True)), RequestArrived(Request(1, 5.0))]):
            book.append(float(now_s), event, scheduler.handle(event, float(now_s)))
    return path


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    header, steps = journal.read(written(tmp_path / "j"))
    assert header == HEADER
    assert [step.event for step in steps] == [EngineReady(EngineInfo("e", 1, True)), RequestArrived(Request(1, 5.0))]
    assert journal.replay(header, steps) == steps


BEFORE_MODELS = """\
{"scheduling":{"bins":2,"batch_size":1,"release":"greedy","order":"fffs","edges":[10.0]},\
"scores":[1.0,2.0],"lengths":[],"version":4}
{"now_s":0.0,"event":{"type":"EngineReady","engine":{"name":"e","slots":1,"barrier":true}},"actions":[]}
{"now_s":1.0,"event":{"type":"RequestArrived","request":{"id":1,"predicted_tokens":5.0}},"actions":[{"type":"StartBatch",\
"engine":"e","batch":{"id":1,"bin":0,"requests":[{"id":1,"predicted_tokens":5.0}],"formed_at_s":1.0,"size":1}}]}
"""


def test_a_journal_from_before_several_models_is_read_and_replayed(tmp_path: Path) -> None:
    (tmp_path / "j").write_text(BEFORE_MODELS)
    header, steps = journal.read(tmp_path / "j")
    assert len(steps) == 2
    assert journal.replay(header, steps) == steps


BEFORE_BLOCKS = """\
{"scheduling":{"bins":1,"batch_size":1,"release":"greedy","order":"fffs"},"version":12}
{"now_s":0.0,"event":{"type":"EngineReady","engine":{"name":"a","slots":8,"barrier":false}},"actions":[]}
{"now_s":0.0,"event":{"type":"EngineReady","engine":{"name":"b","slots":8,"barrier":false}},"actions":[]}
{"now_s":1.0,"event":{"type":"RequestArrived","request":{"id":0}},"actions":[{"type":"StartBatch",\
"engine":"a","batch":{"id":1,"bin":0,"requests":[{"id":0}],"formed_at_s":1.0,"size":1}}]}
{"now_s":1.0,"event":{"type":"RequestArrived","request":{"id":1,"prompt_tokens":256.0,"prefixes":[11,12]}},"actions":[\
{"type":"StartBatch","engine":"b","batch":{"id":2,"bin":0,"requests":[{"id":1,"prompt_tokens":256.0,"prefixes":[11,12]}],\
"formed_at_s":1.0,"size":1}}]}
{"now_s":2.0,"event":{"type":"RequestEnded","engine":"a","request_id":0,"outcome":"failed"},"actions":[]}
{"now_s":2.0,"event":{"type":"RequestEnded","engine":"b","request_id":1,"outcome":"failed"},"actions":[]}
{"now_s":3.0,"event":{"type":"RequestArrived","request":{"id":2,"prompt_tokens":256.0,"prefixes":[11,13]}},"actions":[\
{"type":"StartBatch","engine":"b","batch":{"id":3,"bin":0,"requests":[{"id":2,"prompt_tokens":256.0,"prefixes":[11,13]}],\
"formed_at_s":3.0,"size":1}}]}
"""


def test_a_journal_from_before_blocks_is_replayed_with_the_beginnings_that_its_prompts_had(tmp_path: Path) -> None:
    (tmp_path / "j").write_text(BEFORE_BLOCKS)
    header, steps = journal.read(tmp_path / "j")
    assert journal.replay(header, steps) == steps
    arrived = [step.event.request for step in steps if isinstance(step.event, RequestArrived)]
    assert [(request.blocks, request.block_tokens) for request in arrived] == [
        ((), 0.0),
        ((11, 12), 64.0),
        ((11, 13), 64.0),
    ]


@pytest.mark.parametrize("version", [3, 15])
def test_a_journal_of_another_format_is_refused(tmp_path: Path, version: int) -> None:
    """Unknown fields would be dropped silently, and the replay would be of another run."""
    (tmp_path / "j").write_text(BEFORE_MODELS.replace('"version":4', f'"version":{version}'))
    with pytest.raises(JournalError, match=f"has version {version} of the format; this is version 14"):
        journal.read(tmp_path / "j")


class WrongInfo:
    """An engine that differs from its declared info."""

    def __init__(self, engine: SimulatedWorker, info: EngineInfo) -> None:
        self._engine, self.info = engine, info

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)


def test_a_replay_learns_the_same_paces_and_preempts_alike(tmp_path: Path) -> None:
    """An engine slower than declared, and bursts that preempt: a replay from the file makes the same decisions."""
    declared = EngineInfo("e", 8, True, speeds={"a": StepTimes(0.1, (0.1,) * 8), "b": StepTimes(0.1, (0.2,) * 8)})
    slower = EngineInfo("e", 8, True, speeds={"a": StepTimes(0.1, (0.13,) * 8), "b": StepTimes(0.1, (0.27,) * 8)})
    header = Header(SchedulingConfig(order="flex", batch_size=8, preemption_factor=2.0).resolved(barrier=True))
    arrivals = [
        (
            0.37 * number,
            Request(4 * number + offset, float(offset + 1), 0.37 * number + 9.0, model="ab"[number % 3 == 0]),
        )
        for number in range(120)
        for offset in range(1 + 3 * (number % 3 == 0))
    ]
    scheduler = header.scheduler()
    lengths = [1.0 + number % 5 for number in range(480)]
    with Journal(header, path=tmp_path / "j") as book:
        engine = WrongInfo(SimulatedWorker(slower, lengths), declared)
        SimulatedCluster(scheduler, [engine], journal=book).run(iter(arrivals))  # type: ignore[list-item]
    assert scheduler.engines["e"].pace("a") > 1.1
    read, steps = journal.read(tmp_path / "j")
    assert any(isinstance(action, PreemptBatch) for step in steps for action in step.actions)
    assert journal.replay(read, steps) == steps


def test_what_was_learnt_before_is_in_the_header_and_a_replay_begins_with_it(tmp_path: Path) -> None:
    """A model that was learnt of gets its own edges and times, an engine its pace; others begin as ever."""
    config = SchedulingConfig(order="flex", bins=2, batch_size=4).resolved(barrier=True)
    learnt = {"a": Learned((10.0, 20.0, 30.0, 40.0), (11.0, 19.0, 33.0, 41.0), (0.5, 25.0, 40.0))}
    header = Header(config, (1.0, 2.0), learnt=learnt)
    info = EngineInfo("e", 4, True, speeds={"": StepTimes(0.1, (0.1,) * 4)}, paces={"a": 1.5})
    with Journal(header, path=tmp_path / "j") as book:
        scheduler = header.scheduler()
        for now_s, event in enumerate(
            [
                EngineReady(info),
                RequestArrived(Request(1, 35.0, model="a")),
                RequestArrived(Request(2, 5.0, model="b")),
                RequestEnded("e", 1, "completed", 30.0),
                RequestEnded("e", 2, "completed", 30.0),
            ]
        ):
            if now_s == 1:
                assert scheduler.engines["e"].pace("a") == 1.5
                assert scheduler.engines["e"].proven_until_s("a") < 0, "no answer has proven the pace yet"
            book.append(float(now_s), event, scheduler.handle(event, float(now_s)))
    a, b = scheduler.queues("a"), scheduler.queues("b")
    assert (a.binning.edges.edges, b.binning.edges.edges) == ((25.0,), (1.5,))
    assert a.service.tokens_mean == pytest.approx(25.0 + 5.0 / 40.4, rel=0.01), "one answer of 30 after 40 of 25"
    assert a.binning.seen is not None
    assert sorted(a.binning.seen.predicted[1])[-1] == 41.0
    read, steps = journal.read(tmp_path / "j")
    assert read == header
    assert journal.replay(read, steps) == steps


def test_a_journal_of_a_server_with_several_groups_is_refused_by_its_version(tmp_path: Path) -> None:
    first, *steps = written(tmp_path / "j").read_text().splitlines(keepends=True)
    grouped = first.replace('"version":14', '"version":10,"groups":[{"name":"left","workers":["e"],"models":["m"]}]')
    (tmp_path / "j").write_text("".join([grouped, *steps]))
    with pytest.raises(JournalError, match="version 10 of the format, is of a server with several groups"):
        journal.read(tmp_path / "j")


def test_a_last_line_cut_short_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "j")
    path.write_bytes(path.read_bytes()[:-10])
    assert len(journal.read(path)[1]) == 1


def test_a_file_of_several_runs_is_continued_and_the_last_run_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "j")
    first = path.read_bytes()
    later = Header(SchedulingConfig(bins=3))
    with Journal(later, path=path) as book:
        book.append(0.0, TimerFired(), ())
    assert path.read_bytes().startswith(first)
    assert journal.read(path) == (later, [Step(0.0, TimerFired(), ())])


def test_a_line_cut_short_by_a_crash_keeps_the_next_run_readable(tmp_path: Path) -> None:
    path = written(tmp_path / "j")
    path.write_bytes(path.read_bytes()[:-10])
    written(path)
    assert len(journal.read(path)[1]) == 2
    path.write_bytes(path.read_bytes() + b'{"now_s": "late"}\n')
    with pytest.raises(JournalError, match="line 7"):
        journal.read(path)


def test_a_journal_begins_in_its_file_at_once(tmp_path: Path) -> None:
    with Journal(HEADER, path=tmp_path / "j"):
        assert journal.read(tmp_path / "j") == (HEADER, [])


def test_a_journal_is_its_owners_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "j"
    written(path)
    assert (path.stat().st_mode & 0o777, caplog.text) == (0o600, "")
    path.chmod(0o640)
    written(path)
    assert f"run `chmod 600 {path}`" in caplog.text
    Journal(HEADER, path=Path("/dev/null")).close()
    assert len(caplog.records) == 1, "a device is nobody's secret"


def test_a_line_that_is_not_a_step_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "j")
    path.write_bytes(path.read_bytes() + b'{"now_s": "late"}\n')
    with pytest.raises(JournalError, match="line 4"):
        journal.read(path)


@pytest.mark.parametrize("text", ["", "nonsense\n"])
def test_a_file_other_than_a_journal_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "j"
    path.write_text(text)
    with pytest.raises(JournalError):
        journal.read(path)


def test_a_file_that_cannot_be_opened_is_an_error() -> None:
    with pytest.raises(JournalError, match="cannot read"):
        journal.read(Path("/nowhere/journal"))
    with pytest.raises(JournalError, match="cannot write"):
        Journal(HEADER, path=Path("/nowhere/journal"))


async def test_a_default_weight_stays_out_of_a_journal_whoever_has_told_it() -> None:
    terms = forwarded_terms('{"weight":1.0,"after_tokens":0.0}')
    calls = LiveCluster(HEADER.scheduler(), Fleet([]), Journal(HEADER)).calls
    call = Call(Wire("/v1/chat/completions", b""), Prompt("hello"), terms=terms)
    request = calls.request_of(call, Made(5.0), 1, 0.0)
    assert msgspec.json.decode(msgspec.json.encode(request)).keys() == {
        "id",
        "predicted_tokens",
        "prompt_tokens",
        "sender",
    }
