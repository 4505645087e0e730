"""Submits batch items: a line of a file becomes a request of its key, and takes what online requests leave."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING

from llmserve.calls.in_flight import Head, Receipt
from llmserve.errors import RequestError, Unauthorized, Unavailable
from llmserve.gateway.bodies import BodyLimits
from llmserve.gateway.draft import Draft
from llmserve.gateway.endpoints import ENDPOINTS
from llmserve.gateway.stages import Admission, is_large, named, reading, routed, served
from llmserve.jobs.run.estimates import Work
from llmserve.jobs.run.validation import ANSWER_TOKENS
from llmserve.live.cluster import LiveCluster
from llmserve.request import Request
from llmserve.tenants.limits import Account, KeyCharge, KeyLimits

if TYPE_CHECKING:
    from llmserve.jobs.run.item_feeder import Answered

CLOCK_S = 1.0  # a change of the time of day that counts


class BatchSubmitter:
    """The entry of batch items into the queue. Budgets limit an item; limits by the minute do not."""

    def __init__(self, cluster: LiveCluster, key_limits: KeyLimits, limits: BodyLimits, *, fair: bool) -> None:
        """limits : of a line's body.  fair : whether requests have shares"""
        self._cluster, self._key_limits, self._fair = cluster, key_limits, fair
        self._admission = Admission(
            body=[reading(limits, cluster.calls.secret)],
            last=[named(cluster), self._as_item, served(cluster), routed(cluster.routes)],
        )
        self._clock_began_at = _began_at(cluster)

    @property
    def is_open(self) -> bool:
        return not self._cluster.draining and any(self._cluster.engines_ready.values())

    def slots(self, model: str) -> int:
        fleet = self._cluster.fleet  # a line may name no model, or one by another name
        return sum([handle.info.slots for handle in fleet.serving(model) or fleet.handles.values() if handle.ready])

    def is_up(self, model: str) -> bool:
        serving = self._cluster.fleet.serving(model)
        return not serving or any(handle.ready for handle in serving)

    @property
    def barrier(self) -> bool:
        return any(handle.info.barrier for handle in self._cluster.fleet.handles.values())

    def tokens_per_s(self, key: str, model: str) -> float:
        account = self._account(key)
        if account is None:
            return 0.0
        line = Request(0, model=model, share=self._share(account), weight=account.policy.weight)
        return self._cluster.estimator.tokens_per_s(line)

    async def work_of(self, key: str, path: str, bodies: Sequence[bytes]) -> Work | None:
        """Estimate what requests will take, from learned lengths, prices, and the energy of past answers."""
        usage = self._key_limits.usage
        joules_per_token = cache(usage.joules_per_token if usage is not None else _unknown)  # a sum over all keys
        works = [work for body in bodies if (work := await self._work_of(key, path, body, joules_per_token))]
        if not works:
            return None
        return Work(
            works[0].model,
            sum([work.prompt_tokens for work in works]),
            sum([work.output_tokens for work in works]),
            _sum([work.money for work in works]),
            _sum([work.joules for work in works]),
        )

    async def _work_of(
        self, key: str, path: str, body: bytes, joules_per_token: Callable[[str], float | None]
    ) -> Work | None:
        draft = Draft(ENDPOINTS[path], body=body)
        try:
            self._admission.read(draft)
        except RequestError:
            return None
        draft.key = key
        call, cluster = draft.call(), self._cluster
        length = await cluster.forecasts.expected(call, cluster.models.get(call.model))
        if length is None:
            queues = cluster.scheduler.models.get(call.model)
            seen = queues is not None and queues.service.answers > 0
            length = queues.service.tokens_mean if queues is not None and seen else float(ANSWER_TOKENS)
            length = min(length, call.bounds.output_tokens_max or math.inf)
        prompt_tokens, tokens = cluster.forecasts.prompt_tokens.estimate(call), call.bounds.choices * length
        price = self._key_limits.prices.get(call.model)
        joules = joules_per_token(call.model)
        return Work(
            call.model,
            prompt_tokens,
            tokens,
            price.of(prompt_tokens, tokens) if price is not None else None,
            tokens * joules if joules is not None else None,
        )

    def _account(self, key: str) -> Account | None:
        return next((account for account in self._key_limits.accounts if account.name == key), None)

    def _share(self, account: Account) -> str:
        return account.name if self._fair else ""

    async def submit(
        self, key: str, path: str, body: bytes, client: Answered, *, expires_at: int, after_tokens: float
    ) -> Callable[[], None]:
        if self._cluster.draining:
            raise Unavailable("the server is shutting down", code="draining", retry_after_s=1.0)
        account = self._account(key)
        if account is None:
            raise Unauthorized("the API key of this batch is not valid any more")
        draft = Draft(ENDPOINTS[path], body=body, account=account, after_tokens=after_tokens)
        if is_large(body):
            await self._admission.read_in_thread(draft)
        else:
            self._admission.read(draft)
        if not client.is_in_flight:  # its window has closed, or its batch was cancelled
            return lambda: None
        draft.deadline_s = self._deadline_s(expires_at)
        call = self._admission.decide(draft)
        in_flight = self._cluster.calls.submit(call, _ItemAnswer(client), self._charge(account, call.model))
        return partial(self._cluster.calls.cancel, in_flight)

    def _deadline_s(self, expires_at: int) -> float:
        """The end of a window on the cluster's clock: the same for all lines of a job, unless the time was set."""
        began_at = _began_at(self._cluster)
        if abs(began_at - self._clock_began_at) > CLOCK_S:
            self._clock_began_at = began_at
        return expires_at - self._clock_began_at

    def _as_item(self, draft: Draft) -> None:
        """Give an item the share of its key. What the client asks for by tier or priority does not count."""
        account, deadline_s = draft.account, draft.deadline_s
        assert account is not None, "an item is of a key's batch"
        assert deadline_s is not None, "a batch has a window"
        draft.key = draft.stream_name = account.name
        draft.share, draft.weight = self._share(account), account.policy.weight
        draft.slo_s = deadline_s - self._cluster.now_s()
        draft.tier, draft.priority = "", 0
        draft.background = True

    def _charge(self, account: Account, model: str) -> KeyCharge | None:
        if not account.budgets and self._key_limits.usage is None:
            return None
        return _ItemCharge(account, model)


def _sum(values: Sequence[float | None]) -> float | None:
    """None if a value is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _unknown(model: str) -> None:
    """Joules of a token where nothing is metered: unknown."""


def _began_at(cluster: LiveCluster) -> float:
    """Unix time at which the cluster's clock showed 0."""
    return time.time() - cluster.now_s()


class _ItemCharge(KeyCharge):
    """The charge of a batch item: counts against the budgets of its key, and as use of the key."""

    __slots__ = ()

    def _check(self, tokens: float, money: float) -> None:
        self._account.check_budgets(self.model, tokens, money)

    def _take(self, tokens: float) -> None:
        """Batch items are exempt from limits by the minute."""


class _ItemAnswer:
    """The client of a batch item, which takes a whole answer at once."""

    __slots__ = ("_client",)

    listens = False

    def __init__(self, client: Answered) -> None:
        self._client = client

    async def writable(self) -> None:
        """Always."""

    def begin(self, head: Head) -> None:
        assert head.body is not None, "a batch item is not streamed"
        self._client.answered(head.status, _request_id(head.receipt), head.body)

    def write(self, data: bytes) -> bool:
        raise AssertionError("a batch item is not streamed")

    def end(self) -> None:
        raise AssertionError("a batch item is not streamed")

    def fail(self, error: RequestError, receipt: Receipt | None) -> None:
        self._client.refused(error, _request_id(receipt))


def _request_id(receipt: Receipt | None) -> str:
    return f"llmserve-{receipt.request_id}" if receipt is not None else ""
