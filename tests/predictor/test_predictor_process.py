"""The predictor in its own process.

Most tests replace the real worker by a small one with the same pipes and protocol. Its answer is the length of the
prompt, and the fraction of the answer is the number of prompts in the batch.
"""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from front import until

from predictor import process
from predictor.errors import BadPredictor, PredictionFailed, PredictorDied
from predictor.process import PredictorProcess
from predictor.prompt import Prompt

ROOT = Path(__file__).resolve().parents[2]

WORKER = """
import json, os, sys, time
folder = sys.argv[1]
open(folder + "/starts", "a").write("x")
if os.path.exists(folder + "/broken"):
    print(json.dumps({"error": folder + " is broken"}), flush=True)
    sys.exit()
other = os.path.exists(folder + "/other")
ready = {"training_lengths": [1, 2, 3 + other], "forecasts": [[1.0, 2.0]], "characters_max": 1000}
print(json.dumps(ready), flush=True)
features = "b3RoZXI=" if other else "ZmVhdHVyZXM="
for line in sys.stdin:
    prompts = [text for text, *_ in json.loads(line)]
    answers = [
        "cannot do that" if text == "fail" else [[len(text) + len(prompts) / 100], features] for text in prompts
    ]
    if "slow" in prompts:
        time.sleep(0.5)
    if "hang" in prompts:
        time.sleep(600)
    if "die" in prompts:
        sys.exit(3)
    print(json.dumps({"predictions": answers}), flush=True)
"""


@pytest.fixture(autouse=True)
def small_worker(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "real_worker" not in request.keywords:
        script = tmp_path / "worker.py"
        script.write_text(WORKER)
        monkeypatch.setattr(
            process, "worker_command", lambda folder, _: [sys.executable, "-S", str(script), str(folder)]
        )


@pytest_asyncio.fixture
async def predictor(tmp_path: Path) -> AsyncIterator[PredictorProcess]:
    async with PredictorProcess(tmp_path, batch_max=4, cache_max=3, restart_delay_s=0.05) as predictor:
        yield predictor


async def predicted(predictor: PredictorProcess, text: str) -> float:
    (length,), features = await predictor.predict(Prompt(text))
    assert features == b"features"
    return length


async def busy(predictor: PredictorProcess) -> "asyncio.Task[float]":
    """Keep the child busy with a batch for half a second."""
    task = asyncio.create_task(predicted(predictor, "slow"))
    await asyncio.sleep(0.1)
    return task


async def predict_when_up(predictor: PredictorProcess, prompt: str, unless: int | None = None) -> float:
    """A prediction of the next child that is up; `unless` is the process id of a child that is about to end."""
    async with asyncio.timeout(30):
        while True:
            try:
                if predictor.pid != unless:
                    return await predicted(predictor, prompt)
            except PredictorDied:
                pass
            await asyncio.sleep(0.02)


async def gather(predictor: PredictorProcess, *texts: str) -> list[float]:
    return await asyncio.gather(*[predicted(predictor, text) for text in texts])


async def test_a_prediction_comes_back(predictor: PredictorProcess) -> None:
    assert await predicted(predictor, "abc") == 3.01
    assert predictor.training_lengths == [1, 2, 3]
    assert predictor.forecasts == [(1.0, 2.0)]


async def test_prompts_that_differ_in_any_input_of_the_predictor_are_not_confused(
    predictor: PredictorProcess,
) -> None:
    running = await busy(predictor)
    prompts = [Prompt("abc"), Prompt("abc", "m"), Prompt("abc", system="s"), Prompt("abc", history_characters=1)]
    assert {prediction.lengths for prediction in await asyncio.gather(*map(predictor.predict, prompts))} == {(3.04,)}
    await running


async def test_the_text_of_a_batch_is_bounded(predictor: PredictorProcess) -> None:
    predictor.batch_characters_max = 1500
    running = await busy(predictor)
    long = [letter * 900 for letter in "abc"]
    assert await gather(predictor, *long) == [900.01, 900.02, 900.02]
    await running


async def test_prompts_that_wait_while_a_batch_runs_form_a_batch(predictor: PredictorProcess) -> None:
    running = await busy(predictor)
    assert await gather(predictor, "a", "bb", "ccc") == [1.03, 2.03, 3.03]
    assert await running == 4.01


async def test_a_batch_is_never_larger_than_batch_max(predictor: PredictorProcess) -> None:
    running = await busy(predictor)
    lengths = await gather(predictor, *"abcdefghij")
    assert lengths == [1.02] * 2 + [1.04] * 8
    await running


async def test_under_overload_the_newest_prompts_are_answered_and_the_oldest_fail_at_once(
    predictor: PredictorProcess,
) -> None:
    predictor.waiting_max = 6
    running = await busy(predictor)
    waiting = [asyncio.create_task(predicted(predictor, letter)) for letter in "abcdefgh"]
    await asyncio.sleep(0.05)
    assert [type(task.exception()) for task in waiting[:2]] == [PredictionFailed] * 2
    assert await asyncio.gather(*waiting[2:]) == [1.02] * 2 + [1.04] * 4
    await running


async def test_abandoned_prompts_leave_nothing_behind(predictor: PredictorProcess) -> None:
    running = await busy(predictor)
    waiting = [asyncio.create_task(predicted(predictor, letter)) for letter in "abc"]
    await asyncio.sleep(0.05)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    assert not predictor._waiting
    await running


async def test_a_prompt_with_several_callers_is_computed_once(predictor: PredictorProcess) -> None:
    running = await busy(predictor)
    assert await gather(predictor, *["same"] * 10) == [4.01] * 10
    await running


async def test_a_repeated_prompt_needs_no_child(predictor: PredictorProcess) -> None:
    length = await predicted(predictor, "abc")
    await predictor.close()
    assert await predicted(predictor, "abc") == length


async def test_the_least_recently_used_prompt_is_forgotten_first(predictor: PredictorProcess) -> None:
    for prompt in ["a", "b", "c", "a", "d"]:  # cache_max is 3: "b" is dropped
        await predicted(predictor, prompt)
    await predictor.close()
    assert await gather(predictor, *"acd") == [1.01] * 3
    with pytest.raises(PredictorDied, match="closed"):
        await predicted(predictor, "b")


async def test_predictions_of_a_predictor_that_was_replaced_are_forgotten(
    predictor: PredictorProcess, tmp_path: Path
) -> None:
    await predicted(predictor, "abc")
    for expected, files in ((b"features", []), (b"other", [tmp_path / "other"])):
        for file in files:
            file.touch()
        before = predictor.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        async with asyncio.timeout(30):
            while predictor.pid in (None, before):  # noqa: ASYNC110 (no event to wait for)
                await asyncio.sleep(0.02)
        assert (await predictor.predict(Prompt("abc"))).features == expected
    assert predictor.training_lengths == [1, 2, 4]


async def test_a_very_long_prompt_is_cut_before_it_is_sent(predictor: PredictorProcess) -> None:
    assert await predicted(predictor, "x" * 5_000_000) == 1000.01


async def test_a_failed_prompt_is_reported_and_harms_no_other(predictor: PredictorProcess) -> None:
    child, running = predictor.pid, await busy(predictor)
    failed, other = await asyncio.gather(
        predicted(predictor, "fail"), predicted(predictor, "other"), return_exceptions=True
    )
    await running
    assert isinstance(failed, PredictionFailed)
    assert str(failed) == "cannot do that"
    assert other == 5.02
    assert await predicted(predictor, "abc") == 3.01
    assert predictor.pid == child


async def test_the_childs_death_fails_waiting_calls_and_a_new_child_starts(
    predictor: PredictorProcess,
) -> None:
    running = await busy(predictor)
    waiting = [predicted(predictor, text) for text in ["later", "a", "b", "c", "die"]]
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [PredictorDied] * 5
    assert await running == 4.01
    assert await predict_when_up(predictor, "abc") == 3.01


async def test_an_idle_childs_death_is_noticed(predictor: PredictorProcess) -> None:
    assert predictor.pid is not None
    killed = predictor.pid
    os.kill(killed, signal.SIGKILL)
    assert await predict_when_up(predictor, "abc", unless=killed) == 3.01


async def test_calls_fail_at_once_while_the_child_is_down(tmp_path: Path) -> None:
    async with PredictorProcess(tmp_path, restart_delay_s=3600) as predictor:
        with pytest.raises(PredictorDied):
            await predicted(predictor, "die")
        started_s = time.monotonic()
        with pytest.raises(PredictorDied, match="ended"):
            await predicted(predictor, "abc")
        assert time.monotonic() - started_s < 1


async def test_a_child_that_hangs_is_replaced(tmp_path: Path) -> None:
    async with PredictorProcess(tmp_path, reply_timeout_s=0.5, restart_delay_s=0.05) as predictor:
        with pytest.raises(PredictorDied, match=r"did not answer within 0\.5 s"):
            await predicted(predictor, "hang")
        assert await predict_when_up(predictor, "abc") == 3.01


async def test_a_child_that_cannot_start_again_is_tried_less_and_less_often(tmp_path: Path) -> None:
    async with PredictorProcess(tmp_path, restart_delay_s=0.1) as predictor:
        (tmp_path / "broken").touch()
        with pytest.raises(PredictorDied):
            await predicted(predictor, "die")
        await asyncio.sleep(1.0)  # after 0.1, 0.3 and 0.7 s
        assert 2 <= len((tmp_path / "starts").read_text()) <= 4
        with pytest.raises(PredictorDied, match="broken"):
            await predicted(predictor, "abc")
        (tmp_path / "broken").unlink()
        assert await predict_when_up(predictor, "abc") == 3.01


async def test_a_caller_that_gives_up_does_not_disturb_others(predictor: PredictorProcess) -> None:
    running = await busy(predictor)
    other = asyncio.create_task(predicted(predictor, "other"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await asyncio.gather(predicted(predictor, "impatient"), predicted(predictor, "other"))
    assert await other == 5.01  # alone in its batch: "impatient" was abandoned
    assert await running == 4.01


async def test_a_batch_whose_callers_have_all_given_up_still_fills_the_cache(predictor: PredictorProcess) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await predicted(predictor, "slow")
    assert await predicted(predictor, "abc") == 3.01
    await predictor.close()
    assert await predicted(predictor, "slow") == 4.01


async def test_closing_fails_waiting_calls_and_leaves_no_child(predictor: PredictorProcess) -> None:
    assert predictor.pid is not None
    child = predictor.pid
    running = await busy(predictor)
    await predictor.close()
    with pytest.raises(PredictorDied, match="closed"):
        await running
    assert not psutil.pid_exists(child)
    await predictor.close()


async def test_a_predictor_that_was_not_started_raises_an_error(tmp_path: Path) -> None:
    predictor = PredictorProcess(tmp_path)
    with pytest.raises(PredictorDied, match="not been started"):
        await predicted(predictor, "abc")
    await predictor.close()


async def test_a_cancelled_start_leaves_no_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = tmp_path / "pid"
    script = 'echo $$ > "$0.new" && mv "$0.new" "$0" && exec sleep 600'
    monkeypatch.setattr(process, "worker_command", lambda *_: ["sh", "-c", script, str(note)])
    starting = asyncio.create_task(PredictorProcess(tmp_path).start())
    await until(note.exists)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not psutil.pid_exists(int(note.read_text()))


async def test_a_child_that_is_not_ready_in_time_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "worker_command", lambda *_: ["sleep", "600"])
    with pytest.raises(PredictorDied, match=r"did not answer within 0\.2 s"):
        await PredictorProcess(tmp_path, start_timeout_s=0.2).start()


@pytest.mark.real_worker
async def test_a_bad_folder_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(BadPredictor, match=f"{tmp_path} is not a predictor's folder: it has no predictor.json"):
        await PredictorProcess(tmp_path).start()


@pytest.fixture
def frozen() -> Iterator[None]:
    """As in the server: a collection that scans all that the tests have imported would stall the event loop."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.real_worker
@pytest.mark.usefixtures("frozen")
async def test_the_event_loop_keeps_ticking_and_ctrl_c_does_not_reach_the_child(random_predictor: Path) -> None:
    gaps_s = [0.0]

    async def tick() -> None:
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(0.001)
            gaps_s.append(time.monotonic() - before_s)

    ticking = asyncio.create_task(tick())
    started_s = time.monotonic()
    async with PredictorProcess(random_predictor) as predictor:
        assert predictor.pid is not None
        os.kill(predictor.pid, signal.SIGINT)
        predictions = await asyncio.gather(*[predictor.predict(Prompt(f"count to {i}")) for i in range(400)])
        assert predictor.training_lengths == [10, 20, 30]
    took_s = time.monotonic() - started_s
    ticking.cancel()
    assert all(prediction.lengths[0] >= 1 for prediction in predictions)
    assert all(len(prediction.features) == 16 + 2 * 20 for prediction in predictions)  # of 20 prompts in its training
    assert max(gaps_s) < took_s / 4  # loading takes nearly all of the time and must not block the loop


PARENT = """
import asyncio, json, os, signal, sys
import predictor
from predictor.process import PredictorProcess
from predictor.prompt import Prompt

async def main():
    predictor = PredictorProcess(sys.argv[1])
    await predictor.start()
    await predictor.predict(Prompt("hello"))
    heavy = sorted({"torch", "transformers", "onnxruntime", "numpy"} & set(sys.modules))
    print(json.dumps({"child": predictor.pid, "heavy": heavy}), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.real_worker
def test_the_parent_never_imports_torch_and_its_child_ends_when_the_parent_is_killed(random_predictor: Path) -> None:
    parent = subprocess.run(
        [sys.executable, "-c", PARENT, str(random_predictor)],
        cwd=ROOT, stdout=subprocess.PIPE, timeout=120, check=False,
    )  # fmt: skip
    assert parent.returncode == -signal.SIGKILL
    report = json.loads(parent.stdout)
    assert report["heavy"] == []
    deadline_s = time.monotonic() + 10
    while psutil.pid_exists(report["child"]) and psutil.Process(report["child"]).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s, "the child has outlived its parent"
        time.sleep(0.05)
