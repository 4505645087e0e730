"""The page of the SMDP papers: a text for each table and figure, with numbers from the rows."""

from __future__ import annotations

from collections.abc import Sequence

from papers.page import Reasons, Section, rows_of
from papers.rows import Row, Rows
from papers.smdp import figures
from papers.smdp.policies import CASE_LOADS
from papers.smdp.scenarios import DISTRIBUTIONS
from papers.smdp.tradeoffs import CLOSE, GREATEST
from papers.smdp.truncation import ROUNDING_MS, SETTLED

TITLE = "SMDP-based dynamic batching, reproduced"

OPENING = """\
Two papers by Xu, Zhou and Niu: "SMDP-Based Dynamic Batching for Improving Responsiveness and Energy Efficiency of Batch
Services" (SMDP-J), and the conference version (SMDP-C, ICC 2023). A batch of b images, up to 32, takes
l(b) = 0.3051 b + 1.0524 ms and ζ(b) = 19.899 b + 19.603 mJ on a Tesla P4 (GoogLeNet). The load ρ is the arrival rate
over the throughput of full batches. A policy minimises W + w2 P: the mean response time W in ms, plus w2 times the mean
power P in watts.

How to read the numbers:

* Means are exact: bins/smdp.py solves and evaluates the infinite queue. Percentiles are sampled, with 95 % confidence
  intervals from the means of 20 batches of successive responses.
* The papers computed with more digits of l(b) than they print. This page uses 0.305058 b + 1.05244: the mean over
  b = 1 .. 8 and half of l(8) are then the 2.4252 and 1.7465 ms of their Cases 2 and 3. SMDP-C's figures use SMDP-C's
  printed coefficients.
* "ok" means: within 0.01 % for averages; equal for whole numbers (iterations: within one); within rounding for ratios;
  for percentiles within 0.2 % beyond the difference of two such samples; within a fifth where the text says "around".
  The papers print no numbers for most curves; statements of their text about the curves are checked as "holds"."""


REASONS: Reasons = {
    "Fig. 5": {
        GREATEST: "The printed weight and the measured one select policies of the same W. The printed one is the "
        "greatest of the weights that the paper tries, which it does not list.",
    },
    "Fig. 7": {
        CLOSE: 'The text says "very close", without a bound; a tenth is this page\'s. The two latencies come within a '
        "tenth at a load of 0.8.",
    },
    "Fig. 10": {
        SETTLED: "The text lists 35, 50 and 70 for c_o = 10,000, 1,000 and 100. In the opposite order, which is that "
        "of the paper's own Table II, all three would agree.",
    },
}


def opening(rows: Rows) -> str:
    return OPENING


def table_1(rows: Rows) -> str:
    latest = "95th percentile of the response time"
    static, waiting = (rows.number("Table I", latest, policy=name) for name in ("static 8", "smdp w2=1.6"))
    return (
        f"At ρ = 0.7, the SMDP policy of w2 = 1.6 has a 95th percentile of {waiting:.2f} ms, at less power than static "
        f"batches of 8, which have {static:.2f} ms. The paper's powers and means are simulated; the measured ones are "
        "exact, so that last digits differ."
    )


def table_2(rows: Rows) -> str:
    text = (
        "The least s_max at which the overflow state adds less than δ = 0.001 ms to the average cost (ρ = 0.9, w2 = 1, "
        "ε = 0.01, at most 10,000 iterations). The measured number counts the steps of value iteration; the paper's "
        "number is one more, because it counts value functions from number zero on. "
    )
    uncapped = {row.case["c_o"]: row.measured for row in rows.of("Table II", "least s_max, without the cap")}
    if not uncapped:
        return text
    delta = {row.case["c_o"]: row for row in rows.of("Table II", "Delta")}
    return text + (
        f"For small abstract costs the cap on iterations determines s_max: without the cap, {uncapped[10.0]:g} "
        f"(c_o = 10) and {uncapped[0.0]:g} (c_o = 0) are enough. "
        f"Δ is {delta[10.0].measured:.3g} ms for c_o = 10, {'as printed' if delta[10.0].ok else 'not as printed'}, and "
        f"{delta[0.0].measured:.3g} ms for c_o = 0 ({delta[0.0].note}), which is too small to compare."
    )


def table_3(rows: Rows) -> str:
    g = rows.number("Table III", "average cost g", policy="greedy")
    return (
        f"ρ = 0.5, w2 = 1. The paper's approximate value and policy iterations (AVI, API) stop at {g:.2f} ms, the "
        "greedy policy's average cost; they are not implemented here. The paper's run times are from a MacBook Air, "
        "and are not compared."
    )


def figure_3(rows: Rows) -> str:
    compared = [row for row in rows.of("Fig. 3", "control limit Q") if row.kind == "computed" and row.ok is not None]
    return (
        "The number of requests served in each state, with batches of at most 8 and service times that are independent "
        "of the batch size. A box marks the control limit. In Cases 2 and 3 (exponential) the limit equals that of "
        f"Proposition 4, evaluated here, in {sum(bool(row.ok) for row in compared)} of {len(compared)} rows of the "
        "charts. Assumed, because the text does not define it: Case 1 is deterministic with Case 2's mean of "
        "2.4252 ms, the mean of the basic scenario's times over b = 1 .. 8."
    )


def figure_11(rows: Rows) -> str:
    statements = [row for row in rows.of("Fig. 11") if row.ok is not None]
    return (
        "Cases that break an assumption; deviations from a control limit are red. Case 4 is Case 1 with batches of at "
        "least 5. Assumed: Case 5 has Fig. 8's energy, 105 log b + 60 mJ; Case 6 has the basic scenario's times; Case "
        f"7 has both, and batches of at least 5. Then {sum(bool(row.ok) for row in statements)} of {len(statements)} "
        "statements of the text about Cases 4 to 7 hold, among them the three w2 at which Case 4 serves fewer than 8 "
        "requests although more wait, and Case 5's second threshold."
    )


def figure_4(rows: Rows) -> str:
    far = [rows.number("Fig. 4", "static 32 above SMDP", rho=load, w2=15.0) for load in (0.1, 0.3, 0.7)]
    near = [rows.number("Fig. 4", "greedy above SMDP", rho=load, w2=0.0) for load in (0.1, 0.3, 0.7)]
    return (
        f"At w2 = 0 (power has no price) greedy is within {max(near):.2g} % of the optimum. At w2 = 15 static batches "
        f"of 32 are {far[0]:.0f}, {far[1]:.1f} and {far[2]:.1g} % above the optimum at ρ = 0.1, 0.3 and 0.7: as in the "
        "paper, 15 is not large enough for the lowest load."
    )


def figure_5(rows: Rows) -> str:
    case: dict[str, float | str] = {"rho": 0.3, "below": "5 ms"}
    response = rows.number("Fig. 5", "W of the least power", **case)
    least, most = (rows.number("Fig. 5", name, **case) for name in ("least w2 with this W", GREATEST))
    unstable = rows.number("Fig. 5", "unstable from rho", policy="static 8")
    return (
        "Latency against power and against requests per joule. W is a step function of w2: at ρ = 0.3 the policy of "
        f"least power with W below 5 ms has W = {response:.2f} ms for every w2 from {least:.3f} to {most:.3f}. The "
        "paper names 1.3 as the largest w2, which is in this range but not its end. Static batches of 8 are unstable "
        f"from ρ = {unstable:.3f} on; the paper, which tests multiples of 0.1, prints 0.8."
    )


def figure_6(rows: Rows) -> str:
    best = next(row for row in rows.of("Fig. 6", "least power with 95 % within 10 ms"))
    crossing = rows.only("Fig. 6", "the tail is lighter than static 8's", w2=1.6)
    return (
        "Response times at ρ = 0.7; a dotted line in (b) and (c) marks the objective. Of the measured weights, "
        f"{str(best.case['policy']).split('=')[1]} is the largest with 95 % of the responses within 10 ms, at "
        f"{best.measured:.2f} W. Its tail is lighter than the tail of static batches of 8 {crossing.note}."
    )


def figure_7(rows: Rows) -> str:
    grown = {name: rows.number("Fig. 7", "W at rho 0.9 over W at 0.1", times=name) for name in ("constant", "basic")}
    ratio = {
        load: 100 * rows.number("Fig. 7", "W of static 32 over W of greedy", rho=load) - 100 for load in (0.6, 0.9)
    }
    return (
        "Every batch takes 6.0859 ms. From ρ = 0.1 to 0.9 greedy's latency grows by a factor of "
        f"{grown['constant']:.2f}, and by {grown['basic']:.1f} in the basic scenario. The paper calls the latency of "
        f"full batches very close to greedy's from ρ = 0.6 on; here it is {ratio[0.6]:.0f} % above greedy's at 0.6, "
        f"and {ratio[0.9]:.0f} % at 0.9."
    )


def figure_8(rows: Rows) -> str:
    falls = rows.only("Fig. 8", "greedy draws less at rho 0.8 than at 0.6", energy="logarithmic")
    gain = {
        name: rows.number("Fig. 8", "requests per joule at b = 32 over b = 8", energy=name)
        for name in ("logarithmic", "basic")
    }
    return (
        "A batch takes 105 log b + 60 mJ (natural logarithm). Batches of 32 serve "
        f"{gain['logarithmic']:.2f} times as many requests per joule as batches of 8, and {gain['basic']:.2f} times as "
        f"many in the basic scenario. Greedy draws less power at ρ = 0.8 than at 0.6 ({falls.note}), as in the text."
    )


def figure_9(rows: Rows) -> str:
    slower = {
        load: rows.number("Fig. 9", "W, hyperexponential over deterministic", rho=load, policy="greedy")
        for load in (0.3, 0.7)
    }
    return (
        "Four distributions of the service time with the same means. The paper's coefficients of variation (0, 0.5, 1, "
        "2) are squared coefficients. With greedy batching, the mean response time with hyperexponential times is "
        f"{slower[0.3]:.1f} times that with fixed times at ρ = 0.3, and {slower[0.7]:.1f} times at 0.7."
    )


def single_threshold(rows: Rows) -> str:
    gap = [
        rows.number("Thresholds", "best single threshold above the optimum, at most", service=name)
        for name in DISTRIBUTIONS
    ]
    return (
        "Not in the papers: the greatest excess cost of the best single threshold (wait for Q, then serve all that "
        "fit) over the optimum, for ρ = 0.1 .. 0.9 and w2 = 0 .. 15. With fixed times the threshold is practically "
        f"optimal ({gap[0]:.1g} %). With exponential and hyperexponential times it costs up to {gap[2]:.1f} and "
        f"{gap[3]:.1f} % more, because it serves all waiting requests where the optimum leaves some for the next batch."
    )


def figure_10(rows: Rows) -> str:
    settled = {row.case["c_o"]: row.measured for row in rows.of("Fig. 10", SETTLED)}
    shares = [row.curve for row in rows.of("Fig. 10", "Delta") if row.curve is not None]
    last = [share.values[-1] for share in shares]
    factor = (shares[0].values[-1] / shares[0].values[-2]) ** (1 / (shares[0].at[-1] - shares[0].at[-2]))
    return (
        "The best policy of each truncated model (ρ = 0.9, w2 = 1), from policy iteration, which needs no cap. Large "
        "abstract costs overestimate g. Small abstract costs underestimate g until waiting no longer pays in the "
        f"overflow state, where Δ drops. g is within 1 % of its limit from s_max = {settled[10_000.0]:g}, "
        f"{settled[1_000.0]:g} and {settled[100.0]:g} on for c_o = 10,000, 1,000 and 100; the text lists 35, 50 and "
        f"70, in the opposite order to its own Table II. Δ falls by {100 - 100 * factor:.0f} % with each state, to "
        f"between {min(last):.0e} and {max(last):.0e} ms at s_max = {shares[0].at[-1]:g}. The paper's Δ almost "
        f"converges beyond 200, at no more than {ROUNDING_MS:g} ms, which is a rounding error: the paper subtracts "
        "the other probabilities from 1, whereas this reproduction sums the small probability."
    )


def conference_policies(rows: Rows) -> str:
    limits = [rows.number("SMDP-C Fig. 4", "least state served", w2=0.0, rho=load) for load in CASE_LOADS]
    return (
        "Batches up to 32. All policies wait below one limit and serve above it; red numbers mark states in which "
        f"fewer requests are served than wait and fit. At w2 = 0 the limits are {min(limits):g} to {max(limits):g}; at "
        "w2 = 500 all limits are 32."
    )


def conference_costs(rows: Rows) -> str:
    gap = [rows.number("SMDP-C Fig. 5", "best of the others above SMDP, at most", rho=load) for load in (0.1, 0.3, 0.7)]
    return (
        "Costs with the coefficients of the conference version, for w2 up to 20. At the worst w2, the best benchmark "
        f"costs {gap[0]:.0f}, {gap[1]:.0f} and {gap[2]:.1f} % more than the SMDP policy at ρ = 0.1, 0.3 and 0.7. The "
        "loads are SMDP-J's: SMDP-C's text names only 0.1."
    )


def _limits_table(rows: Rows) -> Sequence[Row]:
    """Select the statements, and the control limits that differ from Proposition 4."""
    numbers = [row for row in rows.of("Fig. 3") if row.curve is None]
    return [row for row in numbers if row.quantity != "control limit Q" or row.ok is False]


SECTIONS = (
    Section("Table I: percentiles", table_1, rows_of("Table I")),
    Section("Table II: the least s_max", table_2, rows_of("Table II")),
    Section("Table III: other algorithms", table_3, rows_of("Table III")),
    Section("Fig. 3: policies", figure_3, _limits_table, ("fig3-policies", figures.figure_3)),
    Section("Fig. 4: average cost", figure_4, rows_of("Fig. 4"), ("fig4-costs", figures.figure_4)),
    Section("Fig. 5: latency and energy", figure_5, rows_of("Fig. 5"), ("fig5-tradeoffs", figures.tradeoffs)),
    Section("Fig. 6: percentiles and objectives", figure_6, rows_of("Fig. 6"), ("fig6-latencies", figures.latencies)),
    Section(
        "Fig. 7: times that do not depend on the size",
        figure_7,
        rows_of("Fig. 7"),
        ("fig7-constant", figures.constant_times),
    ),
    Section(
        "Fig. 8: energy that grows with the logarithm",
        figure_8,
        rows_of("Fig. 8"),
        ("fig8-logarithmic", figures.logarithmic_energies),
    ),
    Section(
        "Fig. 9: distributions of the service time",
        figure_9,
        rows_of("Fig. 9"),
        ("fig9-distributions", figures.distributions),
    ),
    Section("Single thresholds", single_threshold, rows_of("Thresholds")),
    Section("Fig. 10: truncation", figure_10, rows_of("Fig. 10"), ("fig10-truncation", figures.truncations)),
    Section(
        "Fig. 11: policies beyond control limits",
        figure_11,
        rows_of("Fig. 11"),
        ("fig11-policies", figures.figure_11),
    ),
    Section(
        "SMDP-C, Fig. 4: policies",
        conference_policies,
        rows_of("SMDP-C Fig. 4"),
        ("conference-fig4-policies", figures.conference_policies),
    ),
    Section(
        "SMDP-C, Fig. 5: average cost",
        conference_costs,
        rows_of("SMDP-C Fig. 5"),
        ("conference-fig5-costs", figures.conference_costs),
    ),
)
