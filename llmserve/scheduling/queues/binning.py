"""Which bin a request of a model waits in, by its forecast, and how long the answers of each bin are."""

from __future__ import annotations

from bins.edges import OnlineEdges
from bins.risk import risk
from llmserve.request import Request
from llmserve.scheduling.lengths import BinTokens, SeenLengths, Tokens
from llmserve.scheduling.queues.waiting import QueuedRequest
from llmserve.scheduling.trust import WINDOW_MIN, Trust


class Binning:
    """The bins of one model, by scores of forecasts.

    edges       bin edges over the scores, refitted as requests arrive
    trust       whether predictions rank answers; while they do not, all requests wait in one bin
    batch_size  largest batch that a bin forms
    by_risk     whether a score is the risk (bins/risk.py) instead of the median
    seen        records answer lengths, for edges, plans and batch times; None: nobody needs them
    """

    def __init__(
        self,
        edges: OnlineEdges,
        trust: Trust,
        *,
        batch_size: int,
        by_risk: bool = True,
        seen: SeenLengths | None = None,
    ) -> None:
        self.edges, self.trust, self.seen = edges, trust, seen
        self._answers = 0
        self._batch_size, self._by_risk = batch_size, by_risk
        self._tokens = BinTokens(seen, batch_size)

    def score(self, request: Request) -> float | None:
        """The value that determines a request's bin, tokens; None without a prediction."""
        lengths = request.quantiles if self._by_risk else ()
        return risk(lengths, self._batch_size) if lengths else request.predicted_tokens

    def observe(self, score: float | None) -> int:
        """Learn edges from a score. Returns its bin, trusted or not; 0 without a prediction."""
        if score is None:
            return 0
        self.edges.observe(score)
        return self.edges.bin_of(score)

    def bin_of(self, score: float | None) -> int:
        """The bin of a request with this score: 0 without a prediction, and while predictions are not trusted."""
        return self.edges.bin_of(score) if score is not None and self.trust.trusted else 0

    def forecast(self, request: Request) -> float | None:
        """Expected output tokens of a choice; None while predictions are not trusted."""
        return request.expected_tokens if self.trust.trusted else None

    def sort_length(self, queued: QueuedRequest) -> float:
        """Length by which a window sorts a request, tokens; 0 for all while predictions are not trusted."""
        length = queued.expected_tokens if queued.score is None else queued.score
        return length if self.trust.trusted else 0.0

    def tokens(self, bin_index: int) -> Tokens:
        """Output tokens of a bin's answers, from the answers recorded so far; zeros before the first answer."""
        edges, bins = (self.edges.edges, self.edges.bins) if self.trust.trusted else ((), 1)
        return self._tokens.of(bin_index, edges, bins)

    def judges_by(self, queued: QueuedRequest) -> tuple[Request, float | None] | None:
        """Request and score by which the predictions of a request that gets a later one are judged; None: by the later.

        By those of its arrival, because an order by later forecasts picks the requests whose forecasts are too short.
        But a first burst arrives before an answer is known, with forecasts that cannot differ. So a forecast from
        before the first WINDOW_MIN answers says nothing of later ones.
        """
        if self._answers < WINDOW_MIN:
            return None
        return queued.original or (queued.request, queued.score)

    def answered(self, queued: QueuedRequest, output_tokens: float) -> bool:
        """Record the length of an answer. True when the answer changed whether predictions are trusted."""
        self._answers += 1
        if self.seen is not None:
            self.seen.observe(queued.score, output_tokens)
        self._tokens.answered()
        request, score = queued.original or (queued.request, queued.score)
        changed = score is not None and self.trust.observe(request, score, output_tokens)
        if changed:
            self._tokens.forget()
        return changed
