"""What calls use of the limits of their keys: reserved by the forecast when a call arrives, settled when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from llmserve.calls.in_flight import InFlightCall
from llmserve.errors import RequestError
from llmserve.request import Call, Request
from llmserve.scheduling.queues.model_queues import ModelQueues
from llmserve.scheduling.rates import ServiceTime


class Charges:
    """The charges of calls, from their reserve to their settlement.

    models  the scheduler's queues, by model
    """

    def __init__(self, models: Callable[[], Mapping[str, ModelQueues]], now_s: Callable[[], float]) -> None:
        self._models = models
        self._now_s = now_s
        self._reserving: set[asyncio.Task[None]] = set()

    def reserve(self, in_flight: InFlightCall, admit: Callable[[InFlightCall], None]) -> None:
        """Reserve the most that the call probably uses, then admit the call. A call over a limit fails at once.

        `admit` is called at once, or later if a budget must be asked.
        """
        charge, request = in_flight.charge, in_flight.request
        assert charge is not None, "a call without limits reserves nothing"
        answer = most_tokens(request, in_flight.call, self._service(in_flight.call.model).tokens_mean)
        try:
            reserving = charge.reserve(in_flight, request.prompt_tokens, request.choices * answer)
        except RequestError as error:
            self._refuse(in_flight, error)
            reserving = None
        if reserving is None:
            admit(in_flight)
            return
        task = asyncio.get_running_loop().create_task(self._reserve_later(in_flight, reserving, admit))
        self._reserving.add(task)
        task.add_done_callback(self._reserving.discard)

    async def _reserve_later(
        self, in_flight: InFlightCall, reserving: Awaitable[None], admit: Callable[[InFlightCall], None]
    ) -> None:
        try:
            await reserving
        except RequestError as error:
            self._refuse(in_flight, error)
        admit(in_flight)

    def _refuse(self, in_flight: InFlightCall, error: RequestError) -> None:
        in_flight.charge = None
        in_flight.fail(error)

    def settle(self, in_flight: InFlightCall) -> None:
        """Give back what an ended call has not used."""
        charge, in_flight.charge = in_flight.charge, None
        if charge is not None:
            service = self._service(in_flight.call.model)
            charge.settle(in_flight, *used_tokens(in_flight, service, self._now_s()))

    def _service(self, model: str) -> ServiceTime:
        queues = self._models().get(model)
        return queues.service if queues is not None else ServiceTime()


def most_tokens(request: Request, call: Call, tokens_mean: float) -> float:
    """Tokens that each answer probably has at most: the largest of its likely lengths.

    Without likely lengths the client's limit, or else the mean of the model's answers: a client's own prediction may
    raise that, for nobody should reserve less by a claim.
    """
    if request.quantiles:
        most = request.quantiles[-1]
    else:
        most = call.bounds.output_tokens_max or max(request.predicted_tokens or 0.0, tokens_mean)
    return min(most, call.bounds.output_tokens_max or most)


def used_tokens(in_flight: InFlightCall, service: ServiceTime, now_s: float) -> tuple[float, float | None]:
    """(tokens of the prompt, of all answers) that a call has used; None: as many as were reserved.

    The engine's own counts, where it has given any. A client that leaves pays for what the engine has done by then. A
    call that failed without an answer costs nothing.
    """
    request, counts = in_flight.request, in_flight.measured.counts
    if counts is not None:
        prompt = request.prompt_tokens if counts.prompt_tokens is None else counts.prompt_tokens
        return prompt, counts.completion_tokens
    if in_flight.measured.streamed_tokens:
        return request.prompt_tokens, in_flight.measured.streamed_tokens
    if in_flight.delivery.gone and in_flight.receipt is not None:
        if in_flight.call.wire.stream:  # and nothing has come
            return request.prompt_tokens, 0.0
        most = most_tokens(request, in_flight.call, service.tokens_mean)
        return request.prompt_tokens, request.choices * min(
            most, in_flight.generated_tokens(service.seconds_per_token, now_s)
        )
    return 0.0, 0.0
