"""`POST /v1/forecast`: what a call would take, asked by its body, which no engine gets.

The body is that of any endpoint of engines. `?endpoint=PATH` names the endpoint; without it the body is that of
/v1/messages where the client sends Anthropic's header, else of the endpoint whose field it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from llmserve.calls.client_request import ClientExchange
from llmserve.errors import BadRequest
from llmserve.forecasts.call_forecast import CallForecast, Work
from llmserve.forecasts.lengths import Made
from llmserve.gateway.draft import Draft
from llmserve.gateway.endpoints import ENDPOINTS, Endpoint
from llmserve.gateway.intake import Intake
from llmserve.gateway.stages import Admission
from llmserve.request import Call
from llmserve.spelling import nearest
from llmserve.tenants.limits import Account
from llmserve.wire.json_text import without_bom

if TYPE_CHECKING:
    from llmserve.live.cluster import LiveCluster

PATH = "/v1/forecast"
JSON = (b"content-type", b"application/json")
CHAT, MESSAGES = ENDPOINTS["/v1/chat/completions"], ENDPOINTS["/v1/messages"]
UNTOLD = replace(CHAT, path="")  # the body says which endpoint it is of
ANTHROPIC_HEADER = "anthropic-version"


class _Fields(msgspec.Struct):
    """The fields by which a body shows of which endpoint it is."""

    messages: Raw = Raw()
    prompt: Raw = Raw()
    input: Raw = Raw()


_FIELDS = msgspec.json.Decoder(_Fields)


def endpoint_of(query: bytes, headers: Mapping[str, str]) -> Endpoint:
    """The endpoint that a request names. Raises BadRequest."""
    named = parse_qs(query.decode("latin-1")).get("endpoint") if query else None
    if named is not None:
        endpoint = ENDPOINTS.get(named[0])
        if endpoint is None:
            message = f"`endpoint`: engines have no {named[0]!r}{nearest(named[0], ENDPOINTS)}"
            raise BadRequest(message, param="endpoint", code="invalid_value")
        return endpoint
    return MESSAGES if ANTHROPIC_HEADER in headers else UNTOLD


def of_body(draft: Draft) -> None:
    """Find the endpoint whose field a body has, where the request does not name it. A stage; refuses nothing itself."""
    if draft.endpoint is UNTOLD:
        draft.endpoint = CHAT
        try:
            fields = _FIELDS.decode(without_bom(draft.body))
        except msgspec.MsgspecError:
            return  # whoever reads the body says what is wrong
        if not fields.messages and fields.prompt:
            draft.endpoint = ENDPOINTS["/v1/completions"]
        elif not fields.messages and fields.input:
            draft.endpoint = ENDPOINTS["/v1/responses"]


class Forecasting(Intake):
    """Answers with forecasts. A question counts against the limits of its key as one request, and uses no tokens."""

    def __init__(self, cluster: LiveCluster, admission: Admission) -> None:
        super().__init__(admission)
        self._cluster = cluster

    def enter(self, exchange: ClientExchange) -> None:
        """As `admit`, for the endpoint that the request is about."""
        self.admit(exchange, endpoint_of(exchange.query, exchange.headers))

    def _take(self, draft: Draft, exchange: ClientExchange) -> None:
        call, account = self._admission.decide(draft), draft.account
        assert account is not None, "a request that was admitted has an account"
        made = self._cluster.forecasts.made_now(call, self._cluster.models.get(call.model))
        if made is None:
            self._run(self._ask(call, account, exchange))
        else:
            self._answer(call, account, exchange, made)

    async def _ask(self, call: Call, account: Account, exchange: ClientExchange) -> None:
        try:
            made = await self._cluster.forecasts.made(call, self._cluster.models.get(call.model))
            if not exchange.ended:
                self._answer(call, account, exchange, made)
        except Exception as error:
            exchange.refuse(error)

    def _answer(self, call: Call, account: Account, exchange: ClientExchange, made: Made) -> None:
        headers = [JSON, *account.headers(call.model)] if account.is_limited else [JSON]
        exchange.respond(200, headers, msgspec.json.encode(told(self._cluster, call, made)))


def told(cluster: LiveCluster, call: Call, made: Made) -> CallForecast:
    """What is told of a call: of the request that the scheduler would get of it now."""
    request = cluster.calls.request_of(call, made, 0, cluster.now_s())
    queues, pool = cluster.scheduler.models.get(request.model), cluster.scheduler.group.pool
    cached = pool.residency.most_tokens(request) if queues is not None else 0.0
    work, terms = cluster.estimator.work(request, cached), call.terms
    return CallForecast(
        endpoint=call.wire.path,
        model=call.model,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=round(cached, 1),
        answers=request.choices,
        output_tokens=made.median if request.choices else None,
        expected_tokens=request.expected_tokens if request.choices else None,
        quantiles=made.lengths,
        source=made.source,
        in_force=queues is None or queues.binning.trust.trusted,
        work=Work(work.prompt_s, work.answer_s * request.choices) if work is not None else None,
        kind=f"{terms.kind:012x}" if terms.kind else "",
        sender=cluster.forecasts.history(made),
    )
