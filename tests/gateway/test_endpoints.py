"""Every endpoint that engines serve, through the front-end: by official clients, and byte for byte."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from front import Front, StartFront, through_relays_too, until

from llmserve.engines.timed.server import FakeEngine, FakePace, Fault
from llmserve.errors import ConfigError
from llmserve.live import routes
from llmserve.scheduling.messages import RequestArrived, RequestEnded
from llmserve.server.serving import serving
from llmserve.settings.tree import Config, EngineConfig, ServerConfig

SAID: Any = [{"role": "user", "content": "how are you"}]
ANSWERS = {
    "/v1/responses": {"model": "fake", "input": "how are you", "max_output_tokens": 4},
    "/v1/messages": {"model": "fake", "messages": SAID, "max_tokens": 4},
}
PROMPTS = {
    "/v1/messages/count_tokens": {"model": "fake", "messages": SAID},
    "/v1/embeddings": {"model": "fake", "input": ["how are", "you"]},
    "/v1/moderations": {"input": "how are you"},
    "/rerank": {"model": "fake", "query": "who", "documents": ["me", "you"]},
    "/v1/rerank": {"model": "fake", "query": "who", "documents": ["me", "you"]},
    "/score": {"model": "fake", "text_1": "who", "text_2": ["me", "you"]},
    "/v1/score": {"model": "fake", "text_1": "who", "text_2": ["me", "you"]},
    "/tokenize": {"model": "fake", "prompt": "how are you"},
    "/detokenize": {"model": "fake", "tokens": [1, 2, 3]},
}


def client(front: Front, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key=key, max_retries=0)


def arrived(front: Front) -> list[Any]:
    return [step.event.request for step in front.cluster.journal.steps if isinstance(step.event, RequestArrived)]


# ---- official clients ----


@through_relays_too
async def test_the_openai_client_creates_and_streams_responses(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine)
        whole = await client(front).responses.create(model="fake", input="how are you", max_output_tokens=5)
        stream = await client(front).responses.create(model="fake", input="how are you", stream=True)
        events = [event async for event in stream]
    assert whole.output_text == "tok " * 5
    assert whole.usage is not None
    assert whole.usage.output_tokens == 5
    assert sum(event.type == "response.output_text.delta" for event in events) == 16
    assert events[-1].type == "response.completed"


async def test_the_openai_client_embeds_moderates_and_transcribes(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine)
        embedded = await client(front).embeddings.create(model="fake", input=["a", "b"])
        moderated = await client(front).moderations.create(input="a")
        heard = await client(front).audio.transcriptions.create(model="fake", file=("a.wav", b"RIFF" + bytes(64_000)))
        translated = await client(front).audio.translations.create(model="fake", file=("a.wav", b"RIFF\r\n--x"))
    assert [item.embedding for item in embedded.data] == [[0.5, -0.5]] * 2
    assert not moderated.results[0].flagged
    assert (heard.text, translated.text) == ("a word", "a word")
    assert [request.prompt_tokens for request in arrived(front)][2:] == [101, 1]


# ---- byte for byte ----


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ANSWERS)
async def test_answers_pass_unchanged(start_front: StartFront, path: str, stream: bool) -> None:
    data = json.dumps({**ANSWERS[path], "stream": stream, "of the future": {"x": 1.50}}).encode()
    async with FakeEngine(step_s=0.001) as engine:
        front = await start_front(engine)
        through, direct = await both(front, engine, path, data)
    assert engine.bodies[0] == data
    assert through == direct
    assert "x-llmserve-engine" in through.headers
    assert "x-llmserve-predicted-tokens" not in direct.headers


@pytest.mark.parametrize("path", PROMPTS)
async def test_what_has_no_answer_passes_unchanged(start_front: StartFront, path: str) -> None:
    data = json.dumps(PROMPTS[path]).encode()
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine)
        through, direct = await both(front, engine, path, data)
    assert engine.bodies[0] == data
    assert through == direct
    assert through.headers["x-llmserve-engine"] == arrived_at(engine)
    assert "x-llmserve-predicted-tokens" not in through.headers


class Got:
    """An answer; two are equal that have the same status, type and bytes."""

    def __init__(self, response: aiohttp.ClientResponse, body: bytes) -> None:
        self.headers = response.headers
        self.told = (response.status, response.headers["content-type"], body)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Got) and self.told == other.told

    __hash__ = None  # type: ignore[assignment]


async def both(front: Front, engine: FakeEngine, path: str, data: bytes) -> tuple[Got, Got]:
    """The answer through the front-end, and directly from the engine."""
    got = []
    for url in (front.url, engine.url):
        async with front.session.post(url + path, data=data) as response:
            got.append(Got(response, await response.read()))
    return got[0], got[1]


def arrived_at(engine: FakeEngine) -> str:
    return engine.url.removeprefix("http://")


@through_relays_too
async def test_a_form_with_a_file_reaches_the_engine_as_it_came(start_front: StartFront) -> None:
    data = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n\x00\xff\r\n--y\r\n--x\r\n'
    data += b'Content-Disposition: form-data; name="model"\r\n\r\nfake\r\n--x--\r\n'
    headers = {"content-type": 'multipart/form-data; boundary="x"'}
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine)
        async with front.session.post(f"{front.url}/v1/audio/transcriptions", data=data, headers=headers) as response:
            assert await response.json() == {"text": "a word", "usage": {"type": "duration", "seconds": 1}}
        async with front.session.post(
            f"{front.url}/v1/audio/transcriptions", data=data[:-8], headers=headers
        ) as response:
            assert response.status == 400
        async with front.session.post(f"{front.url}/v1/audio/transcriptions", json={"model": "fake"}) as response:
            assert (await response.json())["error"]["message"] == "the body must be multipart/form-data"
    assert list(engine.bodies) == [data]


# ---- how they are scheduled ----


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ANSWERS)
async def test_lengths_of_answers_are_learnt_of_every_endpoint(
    start_front: StartFront, path: str, stream: bool
) -> None:
    fields = {name: value for name, value in ANSWERS[path].items() if not name.startswith("max")}
    async with FakeEngine(step_s=0, output_tokens=7) as engine:
        front = await start_front(engine)
        for _ in range(3):
            async with front.session.post(front.url + path, json={**fields, "stream": stream}) as response:
                await response.read()
        await until(lambda: front.cluster.forecasts.learnt == 3)
        async with front.session.post(front.url + path, json=fields) as response:
            await response.read()
    requests = arrived(front)
    assert [request.model for request in requests] == ["fake"] * 4
    assert requests[0].prompt_tokens == 2.8  # 11 characters
    assert 4 <= requests[-1].predicted_tokens <= 10
    ended = [step.event for step in front.cluster.journal.steps if isinstance(step.event, RequestEnded)]
    assert {event.output_tokens for event in ended} == {7}


async def test_prompts_take_slots_and_teach_nothing(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.001, prefill_s=0.05, slots=1) as engine:
        front = await start_front(engine, slots=1)
        before = front.cluster.scheduler.queues("fake").service.answers
        bodies = [(path, body) for path, body in PROMPTS.items() if "model" in body]
        await asyncio.gather(*[read(front, path, body) for path, body in bodies * 2])
        assert engine.running_max == 1
        assert front.cluster.forecasts.learnt == 0
        assert front.cluster.scheduler.queues("fake").service.answers == before
        assert not front.cluster.forecasts.sources
        requests = arrived(front)
        assert {request.model for request in requests} == {f"fake {path}" for path, _ in bodies}
        assert {request.choices for request in requests} == {0}
        assert all(request.prompt_tokens > 0 for request in requests)
        async with front.session.get(f"{front.url}/metrics") as response:
            metrics = await response.text()
    assert 'llmserve_requests_total{outcome="completed"} 16.0' in metrics
    assert "llmserve_predicted_tokens_count 0.0" in metrics
    assert "llmserve_actual_tokens_count 0.0" in metrics


async def read(front: Front, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> int:
    async with front.session.post(front.url + path, json=body, headers=headers) as response:
        await response.read()
        return response.status


async def test_limits_of_a_key_hold_on_every_endpoint(start_front: StartFront, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[keys.alice]\nkey = "sk-alice"\nrequests_per_minute = 2\n')
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, server=ServerConfig(port=0, api_key_file=str(keys)))
        headers = {"authorization": "Bearer sk-alice"}
        bodies = {**ANSWERS, **PROMPTS}
        paths = ["/v1/responses", "/v1/embeddings", "/v1/messages", "/tokenize"]
        statuses = [await read(front, path, bodies[path], headers) for path in paths]
    assert statuses == [200, 200, 429, 429]


async def test_use_is_counted_by_the_engines_counts(start_front: StartFront, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: sk-alice\n")
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, server=ServerConfig(port=0, api_key_file=str(keys)))
        headers = {"authorization": "Bearer sk-alice"}
        for path in ("/v1/responses", "/v1/embeddings"):
            await read(front, path, {**ANSWERS, **PROMPTS}[path], headers)
        async with front.session.get(f"{front.url}/metrics", headers=headers) as response:
            metrics = await response.text()
    assert 'llmserve_key_prompt_tokens_total{key="alice",model="fake"} 6.0' in metrics
    assert 'llmserve_key_output_tokens_total{key="alice",model="fake"} 4.0' in metrics


@pytest.mark.parametrize("path", [*ANSWERS, "/v1/embeddings"])
async def test_a_request_runs_on_another_engine_when_the_first_fails(start_front: StartFront, path: str) -> None:
    async with FakeEngine(step_s=0.001) as good, FakeEngine(step_s=0.001) as bad:
        front = await start_front(good, bad)
        bad.fault = Fault("500")
        statuses = await asyncio.gather(*[read(front, path, {**ANSWERS, **PROMPTS}[path]) for _ in range(8)])
    assert statuses == [200] * 8
    assert bad.bodies


@pytest.mark.parametrize("path", ANSWERS)
async def test_a_stream_that_breaks_ends_with_an_error_in_the_form_of_its_endpoint(
    start_front: StartFront, path: str
) -> None:
    async with FakeEngine(step_s=0.001) as engine:
        front = await start_front(engine)
        engine.fault = Fault("close_mid_stream", after_tokens=2)
        async with front.session.post(front.url + path, json={**ANSWERS[path], "stream": True}) as response:
            text = await response.text()
    event, data = text.strip().rpartition("\n\n")[2].split("\n")
    told = json.loads(data.removeprefix("data: "))
    assert (event, told["type"]) == ("event: error", "error")
    assert "broke off" in (told["message"] if path == "/v1/responses" else told["error"]["message"])


@pytest.mark.parametrize("path", ANSWERS)
async def test_a_client_that_leaves_frees_its_slot(start_front: StartFront, path: str) -> None:
    async with FakeEngine(step_s=0.01, slots=1) as engine:
        front = await start_front(engine, slots=1)
        body = {**ANSWERS[path], "stream": True, "max_tokens": 10_000, "max_output_tokens": 10_000}
        response = await front.session.post(front.url + path, json=body)
        await response.content.readany()
        response.close()
        await until(lambda: engine.running == 0)
        await until(lambda: not front.cluster.scheduler.requests)


# ---- which engine ----


async def test_an_endpoint_that_no_engine_has_is_404_and_names_those_there_are(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0, endpoints=("/v1/chat/completions", "/tokenize")) as engine:
        front = await start_front(engine)
        async with front.post("/v1/embeddings", input="a") as response:
            status, told = response.status, (await response.json())["error"]
        async with front.session.get(f"{front.url}/openapi.json") as response:
            paths = (await response.json())["paths"]
            listed = [path for path, methods in paths.items() if "engines" in methods.get("post", {}).get("tags", ())]
        assert await read(front, "/v1/messages", ANSWERS["/v1/messages"]) == 404
        assert await read(front, "/tokenize", PROMPTS["/tokenize"]) == 200
    assert (status, told["code"]) == (404, "endpoint_not_found")
    assert told["message"].endswith("there are /v1/chat/completions, /tokenize")
    assert listed == ["/v1/chat/completions", "/tokenize"]
    assert len(engine.bodies) == 1


async def test_calls_go_to_the_engines_that_have_the_endpoint(start_front: StartFront) -> None:
    chat = "/v1/chat/completions"
    async with (
        FakeEngine(step_s=0.001, endpoints=(chat,)) as old,
        FakeEngine(step_s=0.001, endpoints=(chat, "/v1/messages", "/v1/embeddings")) as new,
    ):
        front = await start_front(old, new)
        paths = [*["/v1/messages"] * 5, *["/v1/embeddings"] * 5]
        statuses = await asyncio.gather(*[read(front, path, {**ANSWERS, **PROMPTS}[path]) for path in paths])
        assert await read(front, chat, {"model": "fake", "messages": SAID}) == 200
    assert set(statuses) == {200}
    assert len(new.bodies) + len(old.bodies) == 11
    assert all(b"how are you" in body for body in old.bodies)
    assert len(old.bodies) <= 1


async def test_a_server_in_front_of_this_one_learns_its_endpoints(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0, endpoints=("/v1/chat/completions", "/v1/responses")) as engine:
        inner = await start_front(engine)
        gateway = await start_front(inner.url)
        async with gateway.post("/v1/embeddings", input="a") as response:
            assert response.status == 404
        first = await client(gateway).responses.create(model="fake", input="a")
        await client(gateway).responses.create(model="fake", input="b", previous_response_id=first.id)
        assert (await client(gateway).responses.retrieve(first.id)).id == first.id
    assert len(engine.bodies) == 2


async def test_an_engine_that_lists_nothing_is_tried_once(start_front: StartFront) -> None:
    chat = "/v1/chat/completions"
    async with FakeEngine(step_s=0, endpoints=(chat,)) as engine:
        engine._routes.pop(("GET", "/openapi.json"))
        front = await start_front(engine)
        for _ in range(2):
            async with front.post("/v1/embeddings", input="a") as response:
                assert response.status == 404
                told = (await response.json())["error"]
        assert told["code"] == "endpoint_not_found"
        assert told["message"] == "no engine of the model 'fake' has /v1/embeddings", "who knows what else it has"
    assert len(arrived(front)) == 1


@pytest.mark.parametrize("endpoints", [("/v1/embeddings",), ("/v1/chat/completions",)])
async def test_a_request_waits_for_the_first_engine(start_front: StartFront, endpoints: tuple[str, ...]) -> None:
    async with FakeEngine(step_s=0, endpoints=endpoints) as engine:
        port = int(engine.url.rpartition(":")[2])
    front = await start_front(engine.url, wait=False)
    asking = asyncio.create_task(read(front, "/v1/embeddings", PROMPTS["/v1/embeddings"]))
    await until(lambda: len(arrived(front)) == 1)
    async with FakeEngine(step_s=0, endpoints=endpoints, port=port):
        assert await asking == (200 if "/v1/embeddings" in endpoints else 404)


async def test_invented_models_open_few_lanes(start_front: StartFront, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "ROUTE_QUEUES_UNLISTED_MAX", 8)
    async with FakeEngine(step_s=0) as engine:
        port = int(engine.url.rpartition(":")[2])
    front = await start_front(engine.url, wait=False)
    asked = [read(front, "/v1/embeddings", {"model": f"m{number}", "input": "a"}) for number in range(12)]
    asking = asyncio.gather(*asked)
    await until(lambda: front.cluster.fleet.route_queues == 8)
    async with FakeEngine(step_s=0, port=port):
        assert set(await asking) == {404, 503}
    assert front.cluster.fleet.route_queues == 0


@through_relays_too
async def test_a_response_goes_on_where_the_first_one_was(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.001) as one, FakeEngine(step_s=0.001) as other:
        front = await start_front(one, other)
        for stream in (False, True, False, True):
            async with front.post("/v1/responses", input="hello", stream=stream) as first:
                engine = first.headers["x-llmserve-engine"]
                await first.read()
            response_id = f"resp-{engine.rpartition(':')[2]}"
            bodies = [{"model": "fake", "input": "and?", "previous_response_id": response_id}] * 4
            assert set(await asyncio.gather(*[read(front, "/v1/responses", body) for body in bodies])) == {200}
            kept = await client(front).responses.retrieve(response_id)
            assert kept.model_dump()["asked"] == f"GET /v1/responses/{response_id}"
            cancelled = await client(front).responses.cancel(response_id)
            assert cancelled.model_dump()["asked"] == f"POST /v1/responses/{response_id}/cancel"
        await client(front).responses.delete(response_id)
        with pytest.raises(openai.NotFoundError):
            await client(front).responses.retrieve(response_id)
        with pytest.raises(openai.NotFoundError, match="no response unknown"):
            await client(front).responses.create(model="fake", input="a", previous_response_id="unknown")


async def test_a_response_belongs_to_its_key(start_front: StartFront, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: sk-alice\nbob: sk-bob\n")
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, server=ServerConfig(port=0, api_key_file=str(keys)))
        response = await client(front, "sk-alice").responses.create(model="fake", input="a")
        with pytest.raises(openai.NotFoundError):
            await client(front, "sk-bob").responses.retrieve(response.id)
        with pytest.raises(openai.NotFoundError):
            await client(front, "sk-bob").responses.create(model="fake", input="a", previous_response_id=response.id)
        with pytest.raises(openai.AuthenticationError):
            await client(front, "sk-eve").responses.retrieve(response.id)
        assert (await client(front, "sk-alice").responses.retrieve(response.id)).id == response.id


@pytest.mark.parametrize("remembers", [True, False])
async def test_a_response_belongs_to_its_key_after_a_restart(
    start_front: StartFront, tmp_path: Path, remembers: bool
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: sk-alice\nbob: sk-bob\n")
    state = {"state": str(tmp_path / "state")} if remembers else {}
    server = ServerConfig(port=0, api_key_file=str(keys), **state)
    async with FakeEngine(step_s=0) as engine:
        before = Config(server=server, engines=EngineConfig(engine=(engine.url,), slots=8))
        async with serving(before) as (cluster, url):
            await until(lambda: all(cluster.engines_ready.values()))
            alice = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-alice", max_retries=0)
            response = await alice.responses.create(model="fake", input="a")
            await alice.close()
        front = await start_front(engine, server=server)

        async def may(key: str) -> list[bool]:
            asked = client(front, key)
            more: dict[str, Any] = {"model": "fake", "input": "a", "previous_response_id": response.id}
            of_id = response.id
            doing = (asked.responses.retrieve(of_id), asked.responses.create(**more), asked.responses.delete(of_id))
            answers = [await asyncio.gather(one, return_exceptions=True) for one in doing]
            return [not isinstance(answer, openai.NotFoundError) for (answer,) in answers]

        assert await may("sk-bob") == [False, False, False]
        assert await may("sk-alice") == [remembers, remembers, remembers]


async def test_a_gateway_passes_on_what_its_groups_keep_and_only_to_whose_it_is(
    start_front: StartFront, tmp_path: Path
) -> None:
    keys, gateway_key = tmp_path / "keys", tmp_path / "gateway"
    keys.write_text("alice: sk-alice\nbob: sk-bob\n")
    gateway_key.write_text("sk-gateway\n")
    async with FakeEngine(step_s=0) as engine:
        group = await start_front(engine, server=ServerConfig(port=0, gateway_key_file=str(gateway_key)))
        engines = EngineConfig(engine=(group.url,), engines_are_groups=True, engine_api_key="sk-gateway")
        gateways = [
            await start_front(group.url, engines=engines, server=ServerConfig(port=0, api_key_file=str(keys)))
            for _ in range(2)
        ]
        first = await client(gateways[0], "sk-alice").responses.create(model="fake", input="a")
        assert (await client(gateways[0], "sk-alice").responses.retrieve(first.id)).id == first.id
        more: dict[str, Any] = {"model": "fake", "input": "a", "previous_response_id": first.id}
        for gateway in gateways:  # the second has not heard of the response, but the group has
            await client(gateway, "sk-alice").responses.create(**more)
            with pytest.raises(openai.NotFoundError):
                await client(gateway, "sk-bob").responses.create(**more)
            with pytest.raises(openai.NotFoundError):
                await client(gateway, "sk-bob").responses.delete(first.id)


async def test_an_adapter_is_served_by_the_engines_that_have_loaded_it(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0.001) as plain, FakeEngine(step_s=0.001, others={"sql": FakePace(0.001)}) as loaded:
        front = await start_front(plain, loaded)
        for path, body in {**ANSWERS, **PROMPTS}.items():
            assert await read(front, path, {**body, "model": "sql"}) == 200
    assert not plain.bodies
    assert len(loaded.bodies) == len(ANSWERS) + len(PROMPTS)


# ---- names of models ----


async def test_a_model_may_have_other_names_and_fallbacks(start_front: StartFront) -> None:
    names = ("gpt-x=large", "gpt-x=small", "small=small")
    async with FakeEngine(step_s=0.001, model="small") as small:
        async with FakeEngine(step_s=0.001, model="large") as large:
            engines = EngineConfig(engine=(small.url, large.url), slots=8, look_ahead=0, alias=names)
            front = await start_front(small, large, engines=engines)
            data = b'{ "model" : "gpt-x",\n "messages":[{"role":"user","content":"\\u00e9"}], "top_k" : 3 }'
            assert await post(front, "/v1/chat/completions", data) == 200
            assert large.bodies[-1] == data.replace(b'"gpt-x"', b'"large"')
            assert await read(front, "/v1/embeddings", {"model": "gpt-x", "input": "a"}) == 200
            assert json.loads(large.bodies[-1]) == {"model": "large", "input": "a"}
            ids = [model.id async for model in client(front).models.list()]
            assert ids == ["large", "small", "gpt-x"]
            assert (await client(front).models.retrieve("gpt-x")).id == "gpt-x"
            await client(front).audio.transcriptions.create(model="gpt-x", file=("a.wav", b"RIFF"))
            assert b'name="model"\r\n\r\nlarge\r\n' in large.bodies[-1]
        await until(lambda: not all(front.cluster.engines_ready.values()))
        assert await post(front, "/v1/chat/completions", data) == 200
        assert small.bodies[-1] == data.replace(b'"gpt-x"', b'"small"')


async def post(front: Front, path: str, data: bytes) -> int:
    async with front.session.post(front.url + path, data=data) as response:
        await response.read()
        return response.status


@pytest.mark.parametrize("alias", ["gpt-x", "=a", "a=", ("a=b", "a=b")])
def test_a_wrong_alias_is_refused(alias: Any) -> None:
    with pytest.raises(ConfigError, match="alias"):
        EngineConfig(alias=(alias,) if isinstance(alias, str) else alias).check()


# ---- pages of other origins ----


async def test_a_page_of_an_allowed_origin_may_call(start_front: StartFront, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: sk-alice\n")
    server = ServerConfig(port=0, api_key_file=str(keys), cors_origin=("https://chat.example.com",))
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, server=server)
        url = f"{front.url}/v1/chat/completions"
        async with front.session.options(url, headers={"origin": "https://chat.example.com", **asked}) as preflight:
            assert preflight.status == 204
            assert preflight.headers["access-control-allow-origin"] == "https://chat.example.com"
            assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
            assert "POST" in preflight.headers["access-control-allow-methods"]
        async with front.session.options(url, headers={"origin": "https://evil.example.com", **asked}) as preflight:
            assert "access-control-allow-origin" not in preflight.headers
        for key, status in (("sk-alice", 200), ("wrong", 401)):
            headers = {"origin": "https://chat.example.com", "authorization": f"Bearer {key}"}
            async with front.post(headers=headers) as response:
                assert response.status == status
                assert response.headers["access-control-allow-origin"] == "https://chat.example.com"
                assert "x-llmserve-engine" in response.headers["access-control-expose-headers"]
        async with front.session.get(f"{front.url}/health", headers={"origin": "https://evil.example.com"}) as response:
            assert "access-control-allow-origin" not in response.headers


async def test_without_the_setting_no_page_may_call(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine)
        headers = {"origin": "https://chat.example.com", "access-control-request-method": "POST"}
        async with front.session.options(f"{front.url}/v1/chat/completions", headers=headers) as response:
            assert response.status == 204
            assert "access-control-allow-origin" not in response.headers
        async with front.post(headers=headers) as response:
            assert response.status == 403
            assert "access-control-allow-origin" not in response.headers
