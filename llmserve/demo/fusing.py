"""Fewer kernels in a step: several elementwise operations of transformers run as one kernel.

Each small kernel costs a few microseconds beside the time to read the weights. The normalisations, rotations and gates
of a Llama are about thirty small kernels in every layer.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

log = logging.getLogger("llmserve.embedded")

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Returns a faster function with the same results."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile with torch.compile, for all shapes at once."""
    return torch.compile(function, dynamic=True)  # type: ignore[no-any-return]


def fuse(model: Any, compile_: Compile = compiled) -> list[str]:
    """Replace known parts of a model of transformers. Return their names. Answers change by rounding only.

    Unknown parts do not change, nor do parts that cannot be compiled on this machine. A part that can be compiled for
    some shapes only runs as before from the first failure on.
    """
    replaced = []
    norms = [module for module in model.modules() if hasattr(module, "variance_epsilon") and hasattr(module, "weight")]
    for norm in norms:
        norm.forward = _normalisation(norm)
    if norms:
        replaced.append("normalisation")
    gate = compile_(_gated)
    if _runs(gate, *torch.ones(2, 2, 8, device=model.device, dtype=model.dtype)):
        gated = [module for module in model.modules() if _is_gated(module)]
        for module in gated:
            module.forward = _gated_layer(module, _or_plain(gate, _gated))
        replaced += ["gate"] if gated else []
    modelling: Any = sys.modules[type(model).__module__]
    rotate = getattr(modelling, "apply_rotary_pos_emb", None)
    if rotate is not None:
        fused = compile_(rotate)
        angles = torch.ones(2, 1, 8, device=model.device, dtype=model.dtype)
        if _runs(fused, torch.ones_like(angles)[:, None], torch.ones_like(angles)[:, None], angles, angles):
            modelling.apply_rotary_pos_emb = _or_plain(fused, rotate)  # for all models of this kind in this process
            replaced.append("rotation")
    return replaced


def _runs(function: Callable[..., Any], *inputs: torch.Tensor) -> bool:
    try:
        with torch.inference_mode():
            function(*inputs)
    except Exception as error:  # a missing or failing compiler raises many exception types
        _log_failure(function, error)
        return False
    return True


def _or_plain(fast: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """The fast function until it fails, then the plain one: a compiler may fail at a shape that it meets late."""
    chosen = fast

    def run(*inputs: Any, **options: Any) -> Any:
        nonlocal chosen
        if chosen is not plain:
            try:
                return chosen(*inputs, **options)
            except torch.OutOfMemoryError:
                raise  # no failure of the compiler
            except Exception as error:
                _log_failure(plain, error)
                chosen = plain
        return plain(*inputs, **options)

    return run


def _log_failure(function: Callable[..., Any], error: Exception) -> None:
    log.warning("cannot compile %s: %s", getattr(function, "__name__", function), str(error).split("\n")[0])


def _normalisation(norm: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(hidden: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)

    return forward


def _is_gated(module: Any) -> bool:
    """A feed-forward layer down(silu(gate(x)) * up(x))."""
    parts = all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj"))
    return parts and type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")


def _gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return functional.silu(gate) * up


def _gated_layer(
    module: Any, gate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = module.down_proj(gate(module.gate_proj(hidden), module.up_proj(hidden)))
        return output

    return forward
