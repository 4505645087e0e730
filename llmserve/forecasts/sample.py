"""Which answers teach, so that learning takes a bounded share of the event loop's time. Pure.

An answer teaches its template and its application cheaply, and its words at several times the cost. So
under load only a sample of the answers teaches templates, and only a sample of these teaches words:

    c   seconds of the processor that the templates, or the words, of an answer take
    g   seconds between two answers that may be in the sample
    s   TEMPLATES_SHARE or WORDS_SHARE
    p   share of these answers that are in the sample, min(1, s g / c): this takes the share s of the time

The answers of a sample are spread evenly, so they are a fair sample even of a batch that ends as a whole, in order of
length. Each counts as one answer: the window of examples then covers a longer time.
"""

from __future__ import annotations

# Some 200 answers a second, more than a large model gives on one GPU, are all learnt in these shares.
TEMPLATES_SHARE = 0.01
WORDS_SHARE = 0.02
GAP_S_MAX = 1.0  # a longer silence says nothing about the next burst
MEMORY = 256  # answers after which an observation's weight has fallen to a third


class Sample:
    """An even sample of the answers, those that teach. share : of the time that teaching may take"""

    def __init__(self, share: float) -> None:
        self._share = share
        self._gap_s, self._cost_s = GAP_S_MAX, 0.0  # means, g and c
        self._last_s: float | None = None
        self._answers = 0  # of the sample
        self._due = 0.0  # sum of p, less the answers of the sample

    def includes(self, now_s: float) -> bool:
        """Whether the next answer teaches. now_s : when it is learnt"""
        if self._last_s is not None:
            self._gap_s += (min(now_s - self._last_s, GAP_S_MAX) - self._gap_s) / MEMORY
        self._last_s = now_s
        self._due += min(1.0, self._share * self._gap_s / self._cost_s) if self._cost_s else 1.0
        if self._due < 1.0:
            return False
        self._due -= 1.0
        return True

    def took(self, seconds: float) -> None:
        """Count an answer that taught. seconds : of the processor that it took, >= 0

        Not the time that passed: on a processor that others use, most of it may be theirs.
        """
        self._answers += 1
        self._cost_s += (seconds - self._cost_s) / min(self._answers, MEMORY)
