"""What a server has learnt survives a restart (`--state DIR`): real servers over fake engines."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from front import Front, until
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from server_process import Server, failed_start

from bins.edges import equal_mass_edges
from llmserve.calls.origins import Origin, Origins
from llmserve.engines.openai import OpenAIEngine
from llmserve.engines.timed.server import FakeEngine
from llmserve.errors import ConfigError
from llmserve.forecasts.learned_parts import engines_state, restore_engine
from llmserve.forecasts.saver import Saver
from llmserve.forecasts.state_file import StateFile, decoded, encoded, opened
from llmserve.gateway.parse import PREDICTED_HEADER
from llmserve.live import journal
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import AnswerBegan, EngineReady, RequestArrived
from llmserve.scheduling.scheduler import Scheduler
from llmserve.server.serving import serving
from llmserve.settings.dispatch import DispatchConfig
from llmserve.settings.policies import SchedulingConfig
from llmserve.settings.tree import Config, EngineConfig, LiveConfig, ServerConfig
from predictor.forecaster import Forecaster
from predictor.prompt import Prompt


def forecaster_of(front: Front) -> Forecaster:
    forecaster = front.cluster.forecasts._forecaster
    assert isinstance(forecaster, Forecaster)
    return forecaster


class Servers:
    """Servers in this process, one after the other or at once."""

    def __init__(
        self, engine: FakeEngine, folder: Path, *, keeps: bool = True, barrier: bool = False, **sections: Any
    ) -> None:
        self.url = engine.url
        self.kept, self.journal = folder / "kept", folder / "journal"
        self.file = self.kept / "learnt"
        self._keeps = keeps
        self._barrier = barrier
        self._sections = sections

    async def start(
        self, stack: AsyncExitStack, *, slots: int | None = 8, wait: bool = True, **scheduling: Any
    ) -> Front:
        config = Config(
            server=ServerConfig(port=0, state=str(self.kept) if self._keeps else None, journal=str(self.journal)),
            engines=EngineConfig(engine=(self.url,), slots=slots, look_ahead=0, barrier=self._barrier),
            scheduling=SchedulingConfig(**scheduling),
            live=LiveConfig(probe_every_s=0.05),
            **self._sections,
        )
        session = await stack.enter_async_context(aiohttp.ClientSession())
        cluster, url = await stack.enter_async_context(serving(config))
        front = Front(cluster, url, session)
        if wait:
            await until(lambda: all(cluster.engines_ready.values()))
        return front


def slots_of(front: Front) -> int:
    (handle,) = front.cluster.fleet.handles.values()
    return handle.info.slots


def text_of(kind: int) -> str:
    return f"template number {kind}, with more than thirty-two characters"


async def ask(front: Front, engine: FakeEngine, kind: int, tokens: int = 16) -> float | None:
    """Ask for an answer of a template, `tokens` long; returns its predicted length."""
    engine._output_tokens = tokens
    async with front.post(messages=[{"role": "user", "content": text_of(kind)}]) as response:
        assert response.status == 200
        await response.read()
        predicted = response.headers.get("x-llmserve-predicted-tokens")
    return None if predicted is None else float(predicted)


async def teach(front: Front, engine: FakeEngine) -> None:
    for _ in range(12):
        for kind in range(4):
            await ask(front, engine, kind, 10 * (kind + 1))


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The warnings so far that concern the state."""
    return lambda: [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and "learnt" in record.getMessage()
    ]


# ---- seen -----------------------------------------------------------------------------------------------------------


async def metrics_of(front: Front) -> dict[str, float]:
    """The samples of /metrics, by name with labels."""
    async with front.session.get(f"{front.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return {name: float(value) for name, value in [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]}


async def test_an_operator_sees_what_was_learnt_and_when_it_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is first saved when the disk has room again: before, each try counts as a failure."""
    monkeypatch.setattr(Saver.__init__, "__kwdefaults__", {"every_s": 0.02})
    began_s = time.time()
    async with FakeEngine(step_s=0.0) as engine, AsyncExitStack() as stack:
        servers = Servers(engine, tmp_path)
        room = stack.enter_context(monkeypatch.context())
        room.setattr(StateFile, "write", Disk(full=True).write)
        front = await servers.start(stack)
        for tokens in (10, 20, 30):
            await ask(front, engine, 0, tokens)
        async with front.post(headers={PREDICTED_HEADER: "7"}) as response:
            await response.read()
        await until(lambda: front.cluster.forecasts.learnt == 3)
        before = await metrics_of(front)
        while not before["llmserve_state_failures_total"]:
            before = await metrics_of(front)
        assert not servers.file.exists()
        room.undo()
        await until(servers.file.exists)
        after = await metrics_of(front)
        while after.get("llmserve_state_bytes") != servers.file.stat().st_size:
            after = await metrics_of(front)
    sources = {name: count for name, count in after.items() if name.startswith("llmserve_prediction_forecasts_total")}
    assert sum(sources.values()) == 4
    assert sources['llmserve_prediction_forecasts_total{source="none"}'] == 1
    assert sources['llmserve_prediction_forecasts_total{source="client"}'] == 1
    assert after["llmserve_prediction_learnt_answers_total"] == 3
    assert began_s <= after["llmserve_state_saved_timestamp_seconds"] <= time.time()
    assert 0 < after["llmserve_state_save_seconds"] < 60


async def test_without_a_folder_nothing_of_the_state_is_in_the_metrics(tmp_path: Path) -> None:
    async with FakeEngine(step_s=0.0) as engine, AsyncExitStack() as stack:
        front = await Servers(engine, tmp_path, keeps=False).start(stack)
        metrics = await metrics_of(front)
    assert metrics["llmserve_prediction_learnt_answers_total"] == 0
    assert not any(name.startswith("llmserve_state") for name in metrics)


# ---- restarts -------------------------------------------------------------------------------------------------------


async def test_forecasts_after_a_restart_are_those_before(tmp_path: Path) -> None:
    async with FakeEngine(step_s=0.0) as engine:
        servers = Servers(engine, tmp_path)
        async with AsyncExitStack() as stack:
            first = await servers.start(stack)
            await teach(first, engine)
            prompts = [Prompt(text_of(kind), "fake") for kind in range(5)]
            before = [(await forecaster_of(first).forecast(prompt)).lengths for prompt in prompts]
            sizes = first.cluster.forecasts.prompt_tokens.state()
        async with AsyncExitStack() as stack:
            second = await servers.start(stack)
            assert [(await forecaster_of(second).forecast(prompt)).lengths for prompt in prompts] == before
            assert str(second.cluster.forecasts.prompt_tokens.state()) == str(sizes)
            predicted = [await ask(second, engine, kind) for kind in range(4)]
    assert predicted == pytest.approx([10, 20, 30, 40], abs=1), "the first server had learnt something"


async def test_without_a_folder_a_server_begins_with_nothing_learnt(tmp_path: Path) -> None:
    async with FakeEngine(step_s=0.0) as engine:
        servers = Servers(engine, tmp_path, keeps=False)
        for _ in range(2):
            async with AsyncExitStack() as stack:
                server = await servers.start(stack)
                assert await ask(server, engine, 1) is None
    assert not servers.kept.exists()


async def test_the_scheduler_begins_as_it_ended_and_its_journal_replays(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"bins": 4, "batch_size": 2, "edges_refit_every": 16}
    async with FakeEngine(step_s=0.0) as engine:
        servers = Servers(engine, tmp_path)
        async with AsyncExitStack() as stack:
            first = await servers.start(stack, **settings)
            await teach(first, engine)
            before = first.cluster.scheduler.models["fake"]
        async with AsyncExitStack() as stack:
            second = await servers.start(stack, **settings)
            after = second.cluster.scheduler.models["fake"]
            assert len(before.binning.edges.edges) == 3
            assert sorted(after.binning.edges.values) == pytest.approx(sorted(before.binning.edges.values), abs=0.01)
            assert after.binning.edges.edges == pytest.approx(
                equal_mass_edges(before.binning.edges.values, 4), rel=0.01
            )
            assert after.service.tokens_mean == before.service.tokens_mean
            assert after.service.seconds_per_token == before.service.seconds_per_token
            await teach(second, engine)
        header, steps = journal.read(servers.journal)
        assert header.learnt["fake"].scores
        assert journal.replay(header, steps) == steps
        async with AsyncExitStack() as stack:
            third = await servers.start(stack, bins=4, batch_size=4)
            assert third.cluster.scheduler.models["fake"].binning.edges.edges == (), (
                "scores of other batches mean nothing"
            )


async def test_edges_by_answers_keep_the_lengths_that_they_are_fitted_to(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"bins": 2, "batch_size": 2, "edges_by": "answers"}
    async with FakeEngine(step_s=0.0) as engine:
        servers = Servers(engine, tmp_path)
        pairs = []
        for _ in range(2):
            async with AsyncExitStack() as stack:
                server = await servers.start(stack, **settings)
                if not pairs:
                    await teach(server, engine)
                seen = server.cluster.scheduler.models["fake"].binning.seen
                assert seen is not None
                pairs.append(sorted(zip(*np.round(seen.predicted, 2).tolist(), strict=True)))
    assert len(pairs[0]) > 40
    assert pairs[0] == pairs[1]


async def test_an_engines_pace_is_known_again(tmp_path: Path) -> None:
    """The profile is of another engine, so that the pace is far from 1."""
    dispatch = DispatchConfig(profile=("h100-llama-3.1-8b",))
    async with FakeEngine(step_s=0.0005, barrier=True) as engine:
        servers = Servers(engine, tmp_path, barrier=True, dispatch=dispatch)
        async with AsyncExitStack() as stack:
            first = await servers.start(stack, order="flex")
            await teach(first, engine)
            (before,) = first.cluster.scheduler.engines.values()
        async with AsyncExitStack() as stack:
            second = await servers.start(stack, order="flex")
            (after,) = second.cluster.scheduler.engines.values()
            assert after.pace("fake") == before.pace("fake") != 1.0
            await teach(second, engine)
        header, steps = journal.read(servers.journal)
        assert journal.replay(header, steps) == steps


async def test_slots_found_are_not_searched_again(tmp_path: Path) -> None:
    async with FakeEngine(slots=40, step_s=0.005) as engine:
        servers = Servers(engine, tmp_path)
        async with AsyncExitStack() as stack:
            first = await servers.start(stack, slots=None)
            while slots_of(first) < 40:
                await asyncio.gather(*(ask(first, engine, 1, 60) for _ in range(120)))
            found = slots_of(first)
        async with AsyncExitStack() as stack:
            second = await servers.start(stack, slots=None)
            assert slots_of(second) == found >= 40


async def test_a_model_whose_engine_is_down_is_not_forgotten(tmp_path: Path) -> None:
    async with FakeEngine(step_s=0.0) as engine:
        servers = Servers(engine, tmp_path)
        async with AsyncExitStack() as stack:
            await teach(await servers.start(stack), engine)
        url, servers.url = servers.url, "http://127.0.0.1:9"
        async with AsyncExitStack() as stack:
            await servers.start(stack, wait=False)
        servers.url = url
        async with AsyncExitStack() as stack:
            third = await servers.start(stack)
            assert third.cluster.scheduler.models["fake"].service.answers > 30
            assert await ask(third, engine, 3) == pytest.approx(40, abs=1)


async def test_no_prompt_and_no_hash_of_a_prompt_alone_is_kept(tmp_path: Path) -> None:
    """Two servers hash the same prompts differently, and the files are for their owner alone."""
    files = []
    async with FakeEngine(step_s=0.0) as engine:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            servers = Servers(engine, tmp_path / name)
            async with AsyncExitStack() as stack:
                await teach(await servers.start(stack), engine)
            files.append(servers.file.read_bytes())
            assert servers.file.stat().st_mode & 0o077 == 0
    assert all(b"template number" not in data for data in files)
    memories = [decoded(data)["learners"][""]["memory"]["keys"] for data in files]
    keys = [{key.tobytes() for part in parts for key in part["key"]} for parts in memories]
    assert len(keys[0]) == len(keys[1]) > 4
    assert keys[0].isdisjoint(keys[1])


@pytest.mark.slow
def test_a_signal_saves_and_the_next_process_continues(tmp_path: Path) -> None:
    """The command as a user starts it: the journal's header shows what the second server knew at its start."""
    engine = subprocess.Popen(
        [sys.executable, "-m", "llmserve.engines.timed", "--port", "0", "--step-s", "0.001"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert engine.stdout is not None
        url = next(word for word in engine.stdout.readline().split() if word.startswith("http"))
        flags = ["--engine", url, "--state", str(tmp_path / "kept"), "--journal", str(tmp_path / "journal")]
        for _ in range(2):
            server = Server(*flags)
            server.chat("hello", model="fake")
            assert server.stop() == 0
            server.close()
    finally:
        engine.kill()
        engine.wait()
    assert "fake" in journal.read(tmp_path / "journal")[0].learnt


# ---- files that cannot be used --------------------------------------------------------------------------------------


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda data: data[: len(data) // 2], "damaged"),
        (lambda data: data[:10], "no file of --state"),
        (lambda data: b"", "no file of --state"),
        (lambda data: flipped(data, len(data) - 5), "damaged"),
        (lambda data: flipped(data, 200), "damaged"),
        (lambda data: flipped(data, 30), "damaged"),
        (
            lambda data: data.replace(b"learnt 1", b"learnt 2", 1),
            "has version 2 of the format; this server reads version 1",
        ),
        (lambda data: data.replace(b"learnt 1", b"learnt 0", 1), "has version 0 of the format"),
        (lambda data: b"PK\x03\x04" + data, "no file of --state"),
        (lambda data: b"".join(encoded({"learners": []})[0]), "learnt"),
        (lambda data: b"".join(encoded({"learners": {"": {"predictor": "", "secret": "not hex"}}})[0]), "learnt"),
    ],
)
async def test_a_file_that_cannot_be_used_means_a_cold_start_and_one_warning(
    tmp_path: Path, warnings: Callable[[], list[str]], spoil: Callable[[bytes], bytes], why: str
) -> None:
    async with FakeEngine(step_s=0.0) as engine:
        servers = Servers(engine, tmp_path)
        async with AsyncExitStack() as stack:
            await teach(await servers.start(stack), engine)
        spoilt = spoil(servers.file.read_bytes())
        servers.file.write_bytes(spoilt)
        async with AsyncExitStack() as stack:
            server = await servers.start(stack)
            assert await ask(server, engine, 1) is None, "nothing is known"
        (warning,) = warnings()
        assert why in warning
        assert servers.file.with_suffix(".bad").read_bytes() == spoilt
        async with AsyncExitStack() as stack:
            server = await servers.start(stack)
            assert await ask(server, engine, 1) == 16, "the cold server has saved what it learnt"
        assert len(warnings()) == 1


async def test_what_was_learnt_of_another_predictor_is_left_out(tmp_path: Path) -> None:
    """Here the first server has another mark than the second."""
    async with FakeEngine(step_s=0.0) as engine:
        servers = Servers(engine, tmp_path)
        async with AsyncExitStack() as stack:
            await teach(await servers.start(stack), engine)
        state = decoded(servers.file.read_bytes())
        state["learners"][""]["predictor"] = "another"
        servers.file.write_bytes(b"".join(encoded(state)[0]))
        async with AsyncExitStack() as stack:
            server = await servers.start(stack)
            assert server.cluster.scheduler.models["fake"].service.answers > 30
            assert await ask(server, engine, 1) is None


# ---- folders --------------------------------------------------------------------------------------------------------


async def test_a_second_server_on_one_folder_refuses_to_start(tmp_path: Path) -> None:
    async with FakeEngine(step_s=0.0) as engine, AsyncExitStack() as stack:
        servers = Servers(engine, tmp_path)
        await servers.start(stack)
        with pytest.raises(ConfigError, match=rf"another server \(process {os.getpid()}\) uses {servers.kept}"):
            await servers.start(stack)
    with opened(servers.kept):
        pass  # the lock has ended with the server


def test_a_folder_that_cannot_be_made_or_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"state: cannot write to .*file"), opened(tmp_path / "file" / "kept"):
        pass
    with tempfile.TemporaryDirectory() as name:  # outside pytest's folders, which only their owner can enter
        Path(name).chmod(0o555)
        with (
            as_nobody(),
            pytest.raises(ConfigError, match=r"state: cannot write to .*: .*Permission denied"),
            opened(Path(name)),
        ):
            pass


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root could write everywhere."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_an_error_of_the_folder_comes_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, said = failed_start("--port", "0", "--state", str(tmp_path / "file"), "--engine", "http://127.0.0.1:9")
    assert status == 2
    assert "state: cannot write to" in said


# ---- writing --------------------------------------------------------------------------------------------------------

WRITER = """
import itertools, sys
from pathlib import Path
import numpy as np
from llmserve.forecasts.state_file import opened
with opened(Path(sys.argv[1])) as file:
    for number in itertools.count():
        file.write({"number": number, "array": np.full(400_000, number)})
        print(number, flush=True)
"""


def test_a_kill_in_the_middle_of_a_write_leaves_a_whole_file(tmp_path: Path) -> None:
    last = -1
    for trial in range(4):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        for _ in range(3):
            last = int(writer.stdout.readline())
        time.sleep(0.003 * trial)
        writer.kill()
        writer.wait()
        writer.stdout.close()
        with opened(tmp_path) as file:
            state = file.read()
            assert state is not None
            assert state["number"] >= last
            assert (state["array"] == state["number"]).all()
            assert state["array"].size == 400_000


def test_a_write_that_breaks_off_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with opened(tmp_path) as file:
        file.write({"number": 1})
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            file.write({"number": 2})
        assert file.read() == {"number": 1}
        monkeypatch.undo()
        file.write({"number": 2})
        assert file.read() == {"number": 2}


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text()
        | arrays(st.sampled_from([float, np.float32, bool, np.uint8, np.int64]), array_shapes(max_dims=3, min_side=0)),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    )
)
def test_every_state_is_read_as_it_was_written(value: Any) -> None:
    parts, _ = encoded({"value": value})
    np.testing.assert_equal(decoded(b"".join(parts)), {"value": value})


class Disk:
    """Fails while it is full."""

    def __init__(self, *, full: bool = False) -> None:
        self.full = full
        self.states: list[dict[str, Any]] = []

    def write(self, state: dict[str, Any]) -> int:
        if self.full:
            raise OSError(28, "No space left on device")
        self.states.append(state)
        return len(str(state))


def counting() -> Iterator[Callable[[], Any]]:
    for number in itertools.count():

        def saving(number: int = number) -> Any:
            yield
            return {"number": number}

        yield saving


async def test_states_are_saved_regularly_and_at_the_end() -> None:
    disk, savings = Disk(), counting()
    saver = Saver(disk, lambda: next(savings)(), every_s=0.005)
    saver.start()
    await until(lambda: len(disk.states) >= 3)
    await saver.close()
    assert disk.states == [{"number": number} for number in range(len(disk.states))]


async def test_a_disk_that_is_full_is_reported_once_until_it_has_room(
    warnings: Callable[[], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    disk, savings, tried = Disk(), counting(), 0

    def saving() -> Any:
        nonlocal tried
        tried += 1
        return next(savings)()

    saver = Saver(disk, saving, every_s=0.002)
    disk.full = True
    saver.start()
    await until(lambda: tried >= 4)
    assert warnings() == ["what was learnt cannot be saved: [Errno 28] No space left on device"]
    disk.full = False
    await until(lambda: bool(disk.states))
    assert caplog.messages.count("what was learnt is saved again") == 1
    disk.full = True
    await saver.close()
    assert len(warnings()) == 2
    assert saver.last is not None
    assert saver.last.size == len(str(disk.states[-1]))
    assert saver.failures + len(disk.states) == tried


@pytest.mark.parametrize("rows", [None, {}, [1], [["a", "b"]], [["a", "b", 3]], [["a", "b", "c", "d"]]])
def test_a_state_of_other_responses_is_refused_as_a_whole(rows: Any) -> None:
    origins = Origins()
    with pytest.raises(ValueError, match="responses"):
        origins.restore({"responses": rows})
    origins.restore({"responses": [["resp_1", "engine", "alice"]]})
    assert origins.get("resp_1") == Origin("engine", "alice")


def test_the_time_of_a_load_is_known_again() -> None:
    info = EngineInfo("127.0.0.1:9", 1, False, models=("a", "b"), models_at_once=1)

    def started(engine: OpenAIEngine) -> Scheduler:
        scheduler = SchedulingConfig().resolved(barrier=False).scheduler()
        scheduler.handle(EngineReady(msgspec.structs.replace(info, loads_s=engine.info.loads_s)), 0.0)
        return scheduler

    engine = OpenAIEngine(info, "http://127.0.0.1:9")
    first = started(engine)
    first.handle(RequestArrived(Request(1, model="a")), 0.0)
    first.handle(AnswerBegan(1), 7.0)
    again = OpenAIEngine(info, "http://127.0.0.1:9")
    restore_engine(again, engines_state([engine], first)[info.name])
    loaded = started(again).engines[info.name].loaded
    assert loaded is not None
    assert loaded.loads_s == {"a": 7.0}
