"""A simulated GPU that serves several models, one batch at a time, with a given speed for each model.

    T = prefill_s + longest answer * step_s(b)      a batch of b requests of one model (bins.profile.StepTimes)

A batch that is stopped before its end frees the GPU at once; its time counts as `wasted_s`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bins.profile import StepTimes
from llmserve.request import Batch, EngineInfo
from llmserve.scheduling.messages import BatchEnded, Event


class SimulatedWorker:
    """info : a barrier engine with the speed of each of its models.  lengths : output tokens by request id.

    busy_s    seconds of batches, with stopped batches
    wasted_s  of these seconds, the part of stopped requests: requests share the time of their batch evenly
    """

    def __init__(self, info: EngineInfo, lengths: Mapping[int, float] | Sequence[float]) -> None:
        assert info.barrier, "a worker runs one batch at a time"
        self.info = info
        self.busy_s = 0.0
        self.wasted_s = 0.0
        self.next_end_s: float | None = None
        self._lengths = lengths
        self._batch_id = 0
        self._began_s = 0.0
        self._began_with = 0
        self._running: dict[int, float] = {}  # output tokens by request id

    def start(self, batch: Batch, now_s: float) -> None:
        assert not self._running, f"{self.info.name} was sent two batches"
        self._batch_id, self._began_s, self._began_with = batch.id, now_s, len(batch.requests)
        self._running = {request.id: self._lengths[request.id] for request in batch.requests}
        speed = self._speed(batch.model)
        self.next_end_s = now_s + speed.batch_s(max(self._running.values()), self._began_with)

    def _speed(self, model: str) -> StepTimes:
        speeds = self.info.speeds
        return speeds[model] if model in speeds else speeds[""]

    def abort(self, request_id: int, now_s: float) -> None:
        if self._running.pop(request_id, None) is None:
            return
        self.wasted_s += (now_s - self._began_s) / self._began_with
        if not self._running:
            self.busy_s += now_s - self._began_s
            self.next_end_s = None

    def end(self, now_s: float) -> Event:
        ended, self._running = self._running, {}
        self.busy_s += now_s - self._began_s
        self.next_end_s = None
        return BatchEnded(self.info.name, self._batch_id, ended)
