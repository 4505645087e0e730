"""The models that the engines serve: /v1/models."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmserve.errors import model_not_found
from llmserve.gateway.aliases import Aliases
from llmserve.gateway.answers import json_response
from llmserve.gateway.own_routes import OwnRoute
from llmserve.live.cluster import LiveCluster
from llmserve.tenants.guards import Guard

SERVER = {"server": "llmserve"}  # so that another llmserve in front knows what it has before it


class ModelEndpoints:
    """Lists the models of all engines, up or down, and the other names of models."""

    def __init__(self, cluster: LiveCluster, aliases: Aliases, client_key: Guard) -> None:
        self._cluster, self._aliases = cluster, aliases
        self.routes = [
            OwnRoute("GET", "/v1/models", self.list_models, guard=client_key, tag="models"),
            OwnRoute("GET", "/v1/models/{model_id:path}", self.model, guard=client_key, tag="models"),
        ]

    async def list_models(self, _: Request) -> Response:
        """The models, and their other names."""
        models = [self._described(name) for name in sorted(self._cluster.models)]
        aliases = self._aliases.of(self._cluster.models)
        models += [{**self._described(model), "id": name, "root": model} for name, model in sorted(aliases.items())]
        return json_response({"object": "list", "data": models}, headers=SERVER)

    async def model(self, request: Request) -> Response:
        """One model, by its name or another name."""
        name = request.path_params["model_id"]
        if name in self._cluster.models:
            return json_response(self._described(name))
        aliases = self._aliases.of(self._cluster.models)
        if name not in aliases:
            raise model_not_found(name, self._cluster.models)
        return json_response({**self._described(aliases[name]), "id": name, "root": aliases[name]})

    def _described(self, name: str) -> dict[str, Any]:
        known = self._cluster.models[name]
        model: dict[str, Any] = {"id": name, "object": "model", "created": known.created}
        model["owned_by"] = known.owned_by or "llmserve"
        return {**model, "max_model_len": known.context_tokens} if known.context_tokens else model
