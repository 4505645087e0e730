"""`python refusing_server.py serve ...`: a server with a feature that looks at the heads and bodies of requests."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator

from llmserve import __main__ as program
from llmserve.errors import BadRequest
from llmserve.gateway.draft import Draft
from llmserve.gateway.part import Admissions
from llmserve.part import Part, Server
from llmserve.server import parts


class Refusing(Part):
    """Refuses what one header says, and what one prompt says; gives a prompt a place of its own among the streams."""

    in_relays = True

    @contextlib.asynccontextmanager
    async def open(self, server: Server) -> AsyncIterator[None]:
        clients = server.get(Admissions).clients
        clients.head.append(_look_at_head)
        clients.body.append(_look_at_body)
        yield


def _look_at_head(draft: Draft) -> None:
    if "x-forbidden" in draft.headers:
        raise BadRequest("this header is forbidden", code="forbidden_header")


def _look_at_body(draft: Draft) -> None:
    if "forbidden" in draft.prompt.text:
        raise BadRequest("this word is forbidden", code="forbidden_word")
    if "as a robot" in draft.prompt.text:
        draft.stream_name = "robot"


if __name__ == "__main__":
    parts.PARTS += (Refusing(),)
    sys.exit(program.main())
