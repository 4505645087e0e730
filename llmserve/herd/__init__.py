"""HERD: which models share which GPUs, so that all streams can bear as large bursts as possible (Shepherd, Section 4).

    i          a model with all its streams (a "model-stream"): streams of one model are added up first
    T          goodput of one GPU, requests/s: measured, or profiled from alpha, beta and the SLO   `goodputs_per_s`
    n_i        GPUs that it needs for its average load: the sum over its streams of rate / T        `needs_of`
    j          a group of GPUs, each of which holds every model of the group
    size_j     its GPUs, a whole number
    x_ij       whether model i is in group j
    bt(i)      sum_j size_j x_ij / n_i: the load that it can come to, over its average load         `burst_tolerance`

The programme: maximise the least bt(i), where (a) the sizes add up to at most the cluster's GPUs, (b) a size is at most
`group_gpus_max`, (c) the models of a group fit together into one GPU, (d) each model is in one group, of at most
`groups`, and (e) a group has models of one affinity set. As printed that is all, and an optimum may load a group to
more than it can serve, for a bt(i) counts a group's GPUs as if no other model were there. By default the load counts
too: sum_i n_i x_ij <= size_j.

From the question to the answer:

    instance            the question: streams, models, GPUs, limits; its file; the same at other rates
    task                the same as numbers: n_i of each stream and model; which models may share a GPU
    search              the largest t that every bt(i) can reach, by bisection with the next three; why there is none
    relaxation          tells of a t that it is too large
    packing             tells of a t that it is small enough, greedily, so not of every one; makes loads even
    milp                decides on a t, by scipy's HiGHS
    planning            `plan` and `replan`: all of it in turn; few models in another group than in a previous plan; the
                        answer: groups, models, streams, as a file that the server reads
"""

from llmserve.errors import NoPlan
from llmserve.herd.instance import Instance, Model, Rates, Stream, StreamColumns, Streams, streams_of, with_rates
from llmserve.herd.planning import (
    STREAMS_TOLD_MAX,
    TIME_LIMIT_S,
    HerdGroup,
    Plan,
    PlannedModel,
    PlannedStream,
    plan,
    replan,
)
from llmserve.herd.search import OnFound
from llmserve.herd.task import affinity_sets, divergence, goodputs_per_s, needs_of

__all__ = [
    "STREAMS_TOLD_MAX",
    "TIME_LIMIT_S",
    "HerdGroup",
    "Instance",
    "Model",
    "NoPlan",
    "OnFound",
    "Plan",
    "PlannedModel",
    "PlannedStream",
    "Rates",
    "Stream",
    "StreamColumns",
    "Streams",
    "affinity_sets",
    "divergence",
    "goodputs_per_s",
    "needs_of",
    "plan",
    "replan",
    "streams_of",
    "with_rates",
]
