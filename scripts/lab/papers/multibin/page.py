"""The page of Multi-Bin's simulations: a text for each figure, with numbers from the rows."""

from __future__ import annotations

from collections.abc import Sequence

from papers.multibin import example, exponential, figures, gsm8k, table_1, uniform
from papers.multibin.exponential import EQUAL_MASS, LEMMA_A1
from papers.multibin.uniform import LEMMA, THEOREM
from papers.multibin.worlds import BATCHES, LATENCY, THROUGHPUT, least_latency
from papers.page import Reasons, Section, compared_of, rows_of
from papers.rows import HOLDS, Row, Rows

TITLE = "Multi-Bin Batching, reproduced: simulations"

OPENING = """\
"Multi-Bin Batching for Increasing LLM Inference Throughput" (Guldogan, Kunde, Lee, Pedarsani): requests go into k bins
by length. A bin with B requests forms a batch, and a batch takes as long as its longest request. This page has the
paper's simulations; the figures on a real engine (1 (a), 5, 7 and 11) are in
[multibin-engines.md](multibin-engines.md).

How to read the numbers:

* Every simulation runs llmserve's own scheduler under a virtual clock: release `full`, order `fffs`, engines that run a
  batch to its end, fixed edges. As in the paper, edges do not follow the lengths, and predictions are always trusted.
* Numbers are means over runs with different seeds, with Student's 95 % confidence interval in brackets: 10 runs of
  1,000 batches' worth of requests (128,000 requests at B = 128, 200,000 at B = 200), as in the paper, unless a section
  says otherwise.
* Partial batches that remain after the last arrival are dropped: neither served nor counted. The paper does not mention
  them; the section on Theorem 4.2 shows their effect.
* The paper prints its curves without numbers. The curves are compared with the paper's formulas ("computed"; with the
  repairs of misprints that bins/capacity.py lists), or with consequences of its models ("derived"). Statements of the
  text are checked as "holds". "ok" means within 1 % for throughputs and within 2 % for Lemma 5.1."""


REASONS: Reasons = {
    "Fig. 3": {uniform.C_MAX_TEXT: "A misprint: 128 / 10.5 is 12.190."},
    exponential.FIGURE: {
        exponential.AT_LEAST: "With one bin the bound is the exact throughput, so that samples fall on either side: "
        "with `--seed 2` this row agrees.",
        exponential.LOWER: "The paper does not say which edges its figure has. Its statements hold with Lemma A.1's "
        "edges, for which it derives the throughput, and not all of them with equal-mass edges.",
    },
}


def opening(rows: Rows) -> str:
    """Return the opening, with a note if Fig. 6 is missing."""
    if rows.of(gsm8k.FIGURE):
        return OPENING
    return OPENING + "\n\nFig. 6 is left out: it needs the lengths of answers to GSM8K (`--gsm8k FILE`)."


def _deviation(rows: Sequence[Row]) -> float:
    """Return the greatest deviation, per cent."""
    return max((100 * abs(row.deviation) for row in rows if row.deviation is not None), default=0.0)


def the_example(rows: Rows) -> str:
    seconds = [row.measured or 0.0 for row in rows.of(example.FIGURE)]
    return (
        "Requests of 1, 5, 2 and 6 s come at once and run in batches of two. They take "
        f"{seconds[0]:g} s in order of arrival, and {seconds[1]:g} s with a bin up to 3 s and a bin from 4 s on."
    )


def load(rows: Rows) -> str:
    served = [row for row in rows.of("Fig. 3", THROUGHPUT) if row.expected is not None]
    waited = [row for row in rows.of("Fig. 4", LATENCY) if row.expected is not None]
    share = rows.of("Fig. 3", "throughput over c_max")
    reached = "".join(
        f" With {row.case['k']:g} bins it is {100 * (row.measured or 0):.1f} % of c_max, which the text calls "
        "approaching c_max."
        for row in share
    )
    many = [row for row in rows.of(LEMMA) if row.ok is not None]
    return (
        f"B = {uniform.BATCH}, lengths uniform on [{uniform.LOW:g}, {uniform.HIGH:g}] s, one server, Poisson arrivals. "
        f"Above capacity the throughput is within {_deviation(served):.2f} % of Theorem 4.2.{reached} c_max is "
        f"{uniform.C_MAX:.3f} requests a second; the paper prints {uniform.C_MAX_PRINTED:g}. Lemma 5.1 assumes "
        "infinitely many servers. One server is close to this at a low rate: at "
        f"{uniform.RATES_PER_S[0]:g} request a second the latency is within {_deviation(waited):.2f} % of the lemma. "
        f"{uniform.MANY_ENGINES} servers are close at {uniform.MANY_ENGINES_RATE_PER_S:g} requests a second, where "
        f"less than one server is busy: the latency is within {_deviation(many):.2f} % (runs with {uniform.FEW_SEEDS} "
        "seeds). Each curve ends at the first rate above its capacity, where latency grows with the length of the run."
    )


def saturation(rows: Rows) -> str:
    compared = [row for row in rows.of(THEOREM, THROUGHPUT) if row.expected is not None]
    texts = []
    for row in rows.of(THEOREM, THROUGHPUT, **{"last batches": "flushed"}):
        dropped = next((other.measured for other in compared if other.case["k"] == row.case["k"]), None)
        if row.measured and dropped:
            texts.append(f"{100 * (row.measured / dropped - 1):+.2f} % at k = {row.case['k']:g}")
    return (
        "All requests come at once, so that the server never waits. The throughput is within "
        f"{_deviation(compared):.2f} % of Theorem 4.2 for k up to {max(float(row.case['k']) for row in compared):g}. "
        f"If the last partial batches run instead of being dropped, the throughput changes by {' and '.join(texts)}: "
        "each bin then has half a batch, on average, that takes as long as a full batch."
    )


def prediction_errors(rows: Rows) -> str:
    compared = rows.of("Fig. 8", THROUGHPUT)
    worst = rows.of("Fig. 8", "throughput at p_e = 0.5 over that without errors")
    shares = ", ".join(f"{100 * (row.measured or 0):.0f} % with {row.case['k']:g}" for row in worst)
    text = (
        "All requests come at once; a request goes into each neighbouring bin with probability p_e. The expected "
        "throughput follows from the model (a bin mixes its own requests with its neighbours'); the simulated "
        f"throughput is within {_deviation(compared):.2f} % of the expected one. At p_e = 0.5 the throughput is, as a "
        f"share of the throughput without errors, {shares} bins."
    )
    small = rows.of("Fig. 8", THROUGHPUT, k=2, p_e=0.01)
    if not small:
        return text
    one, two = uniform.capacity(1), uniform.capacity(2)
    lost = 100 * (two - (small[0].measured or 0.0)) / (two - one)
    return (
        f"{text} Large batches are sensitive: at p_e = 0.01 most batches of {uniform.BATCH} have a misplaced request, "
        f"and {lost:.0f} % of the gain of two bins is lost. The paper's figure shows this effect; its text does not "
        "mention it."
    )


def exponential_lengths(rows: Rows) -> str:
    figure = exponential.FIGURE
    excess = ", ".join(f"{row.measured:.0f} % (k = {row.case['k']:g})" for row in rows.of(figure, exponential.EXCESS))
    return (
        f"Mean {exponential.MEAN:g} s (μ = 0.1), B = {exponential.BATCH}. The throughput of the busy server is within "
        f"{_deviation(rows.of(figure, exponential.BUSY)):.2f} % of the exact throughput, with Lemma A.1's edges and "
        "with equal-mass edges. The curves are a little lower, because the server first waits for a full batch. The "
        "bound of Corollary A.1.1, with its index repaired, is B μ / L_k. Lemma A.1's edges serve more requests than "
        f"equal-mass edges, by {excess}. {_which_edges(rows)} Equal-mass bins ran with {exponential.FEW_SEEDS} seeds. "
        "The waiting time of Lemma 5.1 holds for any edges, and is compared up to k = "
        f"{exponential.LEMMA_BINS_MAX}: with more bins, the rarest bin fills so slowly that its dropped partial batch "
        "matters."
    )


def _which_edges(rows: Rows) -> str:
    """Tell whether the paper's text identifies the edges of its figure."""
    true, least_s = {}, {}
    for name in (LEMMA_A1, EQUAL_MASS):
        with_edges = rows.of(exponential.FIGURE, edges=name)
        true[name] = all(row.measured for row in with_edges if row.unit == HOLDS and "k" not in row.case)
        least_s[name] = min(row.measured or 0.0 for row in with_edges if row.quantity == LATENCY and row.case["k"] != 1)
    verb = "do not identify" if true[LEMMA_A1] == true[EQUAL_MASS] else "may identify"
    single_s = least_latency(rows, exponential.FIGURE, edges=LEMMA_A1, k=1).measured
    return (
        f"The paper's statements about the figure {verb} its edges. The least mean latency is {single_s:.0f} s "
        f"with one bin, {least_s[LEMMA_A1]:.0f} s with more bins and Lemma A.1's edges, and "
        f"{least_s[EQUAL_MASS]:.0f} s with more bins of equal mass."
    )


def answers(rows: Rows) -> str:
    figure = gsm8k.FIGURE
    lengths = {
        row.quantity.removeprefix("length, "): row.measured or 0.0 for row in rows.of(figure) if "answers" in row.case
    }
    counts = figures.counts_of(rows.of(figure, LATENCY))
    least = {bins: least_latency(rows, figure, k=bins).measured or 0.0 for bins in counts}
    best = min(least, key=lambda bins: least[bins])
    gains = ", ".join(f"{row.measured:.2f} (k = {row.case['k']:g})" for row in rows.of(figure, gsm8k.GAIN))
    return (
        f"B = {gsm8k.BATCH}, {gsm8k.ENGINES} servers, equal-mass edges. Lengths are drawn from "
        f"{rows.of(figure)[0].case['answers']} answers of other models to GSM8K's test questions (mean "
        f"{lengths['mean']:.0f} tokens, median {lengths['median']:.0f}, 95th percentile "
        f"{lengths['95th percentile']:.0f}, longest {lengths['longest']:.0f}). The paper uses answers of Phi-3.5-mini, "
        f"and does not print their lengths. Assumed: a token takes {1e3 * gsm8k.STEP_S:g} ms and nothing else takes "
        f"time, which only scales the axes; a run has {gsm8k.requests_of(BATCHES):,} requests; {gsm8k.SEEDS} seeds. "
        f"The least latency is {least[counts[0]]:.2f} s with one bin, {least[best]:.2f} s with {best:g} bins and "
        f"{least[counts[-1]]:.2f} s with {counts[-1]:g}. If all requests come at once, more bins raise the throughput "
        f"by factors of {gains}. The table compares these factors with the paper's Fig. 7, measured on a GPU."
    )


def predictor(rows: Rows) -> str:
    accuracy = ", ".join(
        f"{row.measured:.1f} % ({row.case['k']:g} bins)" for row in rows.of(table_1.FIGURE, table_1.ACCURACY)
    )
    return (
        f"This project's predictor puts {accuracy} of held-out prompts written by people into the right bin. The "
        "numbers come from the results of [prediction.md](../results/prediction.md), which also has the confusion "
        "matrices of Fig. 10. The paper's predictor was trained on some 120,000 prompts of LMSYS-Chat-1M, so the "
        "numbers are shown side by side, and not compared."
    )


def _answers_table(rows: Rows) -> Sequence[Row]:
    return [row for row in rows.of(gsm8k.FIGURE) if row.ok is not None or row.quantity == gsm8k.GAIN]


def sections(*, with_answers: bool) -> Sequence[Section]:
    """with_answers : Fig. 6 was simulated"""
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
