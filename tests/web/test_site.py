"""The server's own API: which key a path needs, when it is asked for, and what the document of the API says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from front import Front, StartFront
from starlette.requests import Request
from starlette.responses import Response

from llmserve.engines.timed.server import FakeEngine
from llmserve.errors import NotFound, Unauthorized
from llmserve.gateway.api_document import engine_paths, json_body
from llmserve.gateway.endpoints import ENDPOINTS
from llmserve.gateway.own_routes import OwnRoute
from llmserve.jobs.objects import NewBatch
from llmserve.settings.tree import ServerConfig
from llmserve.tenants.authentication import Keys
from llmserve.tenants.guards import admin_key, any_key, client_key
from llmserve.web.documents import document

ANN, BOSS = {"authorization": "Bearer sk-ann"}, {"authorization": "Bearer sk-boss"}
CLIENTS, ADMINS, NOBODY = Keys({"ann": "sk-ann"}), Keys({"boss": "sk-boss"}), Keys({})


def test_a_guard_names_the_key_or_refuses_the_request() -> None:
    assert client_key(CLIENTS).check(ANN) == "ann"
    assert client_key(NOBODY).check({}) == ""
    for headers in ({}, BOSS, {"x-api-key": "sk-ann"}):
        with pytest.raises(Unauthorized):
            client_key(CLIENTS).check(headers)
    assert client_key(CLIENTS, bare=True).check({"x-api-key": "sk-ann"}) == "ann"


def test_without_an_admin_key_there_is_no_path_for_operators() -> None:
    assert admin_key(ADMINS).check(BOSS) == "boss"
    with pytest.raises(NotFound, match="/events is disabled: start the server with --admin-key-file"):
        admin_key(None, "/events").check(BOSS)


def test_either_key_opens_what_both_may_see() -> None:
    both = any_key((CLIENTS, ADMINS))
    assert (both.check(ANN), both.check(BOSS), any_key(()).check({})) == ("ann", "boss", "")
    with pytest.raises(Unauthorized):
        both.check({"authorization": "Bearer sk-x"})


def test_the_document_says_which_key_a_path_needs_and_what_its_body_is() -> None:
    async def new_one(_: Request) -> Response:
        """Makes one."""
        raise NotImplementedError

    described = document(
        [OwnRoute("POST", "/x/{name:path}", new_one, guard=client_key(CLIENTS), tag="x", extra=json_body(NewBatch))]
    )
    assert described["components"]["securitySchemes"] == {"client key": {"type": "http", "scheme": "bearer"}}
    operation = described["paths"]["/x/{name}"]["post"]
    assert (operation["summary"], operation["description"]) == ("New one", "Makes one.")
    assert [parameter["name"] for parameter in operation["parameters"]] == ["name"]
    assert operation["security"] == [{"client key": []}]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert set(schema["required"]) == {"input_file_id", "endpoint", "completion_window"}
    assert "$ref" not in json.dumps(schema)


def test_every_path_of_engines_can_be_described() -> None:
    described = engine_paths(ENDPOINTS)
    assert list(described) == list(ENDPOINTS)
    assert "multipart/form-data" in described["/v1/audio/transcriptions"]["post"]["requestBody"]["content"]


# ---- on the real server ----


def guarded(tmp_path: Path) -> ServerConfig:
    for name in ("ann", "boss"):
        (tmp_path / name).write_text(f"{name}: sk-{name}\n")
        (tmp_path / name).chmod(0o600)
    return ServerConfig(
        port=0,
        api_key_file=str(tmp_path / "ann"),
        admin_key_file=str(tmp_path / "boss"),
        state=str(tmp_path / "state"),
    )


async def asked(front: Front, method: str, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    async with front.session.request(method, front.url + path, headers=headers) as response:
        return response.status, await response.text()


async def test_the_document_has_the_servers_own_paths_and_those_that_engines_have(
    start_front: StartFront, tmp_path: Path
) -> None:
    async with FakeEngine(step_s=0, endpoints=("/v1/chat/completions", "/v1/models")) as engine:
        front = await start_front(engine, server=guarded(tmp_path))
        assert (await asked(front, "GET", "/openapi.json"))[0] == 401
        status, text = await asked(front, "GET", "/openapi.json", ANN)
    paths = json.loads(text)["paths"]
    assert status == 200
    own = (
        "/v1/models",
        "/v1/files",
        "/v1/batches/{batch_id}",
        "/admin/engines",
        "/metrics",
        "/v1/responses/{response_id}",
    )
    assert set(own) <= set(paths)
    assert "/v1/chat/completions" in paths
    assert "/v1/embeddings" not in paths, "no engine has it"
    assert paths["/admin/reload"]["post"]["security"] == [{"admin key": []}]
    assert "head" not in paths["/health"]


async def test_people_read_the_api_without_a_key_and_without_another_host(
    start_front: StartFront, tmp_path: Path
) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, server=guarded(tmp_path))
        status, text = await asked(front, "GET", "/docs")
    assert status == 200
    for shown in (
        "/v1/chat/completions",
        "/v1/batches/{batch_id}/cancel",
        "/admin/engines/{name}/{order}",
        "Delete a file",
    ):
        assert shown in text
    assert "http://" not in text
    assert "https://" not in text


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        *[("HEAD", "/health", {}, 200), ("HEAD", "/v1/models", ANN, 200), ("HEAD", "/v1/chat/completions", {}, 405)],
        *[("PUT", "/v1/models", {}, 405), ("GET", "/nope", {}, 404), ("GET", "/v1/models", {}, 401)],
        *[("POST", "/v1/batches", {}, 401), ("POST", "/admin/peers", ANN, 401), ("GET", "/v1/batches", BOSS, 401)],
        *[("GET", "/metrics", {}, 401), ("GET", "/metrics", ANN, 200), ("GET", "/metrics", BOSS, 200)],
        *[("GET", "/v1/responses/resp-1", {}, 401), ("HEAD", "/v1/responses/resp-1", ANN, 404)],
    ],
)
async def test_a_path_answers_whoever_may_ask(
    start_front: StartFront, tmp_path: Path, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, server=guarded(tmp_path))
        assert (await asked(front, method, path, headers))[0] == status
