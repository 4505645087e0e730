"""How much of an engine's KV cache its requests will need, so that it never has to evict one and compute it again.

A request holds its prompt and what it has generated, and gives all back when it ends. Requests end at different times,
so the most that is ever needed at once is less than the sum of their totals. With h_i tokens held now, c_i choices
(each grows by one token a step) and r_i steps to go, the need just before request j ends is

    sum over i with r_i >= r_j of (h_i + c_i r_j)

and the peak is the largest of these over j.
"""

from __future__ import annotations

from collections.abc import Iterable

OVERDUE_SHARE = 0.25  # an answer longer than all predictions is expected to grow by this share of itself


def remaining_tokens(quantiles: tuple[float, ...], expected: float, generated: float) -> float:
    """Output tokens that a request is expected to generate still, having generated so many.

    quantiles: its equally likely lengths, () when only `expected` is known.
    """
    if generated > 0:
        longer = [length for length in quantiles if length > generated]
        if longer:
            return sum(longer) / len(longer) - generated
    left = expected - generated
    return left if left > 0 else OVERDUE_SHARE * generated


def peak_tokens(requests: Iterable[tuple[float, float, float]]) -> float:
    """The most that (held now, choices, steps to go) will need at once, tokens. O(n log n)."""
    held = choices = peak = 0.0
    for held_i, choices_i, remaining_i in sorted(requests, key=lambda request: -request[2]):
        held += held_i
        choices += choices_i
        peak = max(peak, held + choices * remaining_i)
    return peak
