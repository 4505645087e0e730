"""Who asks: what a door tells the server of a group about a request's client, in one header that only doors may send.

A door has checked the client's key and limits. The group's server trusts the header of whoever has the doors' key, so
that its scheduler is fair between the clients, and not between the doors.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from llmserve.errors import BadRequest
from llmserve.request import Call
from llmserve.wire.headers import ASKER_HEADER


class Asker(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields of a Call that its body does not have.

    slo_s : seconds after the request's arrival at the group.  background, after_tokens : of a line of a job
    """

    key: str = ""
    share: str = ""
    weight: float = 1.0
    stream: str = ""
    slo_s: float | None = None
    predicted_tokens: float | None = None
    receipt: bool = False
    background: bool = False
    after_tokens: float = 0.0


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Asker)


def header_of(call: Call) -> bytes:
    """The line of the header for a call that a door passes on."""
    asker = Asker(
        *(call.prompt.sender, call.share, call.weight, call.stream_name, call.slo_s, call.predicted_tokens),
        *(call.receipt, call.background, call.after_tokens),
    )
    return b"%b: %b\r\n" % (ASKER_HEADER.encode(), _ENCODER.encode(asker))


def as_asked(call: Call, header: str | None) -> Call:
    """The call of a door, with what the door tells of its client. Raises BadRequest.

    header : its text as the server decodes headers, latin-1; None: the door itself asks
    """
    if header is None:
        return call
    try:
        asker = _DECODER.decode(header.encode("latin-1"))
    except msgspec.MsgspecError as error:
        raise BadRequest(f"the header {ASKER_HEADER} is not what a door sends: {error}", param=ASKER_HEADER) from error
    return replace(
        call,
        prompt=replace(call.prompt, sender=asker.key),
        share=asker.share,
        weight=asker.weight,
        stream_name=asker.stream,
        slo_s=asker.slo_s,
        predicted_tokens=asker.predicted_tokens,
        receipt=asker.receipt,
        background=asker.background,
        after_tokens=asker.after_tokens,
    )
