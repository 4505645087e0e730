"""HERD: which models share which GPUs, so that all streams can bear as large bursts as possible (Shepherd, Section 4).

    i          a model with all its streams (a "model-stream"): the streams of a model are added up first
    T          goodput of one GPU, requests/s: measured, or profiled from alpha, beta and the SLO   `goodputs_per_s`
    n_i        GPUs for the average load of model i: the sum over its streams of rate / T           `needs_of`
    j          a group of GPUs, each of which holds every model of the group
    size_j     number of GPUs of group j
    x_ij       1 if model i is in group j, otherwise 0
    bt(i)      sum_j size_j x_ij / n_i: largest load of model i over its average load               `burst_tolerance`

The programme: maximise the least bt(i), where (a) the sizes add up to at most the cluster's GPUs, (b) a size is at most
`group_gpus_max`, (c) the models of a group fit together into one GPU, (d) each model is in one group, of at most
`groups`, and (e) a group has models of one affinity set. The paper prints no other constraint. So an optimum may load a
group beyond its capacity, because bt(i) counts a group's GPUs as if model i were alone. By default the load is limited
too: sum_i n_i x_ij <= size_j. `as_printed` drops that limit.

The modules, from the problem to the plan:

assignment : which worker serves which group of the plan
group_plan : the plan as the server of one group and as a gateway follow it
instance   : the problem: streams, models, GPUs, limits; its file; the same problem at other rates
milp       : decides whether a t is feasible, by scipy's HiGHS
packing    : finds greedily that a t is feasible, for most feasible t; levels the loads
part       : the plan that a server follows
planning   : `plan` and `replan`: all steps, and the plan as a file that the server reads
relaxation : proves that a t is too large
repair     : keeps a previous grouping where it is possible, of any number of models
search     : the largest t that every bt(i) can reach, by bisection with the next three; why there is no plan
task       : the problem as numbers: n_i of each stream and model; which models may share a GPU
"""

from llmserve.errors import NoPlan
from llmserve.planning.instance import Instance, Model, Rates, Stream, StreamColumns, Streams, streams_of, with_rates
from llmserve.planning.planning import (
    STREAMS_LISTED_MAX,
    TIME_LIMIT_S,
    HerdGroup,
    Plan,
    PlannedModel,
    PlannedStream,
    plan,
    replan,
)
from llmserve.planning.search import OnFound
from llmserve.planning.task import affinity_sets, divergence, goodputs_per_s, needs_of

__all__ = [
    "STREAMS_LISTED_MAX",
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
