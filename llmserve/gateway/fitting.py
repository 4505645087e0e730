"""Refuses requests that no engine can ever serve, by what is certain before they run. Estimates refuse nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from llmserve.engines.engine import ServedModel
from llmserve.errors import BadRequest, model_not_found
from llmserve.request import Bounds, EngineInfo

if TYPE_CHECKING:
    from llmserve.live.cluster import LiveCluster


def check_served(name: str, bounds: Bounds, cluster: LiveCluster) -> None:
    """Raise ModelNotFound for a model that no engine has or is to have; as `check_fits` where engines have it."""
    model = cluster.models.get(name)
    if model is not None:
        if bounds.tokens_min > 1:
            check_fits(bounds, model, cluster.fleet.infos_of(name))
    elif not cluster.fleet.may_come(name):
        raise model_not_found(name, cluster.models)


def check_fits(bounds: Bounds, model: ServedModel, engines: Iterable[EngineInfo]) -> None:
    """Raise BadRequest if the request exceeds the model's context, or the KV cache of each of these engines.

    engines : those that serve the model; one whose cache has an unknown size may hold anything
    """
    if model.context_tokens is not None and bounds.context_min > model.context_tokens:
        raise _refusal(bounds, bounds.context_min, f"the model's context of {model.context_tokens:,}")
    sizes = [engine.tokens_max for engine in engines]
    known = [size for size in sizes if size is not None]
    if known and len(known) == len(sizes) and bounds.tokens_min > max(known):
        raise _refusal(bounds, bounds.tokens_min, f"an engine's memory of {max(known):,}")


def _refusal(bounds: Bounds, tokens: int, limit: str) -> BadRequest:
    param = "prompt" if 2 * bounds.prompt_ids > tokens else "n" if bounds.choices > 1 else "min_tokens"
    return BadRequest(
        f"the request needs at least {tokens:,} tokens, more than {limit}", param=param, code="context_length_exceeded"
    )
