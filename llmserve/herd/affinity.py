"""Which models may share GPUs: those whose batches' times are alike.

    alpha, beta    a batch of b takes alpha b + beta, ms
    A(m_i, m_j)    1 of models with the same alpha and beta; FLEX's guarantee for a group's goodput is worse in
                   proportion to the largest A of any two of its models: the paper's K          `divergence`

Source: Shepherd, Section 4 (affinity sets) and Section 5.2 (A, equation 4).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmserve.herd.instance import ROUNDING, Bools, Floats, Ints, Model


def affinity_sets(models: Sequence[Model], affinity_max: float | None) -> Ints:
    """(models,) which set each is in: any two of a set diverge by at most affinity_max.

    Greedy: in the order of beta / alpha, then alpha, each goes into the first set whose members it all suits, or begins
    one. The fewest sets would be a clique cover, which is hard; more of them leave plans fewer choices.
    """
    kinds = np.zeros(len(models), dtype=np.int64)
    if affinity_max is None or not models:
        return kinds
    alpha_ms = np.array([model.alpha_ms for model in models])
    beta_ms = np.array([model.beta_ms for model in models])
    suits: list[Bools] = []  # by set: models that all its members suit
    for one in np.lexsort((alpha_ms, beta_ms / alpha_ms)).tolist():
        near = divergence(alpha_ms, beta_ms, one) <= affinity_max * (1 + ROUNDING)
        found = next((number for number, all_suit in enumerate(suits) if all_suit[one]), None)
        if found is None:
            found = len(suits)
            suits.append(near)
        else:
            suits[found] &= near
        kinds[one] = found
    return kinds


def divergence(alpha_ms: Floats, beta_ms: Floats, of: int) -> Floats:
    """(models,) A(m_i, m_j) of Section 5.2, the larger of both directions, of one model with each. Of like ones: 1."""

    def directed(alpha_i: Floats, beta_i: Floats, alpha_j: Floats, beta_j: Floats) -> Floats:
        spare = alpha_j + beta_j - beta_i
        most = (alpha_i + beta_i) / alpha_j
        later = np.maximum(alpha_i / np.where(spare > 0, spare, 1.0), alpha_i / alpha_j)
        return np.where(spare > 0, np.minimum(most, later), most)

    one = alpha_ms[of : of + 1], beta_ms[of : of + 1]
    return np.maximum(directed(*one, alpha_ms, beta_ms), directed(alpha_ms, beta_ms, *one))
