"""Whose share of the engines pays for a request, and what the share weighs.

A client may ask for more or less than others, by the fields `service_tier` (OpenAI's) and `priority` (vLLM's: lower
values first). Both are levels; each level has a share of its own, which weighs LEVEL_WEIGHT times less than the one
before. So nothing waits for ever, under no order: a level that weighs little is served little. Everybody may step back
(`flex`, positive priorities); a key file says who may step forward.
"""

from __future__ import annotations

from llmserve.errors import BadRequest
from llmserve.request import EVEN
from llmserve.tenants.key_file import KeyPolicy

LEVEL_WEIGHT = 4.0
LEVEL_MOST = 3  # beyond, priorities count as this one
LEVELS = {"priority": -1, "flex": 1}  # of tiers; every other tier is 0
ANY_LATER = (0, 2**31)


def level_of(policy: KeyPolicy, key: str, tier: str, priority: int) -> int:
    """How many levels the request stands back. Raises BadRequest when its key may not ask for that."""
    if tier in LEVELS and tier not in policy.tiers:
        raise BadRequest(
            f"{_who(key)} may not ask for the service tier {tier!r}; it may ask for {', '.join(policy.tiers)}",
            param="service_tier",
            code="service_tier_not_allowed",
        )
    least, most = policy.priority or ANY_LATER
    if not least <= priority <= most:
        may = f"from {least} to {most}" if policy.priority else "0 and above (less comes first)"
        raise BadRequest(
            f"{_who(key)} may not ask for the priority {priority}; it may ask for {may}",
            param="priority",
            code="priority_not_allowed",
        )
    return max(-LEVEL_MOST, min(LEVEL_MOST, LEVELS.get(tier, 0) + priority))


def _who(key: str) -> str:
    return "this key" if key else "without keys (--api-key-file), a request"


def shared_by(fair_by: str | None, *, keys: bool) -> str:
    """Whose shares there are: those of `fair_by`; None: of keys, where requests need one."""
    return fair_by or ("key" if keys else "none")


def share_of(name: str, policy: KeyPolicy, key: str, tier: str, priority: int) -> tuple[str, float]:
    """The share of a request, and the share's weight. name : of the key, stream or address that shares are by"""
    if level := level_of(policy, key, tier, priority) if tier or priority else 0:
        return f"{name}//{level:+d}", policy.weight * LEVEL_WEIGHT**-level
    return name, EVEN if policy.weight == EVEN else policy.weight  # forwarded terms leave out this very object
