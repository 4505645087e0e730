"""POST /v1/forecast: what a call would take, by the same stages, keys, limits and forecasts as the call itself."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from front import Front, StartFront, until

from llmserve.engines.timed.server import FakeEngine
from llmserve.errors import BadRequest
from llmserve.forecasts.call_forecast import CallForecast
from llmserve.gateway.draft import Draft
from llmserve.gateway.endpoints import ENDPOINTS
from llmserve.gateway.forecasting import UNTOLD, endpoint_of, of_body
from llmserve.settings.tree import ServerConfig

FORECAST = "/v1/forecast"
ANSWERS = 20


async def forecast(front: Front, path: str = FORECAST, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    async with front.post(path, headers, **fields) as response:
        data = await response.read()
        assert response.status == 200, data
        return msgspec.json.decode(data, type=CallForecast)


async def taught(
    front: Front, answers: int = ANSWERS, headers: dict[str, str] | None = None, model: str = "fake"
) -> None:
    """Let the server answer some requests, and learn from the answers."""
    before = front.cluster.forecasts.learnt
    for number in range(answers):
        async with front.post(headers=headers, model=model, messages=question(f"list {number}")) as response:
            assert response.status == 200, await response.text()
    await until(lambda: front.cluster.forecasts.learnt == before + answers)


def question(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


async def test_a_forecast_is_that_with_which_the_request_itself_would_be_queued(start_front: StartFront) -> None:
    async with FakeEngine() as engine:
        front = await start_front(engine)
        await taught(front)
        told = await forecast(front, messages=question("list 77"))
        arrived = []
        step = front.cluster.driver.step
        front.cluster.driver.step = lambda event: (arrived.append(event), step(event))[1]  # type: ignore[method-assign]
        async with front.post(messages=question("list 77")) as response:
            assert response.status == 200
        request = arrived[0].request
        assert (told.output_tokens, told.quantiles) == (request.predicted_tokens, request.quantiles)
        assert (told.prompt_tokens, told.expected_tokens) == (request.prompt_tokens, request.expected_tokens)
        assert len(told.quantiles) == 15
        assert told.source


async def test_a_forecast_is_no_request(start_front: StartFront) -> None:
    async with FakeEngine() as engine:
        front = await start_front(engine)
        await taught(front, 4)
        sources, answered = dict(front.cluster.forecasts.sources), len(engine.bodies)
        await forecast(front, messages=question("list 5"))
        assert (dict(front.cluster.forecasts.sources), len(engine.bodies)) == (sources, answered)
        assert not front.cluster.scheduler.requests


async def test_the_work_is_that_of_the_models_answers_so_far(start_front: StartFront) -> None:
    async with (
        FakeEngine(output_tokens=60, step_s=0.001) as writer,
        FakeEngine(model="terse", output_tokens=3, step_s=0.001) as terse,
    ):
        front = await start_front(writer, terse)
        before = await forecast(front, messages=question("list 5"))
        assert (before.output_tokens, before.work, before.in_force) == (None, None, True)
        await taught(front)
        await taught(front, model="terse")
        long, short = [await forecast(front, model=model, messages=question("list 5")) for model in ("fake", "terse")]
        both = await forecast(front, messages=question("list 5"), n=2)
        assert long.output_tokens > 2 * short.output_tokens
        assert long.work.answer_s > 2 * short.work.answer_s
        assert both.work.answer_s == pytest.approx(2 * long.work.answer_s)
        assert short.quantile(0.1) <= short.output_tokens <= short.quantile(0.9)


async def test_the_senders_own_history_is_told_to_the_sender_alone(start_front: StartFront, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann: sk-ann\nbob: sk-bob\n")
    keys.chmod(0o600)
    ann, bob = ({"authorization": f"Bearer sk-{name}"} for name in ("ann", "bob"))
    async with FakeEngine() as engine:
        front = await start_front(engine, server=ServerConfig(port=0, api_key_file=str(keys)))
        await taught(front, headers=ann)
        of_ann = await forecast(front, headers=ann, messages=question("list 1"))
        of_bob = await forecast(front, headers=bob, messages=question("list 1"))
        assert of_ann.sender.answers == ANSWERS
        assert of_ann.sender.output_tokens == pytest.approx(16, rel=0.1)
        assert of_bob.sender is None
        async with front.post(FORECAST, messages=question("list 1")) as response:
            assert response.status == 401


async def test_a_question_counts_as_a_request_of_its_key(start_front: StartFront, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[keys.ann]\nkey = "sk-ann"\nrequests_per_minute = 2\n')
    keys.chmod(0o600)
    ann = {"authorization": "Bearer sk-ann"}
    async with FakeEngine() as engine:
        front = await start_front(engine, server=ServerConfig(port=0, api_key_file=str(keys)))
        statuses = []
        for _ in range(3):
            async with front.post(FORECAST, ann, messages=question("hi")) as response:
                statuses.append(response.status)
                left = response.headers.get("x-ratelimit-remaining-requests")
        assert statuses == [200, 200, 429]
        assert left == "0"


async def test_what_the_call_itself_would_be_refused_for_its_forecast_is_refused_for(start_front: StartFront) -> None:
    async with FakeEngine() as engine:
        front = await start_front(engine)
        for fields in ({"model": "other"}, {"messages": 5}, {"messages": question("a"), "n": 1000}):
            answers = []
            for path in ("/v1/chat/completions", FORECAST):
                async with front.post(path, **fields) as response:
                    answers.append((response.status, (await response.json())["error"]["code"]))
            assert answers[0] == answers[1]
            assert answers[0][0] in (400, 404)
        async with front.session.get(front.url + FORECAST) as response:
            assert response.status == 405
            assert response.headers["allow"] == "POST, OPTIONS"


async def test_bodies_of_all_endpoints_are_forecast(start_front: StartFront) -> None:
    async with FakeEngine() as engine:
        front = await start_front(engine)
        await taught(front)
        asked = {
            "/v1/completions": {"prompt": "list 9"},
            "/v1/responses": {"input": "list 9"},
            "/v1/chat/completions": {"messages": question("list 9")},
        }
        for path, fields in asked.items():
            async with front.session.post(front.url + FORECAST, json={"model": "fake", **fields}) as response:
                told = msgspec.json.decode(await response.read(), type=CallForecast)
                assert (told.endpoint, told.answers) == (path, 1)
                assert told.output_tokens is not None
        headers = {"anthropic-version": "2023-06-01"}
        told = await forecast(front, headers=headers, messages=question("list 9"), max_tokens=5)
        assert (told.endpoint, told.quantiles[-1]) == ("/v1/messages", 5.0)
        told = await forecast(front, f"{FORECAST}?endpoint=/v1/embeddings", input="a b c")
        assert (told.endpoint, told.answers, told.output_tokens, told.quantiles) == ("/v1/embeddings", 0, None, ())


async def test_the_kind_is_that_of_the_system_prompt_and_the_tools(start_front: StartFront) -> None:
    async with FakeEngine() as engine:
        front = await start_front(engine)
        system = [{"role": "system", "content": "You are a tester."}]
        before = [*question("first"), {"role": "assistant", "content": "yes"}]
        told = [await forecast(front, messages=[*system, *before, *question(text)]) for text in ("one", "two")]
        assert told[0].kind == told[1].kind != ""
        assert (await forecast(front, messages=question("one"))).kind == ""


def test_an_unknown_endpoint_is_refused_with_the_one_that_was_probably_meant() -> None:
    assert endpoint_of(b"endpoint=%2Fv1%2Fscore", {}) is ENDPOINTS["/v1/score"]
    assert endpoint_of(b"api-version=1", {}) is UNTOLD
    with pytest.raises(BadRequest, match="did you mean /v1/completions"):
        endpoint_of(b"endpoint=/v1/completion", {})


def test_a_body_that_is_not_json_is_refused_by_whoever_reads_it() -> None:
    for body in (b"", b"[", b"[]", b'{"prompt": '):
        draft = Draft(UNTOLD, body=body)
        of_body(draft)
        assert draft.endpoint is ENDPOINTS["/v1/chat/completions"]


def test_a_quantile_is_between_its_neighbours() -> None:
    told = CallForecast(endpoint="", quantiles=(10.0, 20.0, 40.0), output_tokens=20.0)
    assert [told.quantile(level) for level in (0.0, 1 / 6, 1 / 3, 0.5, 2 / 3, 1.0)] == [10, 10, 15, 20, 30, 40]
    assert CallForecast(endpoint="", output_tokens=7.0).quantile(0.9) == 7.0
    assert CallForecast(endpoint="").quantile(0.9) is None
    assert CallForecast(endpoint="", quantiles=(5.0,)).quantile(0.9) == 5.0


async def test_a_trained_predictor_is_asked_as_for_the_request(start_front: StartFront) -> None:
    async with FakeEngine() as engine:
        front = await start_front(engine)
        forecasts, now = front.cluster.forecasts, front.cluster.forecasts.made_now

        async def made(call: Any, model: Any) -> Any:
            await asyncio.sleep(0)
            return now(call, model)

        forecasts.made_now, forecasts.made = (lambda call, model: None), made  # type: ignore[method-assign, assignment]
        assert (await forecast(front, messages=question("hi"))).source == "none"
