"""A call while the stages of its admission decide about it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from llmserve.gateway.aliases import with_model
from llmserve.programs.known_programs import Member
from llmserve.programs.trail import Trail
from llmserve.request import EVEN, LAST, Bounds, Call, Terms, Wire
from predictor.prompt import Prompt

if TYPE_CHECKING:
    from llmserve.gateway.endpoints import Endpoint
    from llmserve.tenants.limits import Account

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class Draft(msgspec.Struct, gc=False):
    """What is known of a call so far. Stages fill in the fields; `call` makes the Call of them, once.

    headers   the client's, with lower-case names
    body      as the client has sent it, unpacked
    address   of the client, where shares are by address; "" elsewhere
    account   of the API key; from `within_limits` on
    wire, prompt, bounds, opening, blocks, block_share, previous, tier, priority, trail  from the body; `prompt` with
              the model that the body names; trail : what the request says of its program
    model     that serves the call; `call` writes it into a body that names another

    All other fields are those of the same names in Terms and Call.
    """

    endpoint: Endpoint
    headers: Mapping[str, str] = NO_HEADERS
    body: bytes = b""
    address: str = ""
    account: Account | None = None
    # of the body
    wire: Wire = Wire("", b"")
    prompt: Prompt = Prompt("")
    bounds: Bounds = Bounds()
    opening: str = ""
    blocks: tuple[int, ...] = ()
    block_share: float = 0.0
    previous: str = ""
    tier: str = ""
    priority: int = 0
    trail: Trail | None = None
    # of the headers, the key and the server
    model: str = ""
    key: str = ""
    share: str = ""
    weight: float = EVEN
    stream_name: str = ""
    slo_s: float | None = None
    deadline_s: float | None = None
    predicted_tokens: float | None = None
    receipt: bool = False
    background: bool = False
    after_tokens: float = LAST
    program: int = 0
    parent: int = 0
    kind: int = 0
    step: int = 0
    route_queue: str = ""
    member: Member | None = None

    @property
    def terms(self) -> Terms:
        return Terms(
            self.key,
            self.share,
            self.weight,
            self.stream_name,
            self.slo_s,
            self.predicted_tokens,
            self.receipt,
            self.background,
            self.after_tokens,
            self.program,
            self.parent,
            self.kind,
            self.step,
        )

    @terms.setter
    def terms(self, terms: Terms) -> None:
        for name in Terms.__struct_fields__:
            setattr(self, name, getattr(terms, name))

    def call(self) -> Call:
        """The call as the stages have decided."""
        prompt, wire = self.prompt, self.wire
        if self.model != prompt.model or self.key != prompt.sender:
            if prompt.model and wire.body and self.model != prompt.model:
                wire = with_model(wire, self.model)
            prompt = replace(prompt, model=self.model, sender=self.key)
        return Call(
            wire,
            prompt,
            self.bounds,
            self.terms,
            self.opening,
            self.blocks,
            self.block_share,
            self.previous,
            self.tier,
            self.priority,
            self.deadline_s,
            self.route_queue,
            self.member,
        )
