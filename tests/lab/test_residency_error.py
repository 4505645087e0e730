"""Expected hits beside told ones, from the journal of a server. vLLM is not needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from front import StartFront
from questions.residency.conversations import Shape, conversations
from questions.residency.error import errors
from questions.residency.run import shared_pass

from llmserve.engines.timed.server import FakeEngine
from llmserve.settings.tree import ServerConfig

SMALL = Shape(8, prefixes=2, prefix_chars=4_000, turns=4, think_s=0.0, begin_per_s=1e3)


async def test_the_hits_of_an_engine_with_room_are_expected(start_front: StartFront, tmp_path: Path) -> None:
    async with FakeEngine(model="llmserve-demo", step_s=0.001, cache_words=100_000) as engine:
        front = await start_front(engine, server=ServerConfig(port=0, journal=str(tmp_path / "j")))
        await shared_pass([front.url], conversations(SMALL, np.random.default_rng(1), ""))
        await front.cluster.close()
    found = errors(tmp_path / "j")
    assert found["answers"] == 32
    assert found["told"] > 0.6
    assert found["expected"] == pytest.approx(found["told"], abs=0.15)
    assert found["error"] < 0.2
