"""Creates a server's energy meters: one from the GPUs' counters, and one from the engines' profiles."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

from bins.profile import Profile
from llmserve.engines.power import GpuEnergy
from llmserve.http.server import is_loopback
from llmserve.live.cluster import LiveCluster
from llmserve.observe.energy import EnergyMeter, MeasuredEnergy, ModelledEnergy
from llmserve.settings.tree import Config

log = logging.getLogger("llmserve")


async def energy_meters(
    config: Config, cluster: LiveCluster, profiles: Mapping[str, Profile], gpus: str | None, stack: AsyncExitStack
) -> list[EnergyMeter]:
    """Return a measuring meter if engines may run on local GPUs, and a modelled meter if the profiles have energy.

    profiles : by model.  gpus : of the engines that llmserve started, see EngineKind.gpus.
    """
    meters: list[EnergyMeter] = []
    if (measured := await _gpu_meter(config, cluster, gpus, stack)) is not None:
        meters.append(measured)
    unknown = [profile.name for profile in profiles.values() if not profile.energy_known]
    if unknown:
        log.warning("the profile %s has no energy: /metrics has no modelled joules", ", ".join(unknown))
    elif profiles:
        modelled = ModelledEnergy(profiles)
        cluster.journal.listen(modelled.observe)
        meters.append(modelled)
    return meters


async def _gpu_meter(
    config: Config, cluster: LiveCluster, gpus: str | None, stack: AsyncExitStack
) -> MeasuredEnergy | None:
    """Measure the GPUs that engines on this machine may use. The embedded engine uses no GPU."""
    engines = config.engines
    is_local = [is_loopback(urlsplit(url).hostname or "") for url in engines.urls]
    if not engines.has_vllm and not any(is_local):
        return None
    energy = GpuEnergy.open(None if any(is_local) else gpus)  # a server that runs already may use any local GPU
    if energy is None:
        return None
    stack.callback(energy.close)
    measured = MeasuredEnergy(energy, of_all_work=all(is_local) and not engines.has_embedded)
    await stack.enter_async_context(measured.sampling(cluster.now_s))
    return measured
