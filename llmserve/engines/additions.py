"""What the front-end adds to bodies of requests, and which of it an engine takes.

A strict engine refuses fields that it does not know, and the client has not sent these. So when an engine refuses a
request with such a field, whatever it says, it is asked again without the field, for it has generated nothing. If it
answers then, it is asked without from then on. If it refuses again, the client's own fields were to blame.
"""

from __future__ import annotations

from collections.abc import Callable

from llmserve.http.client import Response
from llmserve.request import Call

REFUSALS = (400, 422, 501)  # statuses of engines that refuse a field
USAGE, PRIORITY = "stream_options", "priority"


class Additions:
    """Which added fields an engine takes, for each endpoint and model: a gateway has several kinds of engines."""

    def __init__(self) -> None:
        self._takes: dict[tuple[str, str, str], bool] = {}

    def forget(self) -> None:
        self._takes.clear()

    def takes(self, call: Call, field: str) -> bool | None:
        """None: not known yet."""
        return self._takes.get((call.wire.path, call.model, field))

    def note(self, call: Call, field: str, *, takes: bool) -> None:
        self._takes[call.wire.path, call.model, field] = takes


class Asking:
    """One request, asked until the engine does not refuse what was added.

    turn  the request's turn, as the field `priority`; None: the field is not added
    send  sends the request with this body
    """

    __slots__ = ("_additions", "_call", "_dropped", "_fields", "_send", "_turn")

    def __init__(self, additions: Additions, call: Call, turn: float | None, send: Callable[[bytes], Response]) -> None:
        self._additions, self._call, self._turn, self._send = additions, call, turn, send
        fields = [PRIORITY] if turn is not None else []
        fields += [USAGE] if call.wire.usage_added else []
        self._fields = [field for field in fields if additions.takes(call, field) is not False]
        self._dropped = ""

    @property
    def is_open(self) -> bool:
        """Whether it is not known yet that the engine takes what is added."""
        return any(self._additions.takes(self._call, field) is None for field in self._fields)

    def ask(self) -> Response:
        body = self._call.wire.body
        if self._call.wire.usage_added and USAGE not in self._fields:
            body = self._call.wire.sent_body
        if self._turn is not None and PRIORITY in self._fields:
            body = with_priority(body, self._turn)
        return self._send(body)

    def again(self, response: Response) -> Response | None:
        """Ask once more if the answer refuses what may have been added. None: the answer is the engine's last word.

        One field is left out after the other, so that it is known which one the engine does not take.
        """
        additions, call = self._additions, self._call
        if response.status in REFUSALS:
            dropped = next((field for field in self._fields if additions.takes(call, field) is None), None)
            if dropped is None:
                return None
            self._fields.remove(dropped)
            self._dropped = dropped
            response.close()
            return self.ask()
        if response.status < 300:
            for field in self._fields:
                additions.note(call, field, takes=True)
            if self._dropped:
                additions.note(call, self._dropped, takes=False)
        return None


def with_priority(body: bytes, turn: float) -> bytes:
    """The body of a call with vLLM's field `priority`: an engine runs the smallest first.

    body : a JSON object with at least one field. A field that is there twice counts as the last one says.
    turn : seconds, or the number of a batch; thousandths are kept.
    """
    return b'%b,"priority":%d}' % (body.rstrip()[:-1], round(1000 * turn))
