"""A live server that tunes its order by its own past."""

from __future__ import annotations

import asyncio
import logging

import pytest
from front import StartFront, until

from llmserve.engines.timed.server import FakeEngine
from llmserve.live.journal import replay
from llmserve.scheduling.messages import Tuned
from llmserve.settings.tree import TuningConfig
from llmserve.simulation.twin import live, tuner


@pytest.mark.slow
async def test_a_server_changes_its_order_by_its_own_past(
    start_front: StartFront, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A burst of long and short answers, first come first served: the shortest first would have halved the mean."""
    monkeypatch.setattr(live, "EVERY_S", 0.5)
    monkeypatch.setattr(tuner, "ENDED_LEAST", 60)
    caplog.set_level(logging.INFO, "llmserve")
    async with FakeEngine() as fake:
        front = await start_front(fake, slots=2, scheduling={"order": "fffs"}, tuning=TuningConfig(tune="mean"))

        async def ask(number: int) -> None:
            tokens = 2 if number % 4 else 40
            headers = {"x-llmserve-predicted-tokens": str(tokens)}
            async with front.post(headers=headers, max_tokens=tokens) as response:
                assert response.status == 200
                await response.read()

        await asyncio.gather(*[ask(number) for number in range(200)])
        await until(lambda: any(isinstance(step.event, Tuned) for step in front.cluster.journal.steps), within_s=90.0)
        async with front.session.get(front.url + "/metrics") as response:
            metrics = await response.text()
    journal = front.cluster.journal
    assert replay(journal.header, journal.steps) == list(journal.steps)
    assert "llmserve_order_changes_total 1.0" in metrics
    assert 'llmserve_order{settings="fffs"' not in metrics
    assert any(
        record.message.startswith(("order fffs -> shortest patience", "order fffs -> boost"))
        and record.message.endswith(" requests")
        for record in caplog.records
    )
