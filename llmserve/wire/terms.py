"""The terms of a call between a gateway and the servers behind it, in one header that only gateways may send.

A gateway has checked the client's key and limits. The server of a group trusts the header of whoever has the gateways'
key, so that its scheduler is fair between the clients, and not between the gateways.
"""

from __future__ import annotations

import msgspec

from llmserve.errors import BadRequest
from llmserve.request import Terms
from llmserve.wire.headers import ASKER_HEADER

_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Terms)


def header_of(terms: Terms) -> bytes:
    """The line of the header for a call that a gateway forwards."""
    return b"%b: %b\r\n" % (ASKER_HEADER.encode(), _ENCODER.encode(terms))


def forwarded_terms(header: str) -> Terms:
    """The terms that a gateway forwards. Raises BadRequest.

    header : its text as the server decodes headers, latin-1
    """
    try:
        return _DECODER.decode(header.encode("latin-1"))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadRequest(
            f"the header {ASKER_HEADER} is not what a gateway sends: {error}", param=ASKER_HEADER
        ) from error
