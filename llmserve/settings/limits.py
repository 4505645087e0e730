"""The section [limits]: limits of requests and keys."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from llmserve.programs.sources import sources_of
from llmserve.settings.deadlines import DefaultDeadlines


class ApiConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of requests and keys"""

    body_bytes_max: Annotated[int, Meta(ge=1, description="largest request body in bytes, also after unpacking")] = (
        16 << 20
    )
    buffers_bytes_max: Annotated[
        int,
        Meta(
            ge=1,
            description="bytes of requests and unread answers in memory. A key (without keys, an address) may hold at "
            "most as many as are still free; its further bodies get status 503",
        ),
    ] = 1 << 30
    prompt_chars_max: Annotated[int, Meta(ge=1, description="longest prompt, characters")] = 1_000_000
    choices_max: Annotated[
        int, Meta(ge=1, description="most answers of one request: `n` times the number of its prompts")
    ] = 128
    messages_max: Annotated[
        int, Meta(ge=1, description="most messages, and most parts of their contents, of one request")
    ] = 8192
    tools_max: Annotated[int, Meta(ge=1, description="most tools of one request")] = 1024
    stops_max: Annotated[int, Meta(ge=1, description="most stop strings of one request")] = 64
    concurrent_max: Annotated[int, Meta(ge=0, description="requests in progress per API key; 0: no limit")] = 0
    requests_per_minute_max: Annotated[int, Meta(ge=0, description="requests per minute and API key; 0: no limit")] = 0
    fair_by: Annotated[
        Literal["key", "stream", "address", "none"] | None,
        Meta(
            description="what gets equal shares of the engines while requests wait, by tokens of prompts and answers: "
            "each API key, stream or client address (default: key with --api-key-file, else none)"
        ),
    ] = None
    session_from: Annotated[
        tuple[str, ...],
        Meta(
            description="where this site's clients name the session of a request, beside the places that are known: "
            "`header:NAME`, or `body:FIELD`, a field of the JSON body or of an object there, such as "
            "body:metadata.thread. The first one that a request has counts. Repeat for several",
            extra={"metavar": "header:NAME|body:FIELD"},
        ),
    ] = ()
    tokens_per_minute_max: Annotated[
        int,
        Meta(ge=0, description="tokens of prompts and answers per minute and API key; 0: no limit"),
    ] = 0
    limits_part: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="part of the keys' limits that this server may use at first, if several servers share the "
            "keys. `llmserve up` sets it, and adjusts the parts every second",
        ),
    ] = 1.0
    slo_ms: Annotated[
        tuple[str, ...],
        Meta(
            description="default deadline of a request, milliseconds after its arrival. `MS`, `model:ID=MS`, "
            "`stream:NAME=MS` or `key:NAME=MS`; key wins over stream, stream over model, model over plain `MS`; repeat "
            "for several. With keys, a stream that a client names is KEY/NAME",
            extra={"metavar": "[model:ID=|stream:NAME=|key:NAME=]MS"},
        ),
    ] = ()

    def __post_init__(self) -> None:
        DefaultDeadlines(self.slo_ms)
        sources_of(self.session_from)
