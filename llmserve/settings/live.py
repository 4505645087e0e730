"""The section [live]: health probes of engines, and limits for slow clients."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from llmserve.errors import ConfigError

PATH = re.compile(r"/[!-~]*")


class LiveConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Health probes of engines, and limits for slow clients"""

    probes_failed_max: Annotated[
        int, Meta(ge=1, description="failed health probes in a row after which an engine is considered lost")
    ] = 3
    probe_every_s: Annotated[float, Meta(gt=0, description="interval between two health probes of an engine")] = 2.0
    probe_s: Annotated[
        float,
        Meta(
            gt=0,
            description="longest wait for an answer to a probe. An engine that still sends answers is not considered "
            "lost because its probes are late",
        ),
    ] = 5.0
    probe_path: Annotated[
        str,
        Meta(
            description="path at which engines by URL report their health. If the path is missing or refused, GET "
            "/v1/models is enough; with `/v1/models` nothing else is asked for",
            extra={"metavar": "PATH"},
        ),
    ] = "/health"
    memory_bound: Annotated[
        bool,
        Meta(description="delay requests that do not fit into an engine's KV cache, if its size is known"),
    ] = True
    buffer_bytes_max: Annotated[
        int, Meta(ge=1, description="bytes buffered for a slow client before its engine is slowed down")
    ] = 8 << 20
    client_stall_s: Annotated[
        float, Meta(gt=0, description="longest time for which a client may read nothing of its answer")
    ] = 60.0
    keep_alive_s: Annotated[
        float,
        Meta(
            ge=0,
            description="silence in a stream after which the client gets a comment that says how long it will wait (on "
            "/v1/messages and /v1/responses also an event), so that neither a proxy nor the client cuts the "
            "connection. The status is then 200, and later errors are sent as events. 0: no comments",
        ),
    ] = 15.0

    def __post_init__(self) -> None:
        if PATH.fullmatch(self.probe_path) is None:
            raise ConfigError(f"probe_path: {self.probe_path!r} is not a path such as /health")
