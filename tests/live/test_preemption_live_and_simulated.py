"""Both bodies preempt the same requests: over HTTP to a fake engine, and simulated.

A long answer runs alone; then quick requests come that are in time only if the long answer is preempted. They come
before its first token or after; its client streams or does not. The journal of the live run has the arrivals, and the
simulated body serves them again, on an engine with the fake engine's speed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest
from front import Front, StartFront, until

from bins.curve import Curve
from bins.profile import Profile
from llmserve.engines.timed.server import FakeEngine
from llmserve.live.journal import Header, Step
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import AnswerBegan, EngineReady, PreemptBatch, RequestArrived
from llmserve.settings.dispatch import DispatchConfig
from llmserve.simulation.cluster import SimulatedCluster
from llmserve.simulation.engine_model import TimedEngine

PREFILL_S, STEP_S = 0.4, 0.02
LONG, QUICK = 100, 1  # tokens
QUICK_COUNT = 8
HURRY_S = 1.4  # too short for the long answer, enough for two quick batches
FLEX = {"order": "flex", "batch_size": 8, "edges": (10.0,)}


async def ask(front: Front, tokens: int, *, slo_s: float | None = None, stream: bool = False) -> int:
    """Read an answer to its end; return its status."""
    headers = {"x-llmserve-predicted-tokens": str(tokens)}
    if slo_s is not None:
        headers["x-llmserve-slo-ms"] = str(1e3 * slo_s)
    async with front.post(headers=headers, max_tokens=tokens, stream=stream) as response:
        await response.read()
        return int(response.status)


async def quick_ones(front: Front) -> set[int]:
    return set(await asyncio.gather(*(ask(front, QUICK, slo_s=HURRY_S) for _ in range(QUICK_COUNT))))


def stopped(steps: Iterable[Step]) -> list[tuple[int, ...]]:
    return [action.request_ids for step in steps for action in step.actions if isinstance(action, PreemptBatch)]


def simulated(header: Header, steps: Iterable[Step], engine: EngineInfo, streaming: set[int]) -> list[Step]:
    """The simulated body's steps for the arrivals of these steps."""
    arrivals = [(step.now_s, step.event.request) for step in steps if isinstance(step.event, RequestArrived)]
    lengths = {request.id: _tokens(request) for _, request in arrivals}
    model = TimedEngine(engine, lengths, step_s=STEP_S, prefill_s=PREFILL_S, streaming=streaming)
    simulated_steps: list[Step] = []
    cluster = SimulatedCluster(
        header.scheduler(),
        [model],
        on_step=lambda now_s, event, actions: simulated_steps.append(Step(now_s, event, tuple(actions))),
    )
    cluster.run(iter(arrivals), flush=False)
    return simulated_steps


def _tokens(request: Request) -> float:
    assert request.predicted_tokens is not None
    return request.predicted_tokens


@pytest.mark.parametrize("answered", [False, True], ids=["before its first token", "after its first token"])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_both_bodies_preempt_the_same_answers(
    start_front: StartFront, tmp_path: Path, streams: bool, answered: bool
) -> None:
    profile = Profile.timed("fake", Curve.affine(0.0, STEP_S), prefill_s=PREFILL_S, source="The fake engine's.")
    profile.save(tmp_path / "fake.json")
    async with FakeEngine(step_s=STEP_S, prefill_s=PREFILL_S, slots=8, barrier=True) as engine:
        front = await start_front(
            engine, barrier=True, scheduling=FLEX, dispatch=DispatchConfig(profile=(str(tmp_path / "fake.json"),))
        )
        assert await ask(front, QUICK) == 200, "teaches the scheduler the length of quick answers"
        long = asyncio.ensure_future(ask(front, LONG, stream=streams))
        await until(lambda: engine.running == 1)
        await asyncio.sleep(1.5 * PREFILL_S if answered else 0.0)
        statuses = await quick_ones(front)
        assert await long == 200
        steps = list(front.cluster.journal.steps)

    long_id = 2
    assert stopped(steps) == ([] if streams and answered else [(long_id,)])
    assert statuses == ({504} if streams and answered else {200})
    (info,) = [step.event.engine for step in steps if isinstance(step.event, EngineReady)]
    simulated_steps = simulated(front.cluster.journal.header, steps, info, {long_id} if streams else set())
    assert stopped(simulated_steps) == stopped(steps)
    began = [step.now_s for step in simulated_steps if step.event == AnswerBegan(long_id)]
    assert len(began) == streams, "the simulated body reports first bytes of streams only"
