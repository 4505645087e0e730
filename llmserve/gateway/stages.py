"""The life of a call until it is queued: one list of stages, each of which may refuse the call.

    head   before the body is read   while_serving, authenticated, within_limits
    body   reads the body            reading
    last   in one step of the loop   named, aliased, own_stream, default_deadline, fair_share, served, routed,
                                     identified

A stage takes the draft of the call, fills in what the stage decides, and refuses the call by raising a RequestError.
`of_clients` has the stages of a client's request. `of_gateways` and jobs/submission.py have the same stages with
another identity, and jobs/run/file_run.py has those that need no server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from llmserve.errors import RequestError, Unavailable
from llmserve.gateway.aliases import Aliases, only_model
from llmserve.gateway.draft import Draft
from llmserve.gateway.fitting import check_served
from llmserve.gateway.parse import limits_of, read_request
from llmserve.gateway.session_ids import SessionIds
from llmserve.programs.known_programs import KnownPrograms
from llmserve.programs.sources import sources_of
from llmserve.request import Call
from llmserve.settings.deadlines import DefaultDeadlines
from llmserve.tenants.authentication import Keys, authorization_of
from llmserve.tenants.shares import share_of, shared_by
from llmserve.wire.answer_forms import COMPLETION
from llmserve.wire.headers import ASKER_HEADER
from llmserve.wire.terms import forwarded_terms

if TYPE_CHECKING:
    from llmserve.gateway.bodies import BodyLimits
    from llmserve.live.cluster import LiveCluster
    from llmserve.live.routes import Routes
    from llmserve.settings.tree import ApiConfig
    from llmserve.tenants.limits import KeyLimits

THREAD_BYTES = 256 << 10  # a larger body is read in a thread

Stage = Callable[[Draft], None]


class Admission:
    """The stages of one kind of call. Features append stages of their own.

    head  before the body is read
    body  need nothing but the draft: those of a large body run in a thread, one body at a time, so that large bodies
          cannot hold the event loop
    last  on the event loop, in one step with the queue
    by_address  whether a stage asks for the client's address
    """

    def __init__(self, *, head: Iterable[Stage] = (), body: Iterable[Stage] = (), last: Iterable[Stage] = ()) -> None:
        self.head, self.body, self.last = list(head), list(body), list(last)
        self.by_address = share_of_address in self.last
        self._one_large_body = asyncio.Lock()

    def enter(self, draft: Draft) -> None:
        for stage in self.head:
            stage(draft)

    def read(self, draft: Draft) -> None:
        for stage in self.body:
            stage(draft)

    async def read_in_thread(self, draft: Draft) -> None:
        async with self._one_large_body:
            await asyncio.to_thread(self.read, draft)

    def decide(self, draft: Draft) -> Call:
        """The call of the draft, which is ready to be queued."""
        for stage in self.last:
            stage(draft)
        return draft.call()


def is_large(body: bytes) -> bool:
    """Whether a body is read in a thread."""
    return len(body) > THREAD_BYTES


# ---- the lists -----------------------------------------------------------------------------------------------------


def of_clients(
    cluster: LiveCluster,
    key_limits: KeyLimits,
    config: ApiConfig,
    aliases: Aliases | None = None,
    belongs: Stage | None = None,
) -> Admission:
    """Requests of clients. belongs : the last stage, which finds the program of a conversation"""
    fair_by = shared_by(config.fair_by, keys=key_limits.keys.required)
    return Admission(
        head=[while_serving(cluster), authenticated(key_limits.keys), within_limits(key_limits)],
        body=[reading(limits_of(config), cluster.calls.secret, config.session_from)],
        last=[
            *_naming(cluster, aliases),
            own_stream,
            *([default_deadline(DefaultDeadlines(config.slo_ms))] if config.slo_ms else []),
            FAIR_BY[fair_by],
            *_placing(cluster),
            *([belongs] if belongs is not None else []),
        ],
    )


def of_gateways(clients: Admission, cluster: LiveCluster, aliases: Aliases | None = None) -> Admission:
    """Requests of gateways in front of this server, which have checked their client's key and limits: each says in a
    header for whom it asks."""
    last = [*_naming(cluster, aliases), forwarded_identity, *_placing(cluster)]
    return Admission(head=clients.head, body=clients.body, last=last)


def _naming(cluster: LiveCluster, aliases: Aliases | None) -> list[Stage]:
    return [named(cluster), aliased(aliases)] if aliases is not None else [named(cluster)]


def _placing(cluster: LiveCluster) -> list[Stage]:
    return [served(cluster), routed(cluster.routes)]


# ---- before the body is read ---------------------------------------------------------------------------------------


def while_serving(cluster: LiveCluster) -> Stage:
    """Refuse calls while the server shuts down."""

    def check(draft: Draft) -> None:
        if cluster.draining:
            retry_after_s = max(1.0, cluster.drain_time_s)  # a server that follows cannot listen before
            raise Unavailable("the server is shutting down", code="draining", retry_after_s=retry_after_s)

    return check


def authenticated(keys: Keys) -> Stage:
    """Find the name of the client's key."""

    def authenticate(draft: Draft) -> None:
        authorization = draft.headers.get("authorization")
        if authorization is None and draft.endpoint.takes_bare_key:
            authorization = authorization_of(draft.headers)
        draft.key = keys.authenticate(authorization)

    return authenticate


def within_limits(key_limits: KeyLimits) -> Stage:
    """Count the request against the limits of its key, until `release` of its account."""

    def acquire(draft: Draft) -> None:
        draft.account = key_limits.acquire(draft.key)

    return acquire


# ---- the body ------------------------------------------------------------------------------------------------------


def reading(limits: BodyLimits, secret: bytes, session_from: Iterable[str] = ()) -> Stage:
    """Read the body and the client's headers. secret : of the hashes of the prompt's blocks.  session_from : the
    setting
    """
    session_ids = SessionIds(sources_of(session_from))

    def read(draft: Draft) -> None:
        read_request(draft, limits, secret, session_ids)

    return read


def refuse_streams(draft: Draft) -> None:
    """Refuse a batch item whose answer would be a stream."""
    if draft.wire.stream:
        raise RequestError("a line of a file cannot stream", code="stream_not_possible")


# ---- which model ---------------------------------------------------------------------------------------------------


def named(cluster: LiveCluster) -> Stage:
    """Name the only model that there is in a call that names none; write out the tag that Ollama's names go without."""
    models = cluster.models

    def name(draft: Draft) -> None:
        model = draft.model
        if not model:
            draft.model = only_model(list(models))
        elif model not in models and (tagged := f"{model}:latest") in models:
            draft.model = tagged

    return name


def aliased(aliases: Aliases) -> Stage:
    """Exchange another name of a model for the model that stands behind it now."""

    def resolve(draft: Draft) -> None:
        if draft.prompt.model:
            draft.model = aliases.model_of(draft.model)

    return resolve


# ---- for whom ------------------------------------------------------------------------------------------------------


def own_stream(draft: Draft) -> None:
    """Put the key's name before the name of the client's stream."""
    key, name = draft.key, draft.stream_name
    draft.stream_name = f"{key}/{name}" if key and name else name or key


def default_deadline(deadlines: DefaultDeadlines) -> Stage:
    """Give a call without a deadline that of its key, stream or model."""

    def fill_in(draft: Draft) -> None:
        if draft.slo_s is None:
            draft.slo_s = deadlines.slo_s(draft.key, draft.stream_name, draft.model)

    return fill_in


def _share(draft: Draft, name: str) -> None:
    assert draft.account is not None, "a client's request has an account"
    draft.share, draft.weight = share_of(name, draft.account.policy, draft.key, draft.tier, draft.priority)


def share_of_key(draft: Draft) -> None:
    _share(draft, draft.key)


def share_of_stream(draft: Draft) -> None:
    _share(draft, draft.stream_name)


def share_of_address(draft: Draft) -> None:
    _share(draft, draft.address)


def share_of_all(draft: Draft) -> None:
    _share(draft, "")


FAIR_BY = {"key": share_of_key, "stream": share_of_stream, "address": share_of_address, "none": share_of_all}
"""Who gets a fair share of the engines with a call, by the setting `fair_by`."""


def forwarded_identity(draft: Draft) -> None:
    """Take the terms that a gateway forwards. Without them the gateway asks for itself, as a client without a key."""
    draft.key = ""
    header = draft.headers.get(ASKER_HEADER)
    if header is not None:
        draft.terms = forwarded_terms(header)


def identified(programs: KnownPrograms, now_s: Callable[[], float] = time.monotonic) -> Stage:
    """Find the program of a conversation. The last stage: whoever is counted to a program is queued."""

    def identify(draft: Draft) -> None:
        trail = draft.trail
        if trail is not None:
            draft.member = member = programs.arrived(trail, draft.key, draft.previous, now_s())
            program = member.program
            draft.program, draft.parent, draft.step = program.id, program.parent, program.step
            draft.kind = programs.kind_of(trail)

    return identify


def kind_known(programs: KnownPrograms) -> Stage:
    """Find the kind of a conversation, whose program gets no further step by this request."""

    def find(draft: Draft) -> None:
        if draft.trail is not None:
            draft.kind, draft.step = programs.kind_of(draft.trail), draft.trail.step

    return find


# ---- where ---------------------------------------------------------------------------------------------------------


def served(cluster: LiveCluster) -> Stage:
    """Refuse a call that no engine can ever serve."""

    def check(draft: Draft) -> None:
        check_served(draft.model, draft.bounds, cluster)

    return check


def routed(routes: Routes) -> Stage:
    """Find the route queue of a call that not every engine of its model can serve."""

    def route(draft: Draft) -> None:
        if draft.wire.form is not COMPLETION:
            draft.route_queue = routes.route_queue_of(
                draft.endpoint.path, draft.model, draft.previous, draft.key, draft.bounds
            )

    return route
