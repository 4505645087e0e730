"""The words of prompts are read in relays, and forecasts are the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from front import StartFront

from llmserve.calls.in_flight import InFlightCall
from llmserve.engines.timed.server import FakeEngine
from llmserve.forecasts.reading import PromptReaders, ReadPrompt
from predictor.prompt import Prompt
from predictor.text_features import TextFeatures

SECRETS: Mapping[str, bytes] = {"": b"of all others", "m": b"of m"}


@pytest.mark.parametrize(
    "prompt", [Prompt("Count to 20.", "m", sender="ann"), Prompt("word " * 3000, "n", "Be brief.")]
)
def test_features_cross_as_they_are(prompt: Prompt) -> None:
    readers = PromptReaders(SECRETS)
    for _ in range(2):  # a short prompt is kept
        read = readers.read(prompt)
        assert read is not None
        there = msgspec.msgpack.decode(msgspec.msgpack.encode(read), type=ReadPrompt)
        here = TextFeatures(SECRETS.get(prompt.model, SECRETS[""])).read(prompt)
        assert (there.model, there.features.sender) == (prompt.model, here.sender)
        for one, other in zip(there.features[:2], here[:2], strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)


def test_where_no_words_are_learnt_none_are_read() -> None:
    assert PromptReaders({}).read(Prompt("hello")) is None


@pytest.mark.parametrize("relays", [2])
async def test_a_forecast_takes_what_its_relay_has_read(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine)
        answered: list[InFlightCall] = []
        front.cluster.calls.on_answered.append(lambda in_flight, tokens: answered.append(in_flight))
        texts = [f"Tell {number} stories." for number in range(4)]
        for text in texts:
            async with front.post(messages=[{"role": "user", "content": text}]) as response:
                assert response.status == 200
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Guess."}]}
        async with front.post(headers={"x-llmserve-predicted-tokens": "7"}, **asked) as response:
            assert response.status == 200
    reader = TextFeatures(front.cluster.forecasts.secrets[""])
    for in_flight in answered[:4]:
        np.testing.assert_array_equal(in_flight.call.features.indices, reader.read(in_flight.call.prompt).indices)
    assert [in_flight.call.prompt.text for in_flight in answered[:4]] == texts
    assert answered[4].call.features is None, "the client's own prediction counts"
