"""The page of Multi-Bin's simulated figures: what each shows, in numbers taken from the rows."""

from __future__ import annotations

from collections.abc import Sequence

from reproduction.multibin import example, exponential, figures, gsm8k, table_1, uniform
from reproduction.multibin.exponential import EQUAL_MASS, LEMMA_A1
from reproduction.multibin.uniform import LATENCY, LEMMA, THEOREM, THROUGHPUT
from reproduction.multibin.worlds import BATCHES
from reproduction.page import Section, compared_of, rows_of
from reproduction.rows import Row, Rows

TITLE = "Multi-Bin Batching, reproduced: simulations"

OPENING = """\
"Multi-Bin Batching for Increasing LLM Inference Throughput" (Guldogan, Kunde, Lee, Pedarsani): requests go into k bins
by their lengths, a bin that holds B of them forms a batch, and a batch takes as long as its longest request. This page
has the paper's simulations; its figures on a real engine (1 (a), 5, 7 and 11) are in
[multibin-engines.md](multibin-engines.md).

How to read the numbers:

* Every simulation is llmserve's own scheduler under a virtual clock: release `full`, order `fffs`, engines that run a
  batch to its end, edges that stay. As the paper has no such things, edges do not follow the lengths, and predictions
  are not doubted however bad they are.
* Means over runs under different seeds, with Student's 95 % confidence interval in brackets: 10 runs of 1,000 batches'
  worth of requests (128,000 of them at B = 128, 200,000 at B = 200), as in the paper, unless a section says otherwise.
* Partial batches that are left when the last request has come are dropped: neither served nor counted. The paper does
  not say what it does with them; the section on Theorem 4.2 shows how much it matters.
* The paper prints its curves without numbers. They are compared with its formulas ("computed"; the misprints that
  bins/capacity.py names repaired), or with what follows from its models ("derived"); what its text says of them is
  checked as "holds". "ok" is within 1 % for throughputs and 2 % for Lemma 5.1."""


def opening(rows: Rows) -> str:
    """What is left out is said at once."""
    if rows.of(gsm8k.FIGURE):
        return OPENING
    return OPENING + "\n\nFig. 6 is left out: it needs the lengths of answers to GSM8K (`--gsm8k FILE`)."


def _deviation(rows: Sequence[Row]) -> float:
    """The greatest, per cent."""
    return max((100 * abs(row.deviation) for row in rows if row.deviation is not None), default=0.0)


def the_example(rows: Rows) -> str:
    seconds = [row.measured or 0.0 for row in rows.of(example.FIGURE)]
    return (
        "Requests of 1, 5, 2 and 6 s come at once and go in batches of two: "
        f"{seconds[0]:g} s in order of arrival, {seconds[1]:g} s with one bin for up to 3 s and one from 4 s on."
    )


def load(rows: Rows) -> str:
    served = [row for row in rows.of("Fig. 3", THROUGHPUT) if row.expected is not None]
    waited = [row for row in rows.of("Fig. 4", LATENCY) if row.expected is not None]
    share = rows.of("Fig. 3", "throughput over c_max")
    reached = "".join(
        f" With {row.case['k']:g} bins it is {100 * (row.measured or 0):.1f} % of c_max, which the text calls "
        "approaching it."
        for row in share
    )
    many = [row for row in rows.of(LEMMA) if row.ok is not None]
    return (
        f"B = {uniform.BATCH}, lengths uniform on [{uniform.LOW:g}, {uniform.HIGH:g}] s, one server, Poisson arrivals. "
        f"Above capacity the throughput is within {_deviation(served):.2f} % of Theorem 4.2.{reached} c_max is "
        f"{uniform.C_MAX:.3f} requests a second; the paper prints {uniform.C_MAX_PRINTED:g}. Lemma 5.1 is about "
        f"infinitely many servers. One server comes near at a low rate: at {uniform.RATES_PER_S[0]:g} request a second "
        f"the latency is within {_deviation(waited):.2f} % of the lemma. {uniform.MANY_ENGINES} servers come near at "
        f"{uniform.MANY_ENGINES_RATE_PER_S:g} a second, where less than one of them is busy: within "
        f"{_deviation(many):.2f} % (runs under {uniform.FEW_SEEDS} seeds). Each curve ends at the first rate above its "
        "capacity, where latency is a matter of how long the run is."
    )


def saturation(rows: Rows) -> str:
    compared = [row for row in rows.of(THEOREM, THROUGHPUT) if row.expected is not None]
    texts = []
    for row in rows.of(THEOREM, THROUGHPUT, **{"last batches": "flushed"}):
        dropped = next((each.measured for each in compared if each.case["k"] == row.case["k"]), None)
        if row.measured and dropped:
            texts.append(f"{100 * (row.measured / dropped - 1):+.2f} % at k = {row.case['k']:g}")
    return (
        "All requests come at once, so that the server never waits. The throughput is within "
        f"{_deviation(compared):.2f} % of Theorem 4.2 for k up to {max(float(row.case['k']) for row in compared):g}. "
        f"With the last partial batches run instead of dropped it would be {' and '.join(texts)}: half a batch a bin, "
        "on average, that takes as long as a full one."
    )


def prediction_errors(rows: Rows) -> str:
    compared = rows.of("Fig. 8", THROUGHPUT)
    kept = rows.of("Fig. 8", "throughput at p_e = 0.5 over that without errors")
    shares = ", ".join(f"{100 * (row.measured or 0):.0f} % with {row.case['k']:g}" for row in kept)
    text = (
        "All at once; a request goes into each neighbouring bin with probability p_e. The expected throughput follows "
        "from the model (a bin mixes its own requests with its neighbours'), and the simulated one is within "
        f"{_deviation(compared):.2f} % of it. At p_e = 0.5 there is left of the throughput without errors: {shares} "
        "bins."
    )
    small = rows.of("Fig. 8", THROUGHPUT, k=2, p_e=0.01)
    if not small:
        return text
    one, two = uniform.capacity(1), uniform.capacity(2)
    lost = 100 * (two - (small[0].measured or 0.0)) / (two - one)
    return (
        f"{text} Large batches are sensitive: of {uniform.BATCH} requests one is misplaced at p_e = 0.01 more often "
        f"than not, and {lost:.0f} % of what two bins gain is gone. The paper's figure shows it, its text does not say "
        "it."
    )


def exponential_lengths(rows: Rows) -> str:
    figure = exponential.FIGURE
    excess = ", ".join(f"{row.measured:.0f} % (k = {row.case['k']:g})" for row in rows.of(figure, exponential.EXCESS))
    return (
        f"Mean {exponential.MEAN:g} s (μ = 0.1), B = {exponential.BATCH}. While the server is busy its throughput is "
        f"within {_deviation(rows.of(figure, exponential.BUSY)):.2f} % of what Lemma A.1's edges, or those of equal "
        "mass, give exactly; the curves are a little lower, because it first waits for a full batch. The bound of "
        f"Corollary A.1.1, its index repaired, is B μ / L_k. Lemma A.1's edges serve more than equal mass by {excess}. "
        f"{_which_edges(rows)} Equal-mass bins were run under {exponential.FEW_SEEDS} seeds. Lemma 5.1's wait holds "
        f"for any edges, and is compared up to k = {exponential.LEMMA_BINS_MAX}: of more bins the rarest fills so "
        "seldom that the partial batch which is dropped weighs."
    )


def _which_edges(rows: Rows) -> str:
    """Whether the paper's text about its figure tells with which edges it was made."""
    held, least_s = {}, {}
    for name in (LEMMA_A1, EQUAL_MASS):
        found = rows.of(exponential.FIGURE, edges=name)
        held[name] = all(row.measured for row in found if row.unit == "holds: 1" and "k" not in row.case)
        least_s[name] = min(row.measured or 0.0 for row in found if row.quantity == LATENCY and row.case["k"] != 1)
    told = "does not tell" if held[LEMMA_A1] == held[EQUAL_MASS] else "may tell"
    one_s = exponential.least_latency(rows, LEMMA_A1, 1).measured
    return (
        f"What the paper's text says of the figure {told} which of the two it was made with. The least mean latency is "
        f"{one_s:.0f} s with one bin, {least_s[LEMMA_A1]:.0f} s with more at Lemma A.1's edges and "
        f"{least_s[EQUAL_MASS]:.0f} s at those of equal mass."
    )


def answers(rows: Rows) -> str:
    figure = gsm8k.FIGURE
    lengths = {
        row.quantity.removeprefix("length, "): row.measured or 0.0 for row in rows.of(figure) if "answers" in row.case
    }
    counts = figures.counts_of(rows.of(figure, LATENCY))
    least = {bins: gsm8k.least_latency(rows, int(bins)).measured or 0.0 for bins in counts}
    best = min(least, key=lambda bins: least[bins])
    gains = ", ".join(f"{row.measured:.2f} (k = {row.case['k']:g})" for row in rows.of(figure, gsm8k.GAIN))
    return (
        f"B = {gsm8k.BATCH}, {gsm8k.ENGINES} servers, lengths drawn from {rows.of(figure)[0].case['answers']} answers "
        f"of other models to GSM8K's test questions (mean {lengths['mean']:.0f} tokens, median "
        f"{lengths['median']:.0f}, 95th percentile {lengths['95th percentile']:.0f}, longest "
        f"{lengths['longest']:.0f}); the paper has those of Phi-3.5-mini, whose lengths it does not print. Equal-mass "
        f"edges. A token takes {1e3 * gsm8k.STEP_S:g} ms and nothing else takes time: that is assumed, and scales the "
        f"axes only. So are {gsm8k.requests_of(BATCHES):,} requests a run, under {gsm8k.SEEDS} seeds. The least "
        f"latency is {least[counts[0]]:.2f} s with one bin, {least[best]:.2f} s with {best:g} and "
        f"{least[counts[-1]]:.2f} s with {counts[-1]:g}. All at once, more bins serve more by factors of {gains}; "
        "beside them stand those that the paper measured on a GPU for Fig. 7."
    )


def predictor(rows: Rows) -> str:
    accuracy = ", ".join(
        f"{row.measured:.1f} % ({row.case['k']:g} bins)" for row in rows.of(table_1.FIGURE, table_1.ACCURACY)
    )
    return (
        f"The predictor of this project puts {accuracy} into the right bin, on held-out prompts of people: measured "
        "for [prediction.md](../results/prediction.md), where the confusion matrices of Fig. 10 are too, and read "
        "from its results. "
        "The paper's predictor was trained on some 120,000 prompts of LMSYS-Chat-1M: the numbers stand beside "
        "each other, and are not compared."
    )


def _answers_table(rows: Rows) -> Sequence[Row]:
    return [row for row in rows.of(gsm8k.FIGURE) if row.ok is not None or row.quantity == gsm8k.GAIN]


def sections(*, with_answers: bool) -> Sequence[Section]:
    """with_answers : whether Fig. 6 was simulated."""
    figure_6 = Section("Fig. 6: answers to GSM8K", answers, _answers_table, ("fig6-answers", figures.answers))
    return (
        Section("Fig. 1 (b): the example", the_example, rows_of(example.FIGURE)),
        Section(
            "Fig. 3 and 4: throughput and latency against the arrival rate",
            load,
            compared_of("Fig. 3", "Fig. 4", LEMMA),
            ("fig3-fig4-uniform", figures.uniform_lengths),
        ),
        Section("Theorem 4.2: at saturation", saturation, rows_of(THEOREM)),
        *((figure_6,) if with_answers else ()),
        Section(
            "Fig. 8: errors of prediction", prediction_errors, compared_of("Fig. 8"), ("fig8-errors", figures.errors)
        ),
        Section(
            "Fig. 9: exponential lengths",
            exponential_lengths,
            compared_of(exponential.FIGURE),
            ("fig9-exponential", figures.exponential_lengths),
        ),
        Section("Table 1 and Fig. 10: the predictor", predictor, rows_of(table_1.FIGURE)),
    )
