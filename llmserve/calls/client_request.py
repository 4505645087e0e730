"""What is noted on a client's request from its head to its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmserve.calls.in_flight import InFlightCall
from llmserve.errors import RequestError
from llmserve.http.exchange import Exchange
from llmserve.wire.answer_forms import AnswerForm


class ClientRequest:
    """form   of the answers of the engines' endpoint to which the request goes; None: the request is for this server
    key    name of the client's API key
    codings  how the body is packed, in the order in which it was, until it is unpacked
    draft  the gateway's, until the call is queued
    call   the call that answers the request, while somebody follows its end
    error  with which the request was refused
    """

    __slots__ = ("call", "codings", "draft", "error", "form", "key")

    def __init__(self) -> None:
        self.form: AnswerForm | None = None
        self.key = ""
        self.codings: Sequence[str] = ()
        self.draft: Any = None
        self.call: InFlightCall | None = None
        self.error: RequestError | None = None


ClientExchange = Exchange[ClientRequest]
