"""The data of the search: an instance as numbers, and a grouping of its models.

    alpha, beta    a batch of b takes alpha b + beta, ms
    T              goodput of one GPU, requests/s: measured, or b / (alpha b + beta) of the largest batch b within the
                   SLO                                                                              `goodputs_per_s`
    n              GPUs for a stream's average load: its rate / T, or as set                        `needs_of`
    n_i            GPUs for the average load of model i: the sum over its streams                   `Task.need`
    t              a burst tolerance for every model
    ceil(t n_i)    least number of GPUs of a group with model i                                     `Task.size_min`
    A(m_i, m_j)    1 for models with the same alpha and beta; FLEX's guarantee for a group's goodput is worse in
                   proportion to the largest A of two of its models: the paper's K                  `divergence`

Models whose batch times are similar may share GPUs: the models of one affinity set (`affinity_sets`).

Numbers that differ by no more than the error of floating-point arithmetic count as equal.

Source: Shepherd, Section 4 (needs, affinity sets), Table 4 (alpha and beta) and Section 5.2 (A, equation 4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmserve.errors import ConfigError
from llmserve.planning.instance import ROUNDING, SLACK, Bools, Floats, Instance, Ints, Model, Streams

MS_PER_S = 1e3
PART = 1 << 16  # streams computed at once, so that intermediate arrays stay in the cache


# ---- GPUs for the average load ------------------------------------------------------------------------------------


def needs_of(instance: Instance, streams: Streams) -> Floats:
    """(streams,) n, GPUs for the average load of each stream.

    Raises ConfigError on a stream with too few or too many fields, or with an SLO that no batch meets.
    """
    direct = ~np.isnan(streams.gpus_needed)
    rated = ~np.isnan(streams.rate_per_s)
    measured = np.array([model.goodput_per_s is not None for model in instance.models], dtype=bool)
    without_slo = np.isnan(streams.slo_s) & ~measured[streams.model]
    for wrong, message in (
        (direct & rated, "gpus_needed cannot be given with rate_per_s"),
        (~direct & ~rated, "either rate_per_s or gpus_needed is needed"),
        (rated & without_slo, "rate_per_s needs slo_s, because its model has no goodput_per_s"),
    ):
        if wrong.any():
            raise ConfigError(f"stream {streams.names[int(np.argmax(wrong))]!r}: {message}")
    with np.errstate(invalid="ignore"):
        return np.where(direct, streams.gpus_needed, streams.rate_per_s / goodputs_per_s(instance, streams))


def goodputs_per_s(instance: Instance, streams: Streams) -> Floats:
    """(streams,) T: most requests/s that one GPU ends in time, for this stream alone; NaN: not known.

    Measured for the model, or b / batch_time(b) of the largest batch b that ends within the SLO: the throughput of a
    batch grows with its size.

    Nexus requires batch_time(b) <= SLO / 2, because a request that has just missed a batch waits for that batch and
    then for its own batch. Here batch_time(b) <= SLO is enough: T is the paper's maximum goodput, the requests that end
    in time under any offered load, and FLEX chooses waiting requests that still have batch_time(b) left. With this
    limit every stream has a goodput if one request alone can meet the SLO.

    Raises ConfigError on an SLO that a batch of one request exceeds.
    """
    of_models = np.array(
        [
            (model.alpha_ms / MS_PER_S, model.beta_ms / MS_PER_S, model.batch_size_max, model.goodput_per_s or np.nan)
            for model in instance.models
        ]
    ).reshape(-1, 4).T  # fmt: skip
    goodputs = np.empty(streams.model.size)
    for start in range(0, goodputs.size, PART):
        part = slice(start, start + PART)
        alpha_s, beta_s, size_max, measured = of_models[:, streams.model[part]]
        fits = np.floor((streams.slo_s[part] - beta_s) / alpha_s * (1 + ROUNDING))
        if (hopeless := fits < 1).any():
            at = int(np.argmax(hopeless))
            model = instance.models[streams.model[start + at]].name
            raise ConfigError(
                f"stream {streams.names[start + at]!r}: no batch of model {model!r} meets its SLO of "
                f"{streams.slo_s[start + at]:g} s; one request takes {alpha_s[at] + beta_s[at]:g} s"
            )
        size = np.minimum(fits, size_max)
        goodputs[part] = np.where(np.isnan(measured), size / (alpha_s * size + beta_s), measured)
    return goodputs


def by_model(instance: Instance, streams: Streams, needs: Floats) -> Floats:
    """(models,) n_i, the sum of n over the streams of a model."""
    return np.bincount(streams.model, needs, len(instance.models)).astype(float)


# ---- which models may share GPUs ----------------------------------------------------------------------------------


def affinity_sets(models: Sequence[Model], affinity_max: float | None) -> Ints:
    """(models,) number of each model's set. Two models of a set diverge by at most affinity_max.

    Greedy: in the order of beta / alpha, then alpha, a model goes into the first set whose members all suit it, or
    begins a new set. The fewest sets are a clique cover, which is hard to find; more sets leave plans fewer choices.
    """
    kinds = np.zeros(len(models), dtype=np.int64)
    if affinity_max is None or not models:
        return kinds
    alpha_ms = np.array([model.alpha_ms for model in models])
    beta_ms = np.array([model.beta_ms for model in models])
    suits: list[Bools] = []  # by set: models that suit all members of the set
    for model in np.lexsort((alpha_ms, beta_ms / alpha_ms)).tolist():
        near = divergence(alpha_ms, beta_ms, model) <= affinity_max * (1 + ROUNDING)
        kind = next((number for number, all_suit in enumerate(suits) if all_suit[model]), None)
        if kind is None:
            kind = len(suits)
            suits.append(near)
        else:
            suits[kind] &= near
        kinds[model] = kind
    return kinds


def divergence(alpha_ms: Floats, beta_ms: Floats, of: int) -> Floats:
    """(models,) A(m_i, m_j) of Section 5.2, the larger of both directions, of model `of` with each; 1 if alike."""

    def directed(alpha_i: Floats, beta_i: Floats, alpha_j: Floats, beta_j: Floats) -> Floats:
        spare = alpha_j + beta_j - beta_i
        most = (alpha_i + beta_i) / alpha_j
        later = np.maximum(alpha_i / np.where(spare > 0, spare, 1.0), alpha_i / alpha_j)
        return np.where(spare > 0, np.minimum(most, later), most)

    model = alpha_ms[of : of + 1], beta_ms[of : of + 1]
    return np.maximum(directed(*model, alpha_ms, beta_ms), directed(alpha_ms, beta_ms, *model))


# ---- the task, and a grouping -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Task:
    """An instance without names. Models are in the order of falling need.

    need       (models,) n_i
    load       (models,) load on the GPUs of the group: n_i; 0 as printed
    memory     (models,) share of a GPU's memory
    kind       (models,) number of the affinity set
    """

    need: Floats
    load: Floats
    memory: Floats
    kind: Ints
    gpus: int
    size_max: int
    groups: int

    def size_min(self, tolerance: float) -> Ints:
        """(models,) least number of GPUs of a group with the model, for this burst tolerance."""
        gpus = np.ceil(tolerance * self.need * (1 - ROUNDING) - ROUNDING)
        return np.maximum(gpus, 1.0).astype(np.int64)

    def least_sizes(self, group: Ints, tolerance: float, groups: int) -> Ints:
        """(groups,) least sizes of these groups, 0 for an empty group. group : (models,) group of each model."""
        sizes: Ints = np.ceil(np.bincount(group, self.load, groups) - SLACK).astype(np.int64)
        np.maximum.at(sizes, group, self.size_min(tolerance))
        return sizes

    def sizes(self, group: Ints, tolerance: float, groups: int) -> Ints | None:
        """`least_sizes`, or None if these groups exceed a limit."""
        memory = np.bincount(group, self.memory, groups)
        sizes = self.least_sizes(group, tolerance, groups)
        valid = memory.max() <= 1 + SLACK and sizes.max() <= self.size_max and sizes.sum() <= self.gpus
        valid = valid and np.count_nonzero(sizes) <= self.groups
        return sizes if valid else None


@dataclass(frozen=True, slots=True)
class Grouping:
    """group : (models,) group of each model.  sizes : (groups,) GPUs, 0 for an empty group."""

    group: Ints
    sizes: Ints

    def tolerance(self, task: Task) -> float:
        """The least burst tolerance; infinite without load."""
        with np.errstate(divide="ignore"):
            return float(np.min(self.sizes[self.group] / task.need))


def task_of(instance: Instance, need: Floats, as_printed: bool) -> tuple[Task, Ints]:
    """(the task, numbers in the instance of the task's models). need : (models,) n_i, in the instance's order."""
    order = np.argsort(-need, kind="stable")
    memory = np.array([model.memory_gb for model in instance.models]) / instance.gpu_memory_gb
    task = Task(
        need=need[order],
        load=np.zeros(need.size) if as_printed else need[order],
        memory=memory[order],
        kind=affinity_sets(instance.models, instance.affinity_max)[order],
        gpus=instance.gpus,
        size_max=min(instance.group_gpus_max, instance.gpus),
        groups=min(instance.groups, need.size, instance.gpus),
    )
    return task, order


def tolerances_of(task: Task) -> Floats:
    """Ascending: 0, and every size / n_i that the least burst tolerance can be."""
    most = task.size_max / task.need[0] if task.need[0] > 0 else 0.0
    tolerances = [np.zeros(1)]
    for need in np.unique(task.need[task.need > 0]):
        sizes = np.arange(1, math.floor(most * need * (1 + ROUNDING)) + 1)
        tolerances.append(sizes / need)
    values = np.unique(np.concatenate(tolerances))
    distinct = np.diff(values, prepend=-np.inf) > ROUNDING * values  # the smaller of equal values: size_min rounds down
    return values[distinct]
