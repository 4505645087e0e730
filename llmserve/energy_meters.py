"""Which energy meters a server has: of its GPUs' counters, and by a model of its engines' profiles."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

from bins.profile import Profile
from llmserve.api.listening import is_loopback
from llmserve.cluster.live import LiveCluster
from llmserve.energy import EnergyMeter, MeasuredEnergy, ModelledEnergy
from llmserve.engines.power import GpuEnergy
from llmserve.settings import Config

log = logging.getLogger("llmserve")


async def energy_meters(
    config: Config, cluster: LiveCluster, profiles: Mapping[str, Profile], gpus: str | None, stack: AsyncExitStack
) -> list[EnergyMeter]:
    """By NVML where an engine may run on this machine's GPUs, by a model where their profiles tell energy.

    profiles : by model.  gpus : that were given to the engines started here, see _start_engines.
    """
    meters: list[EnergyMeter] = []
    if (measured := await _gpu_meter(config, cluster, gpus, stack)) is not None:
        meters.append(measured)
    unknown = [profile.name for profile in profiles.values() if not profile.energy_known]
    if unknown:
        log.warning("the profile %s tells no energy: /metrics has no modelled joules", ", ".join(unknown))
    elif profiles:
        modelled = ModelledEnergy(profiles)
        cluster.journal.listen(modelled.observe)
        meters.append(modelled)
    return meters


async def _gpu_meter(
    config: Config, cluster: LiveCluster, gpus: str | None, stack: AsyncExitStack
) -> MeasuredEnergy | None:
    """Of the GPUs that engines on this machine may use; the embedded one uses none."""
    engines = config.engines
    here = [is_loopback(urlsplit(url).hostname or "") for url in engines.urls]
    if not engines.has_vllm and not any(here):
        return None
    energy = GpuEnergy.open(None if any(here) else gpus)  # a server that runs already may use any of ours
    if energy is None:
        return None
    stack.callback(energy.close)
    measured = MeasuredEnergy(energy, of_all_work=all(here) and not engines.has_embedded)
    await stack.enter_async_context(measured.sampling(cluster.now_s))
    return measured
