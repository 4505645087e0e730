"""The features of the server, in the order in which they are checked and opened. They are closed in reverse.

What the server needs to know of its clients, and where it listens, comes before anything slow. Parts in a tuple open
at the same time, for each takes seconds.
"""

from __future__ import annotations

from llmserve.discovery.part import Discovery
from llmserve.engines.part import Engines
from llmserve.forecasts.part import Predictors, State
from llmserve.gateway.part import Admitting, Sockets
from llmserve.jobs.part import Jobs
from llmserve.kv_events.part import KvEvents
from llmserve.live.part import Live
from llmserve.observe.part import AccessLog, Energy, Measurements, Traces, Usage
from llmserve.part import Part
from llmserve.planning.part import Plan
from llmserve.tenants.part import KeyFiles, Keys
from llmserve.web.part import Front, OwnPaths, Page
from llmserve.webhook.part import Webhook
from llmserve.workers.part import Relays

Parts = tuple[Part | tuple[Part, ...], ...]

DRIVER: Parts = (Plan(), (Engines(), Predictors()), Live())
"""The parts that run requests, for a process that has no clients but itself."""

PARTS: Parts = (
    State(),
    KeyFiles(),
    Sockets(),
    *DRIVER,
    Usage(),
    Energy(),
    Measurements(),
    KvEvents(),
    Discovery(),
    Keys(),
    Admitting(),
    Jobs(),
    Webhook(),
    Traces(),
    AccessLog(),
    Page(),
    OwnPaths(),
    Front(),
    Relays(),
)
