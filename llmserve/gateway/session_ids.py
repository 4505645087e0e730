"""The ids of sessions that requests have sent, found by the sources of a server (programs/sources.py).

Every body has the fields of the known clients. A site may name others; then bodies are decoded with these, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from llmserve.gateway.bodies import SESSION_FIELDS, Asked
from llmserve.gateway.endpoints import ENDPOINTS, Answers
from llmserve.programs.sources import KNOWN, Sent, Sources
from llmserve.wire.headers import PREDICTED_HEADER, RECEIPT_HEADER, SLO_HEADER, STREAM_HEADER

TERMS_HEADERS = (SLO_HEADER, PREDICTED_HEADER, STREAM_HEADER, RECEIPT_HEADER)
Decoder = msgspec.json.Decoder[Any]


class SessionIds:
    """What finds the ids of a request.

    headers     that may hold ids, and those of a request's terms: one look finds out whether there are any
    own_fields  of bodies, which only this site knows; () for most sites
    """

    def __init__(self, sources: Sources = KNOWN) -> None:
        self._sources = sources
        self.headers = (*TERMS_HEADERS, *sources.headers)
        self.own_fields = tuple([name for name in sources.fields if name not in SESSION_FIELDS])
        self._decoders: dict[Decoder, Decoder] = {}
        self._places: dict[type, Mapping[str, str]] = {}
        if self.own_fields:
            for reads in [endpoint.reads for endpoint in ENDPOINTS.values()]:
                if isinstance(reads, Answers):
                    body, places = _with_fields(reads.decoder.type, self.own_fields)
                    self._decoders[reads.decoder], self._places[body] = msgspec.json.Decoder(body), places

    def decoder(self, reads: Answers) -> Decoder:
        """The decoder of an endpoint's bodies."""
        return self._decoders[reads.decoder] if self.own_fields else reads.decoder

    def in_headers(self, headers: Mapping[str, str]) -> Sent | None:
        return self._sources.sent_in_headers(headers)

    def in_body(self, body: Asked) -> Sent | None:
        fields = {name: bytes(raw) for name in SESSION_FIELDS if (raw := getattr(body, name))}
        for name, place in self._places.get(type(body), {}).items():
            if value := getattr(body, place):
                fields[name] = msgspec.json.encode(value)
        return self._sources.sent_in_body(fields)


def _with_fields(body: type[Asked], names: Sequence[str]) -> tuple[type[Asked], Mapping[str, str]]:
    """The struct with further fields, and the attribute of each: a field that the struct reads anyway has one."""
    there = dict(zip(body.__struct_encode_fields__, body.__struct_fields__, strict=True))
    own = {name: f"own_{number}" for number, name in enumerate(names) if name not in there}
    more: Any = msgspec.defstruct(
        body.__name__,
        [(place, Raw, Raw()) for place in own.values()],
        bases=(body,),
        rename={place: name for name, place in own.items()},
        kw_only=True,
    )
    return more, {name: own.get(name) or there[name] for name in names}
