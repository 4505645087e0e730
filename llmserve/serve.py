"""Run the front-end.

Without --engine it starts the embedded engine (a small local model; no GPU, no download) and serves that. With
--engine vllm --model FOLDER_OR_HUB_ID it starts vLLM, one server for each GPU; what follows `--` are vLLM's arguments.
Every flag is also an environment variable (--batch-size: LLMSERVE_BATCH_SIZE) and a key of the TOML file
named by --config; flags win over the environment, the environment over the file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import ipaddress
import json
import logging
import os
import shlex
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from llmserve import config as configuration
from llmserve import extras, herd
from llmserve.by_model import PREFIX, by_model
from llmserve.cluster.assignment import PlannedGroup, assign
from llmserve.config import Config, EngineConfig
from llmserve.errors import ConfigError, ListenError
from llmserve.scheduling.layout import FALLBACK
from llmserve.scheduling.rates import STREAMS_MAX, Rates, Replan
from llmserve.spelling import nearest

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from bins.profile import Profile
    from llmserve.cluster.live import LiveCluster
    from llmserve.energy import EnergyMeter, MeasuredEnergy
    from llmserve.engines.engine import Engine
    from llmserve.engines.engine_process import EngineProcess
    from predictor.forecaster import Forecaster, ForecasterByModel
    from predictor.process import PredictorProcess

log = logging.getLogger("llmserve")

SLOTS_GUESS = 256  # until the engine tells, when nobody has said

TITLES = {
    "server": "server",
    "engines": "engines",
    "scheduling": "scheduling",
    "dispatch": "dispatching by latency and energy",
    "prediction": "length prediction",
    "limits": "limits",
    "live": "timing",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="TOML file, e.g. llmserve.toml ([scheduling] batch_size = 8)")
    for section, struct in configuration.sections().items():
        configuration.add_flags(parser, struct, TITLES[section])


def main(args: argparse.Namespace) -> int:
    names = {name for struct in configuration.sections().values() for name in struct.__struct_fields__}
    flags = {name: value for name, value in vars(args).items() if name in names}
    file = args.config or os.environ.get(f"{configuration.ENVIRONMENT_PREFIX}CONFIG")
    config = configuration.load_config(flags, os.environ, file)
    logging.basicConfig(level=config.server.log_level.upper(), format="%(levelname)s %(message)s", stream=sys.stderr)
    for noisy in ("asyncio", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    _allow_many_sockets()
    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.run(run(config))
    return asyncio.run(run(config))


def _allow_many_sockets() -> None:
    """Two sockets a request are needed: take all that the system grants."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def run(config: Config) -> int:
    """Serve until SIGTERM or SIGINT; then drain. Returns the exit status."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    starting = asyncio.current_task()

    def on_signal() -> None:
        nonlocal starting
        if starting is not None:  # nothing serves yet: there is nothing to drain
            starting.cancel()
            starting = None
        elif stop.is_set():
            hurry.set()
        stop.set()

    with _on_stop_signals(on_signal), contextlib.suppress(asyncio.CancelledError):
        async with serving(config) as (cluster, url):
            await _until_an_engine_is_ready(cluster)
            starting = None
            gc.collect()
            gc.freeze()  # what has been loaded stays: a full collection that looks through it stalls every stream
            _say_where(cluster, url, with_key=config.server.api_key_file is not None)
            await stop.wait()
            await _drain(cluster, config.server.drain_s, hurry)
    return 0


async def _drain(cluster: LiveCluster, within_s: float, hurry: asyncio.Event) -> None:
    log.info("draining: new requests are refused, running ones have %.0f s; a second signal ends it now", within_s)
    draining = asyncio.ensure_future(cluster.drain(within_s))
    hurried = asyncio.ensure_future(hurry.wait())
    await asyncio.wait({draining, hurried}, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if not draining.done() or not draining.result():
        log.warning("some requests have not ended and are aborted")
    draining.cancel()


@contextlib.asynccontextmanager
async def serving(config: Config) -> AsyncIterator[tuple[LiveCluster, str]]:
    """The whole server inside the block: engines, predictor, cluster and door. Yields the cluster and the base URL.

    Raises LLMServeError when it cannot start.
    """
    from llmserve.api.app import create_app
    from llmserve.api.limits import Deadlines, Doorkeeper, read_keys
    from llmserve.metrics import Metrics

    keys = read_keys(Path(config.server.api_key_file)) if config.server.api_key_file else {}
    admin_keys = read_keys(Path(config.server.admin_key_file)) if config.server.admin_key_file else {}
    _check_listening(config, has_keys=bool(keys))
    if unknown := Deadlines(config.limits.slo_ms).keys - set(keys):
        raise ConfigError(f"slo_ms: no key of --api-key-file is called {', '.join(sorted(unknown))}")
    config = _resolved(config)
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(_listener(config.server.host, config.server.port))
        cluster, gpus = await _start_cluster(config, stack)
        profiles = config.dispatch.profiles()
        metrics = Metrics(
            cluster,
            config.scheduling.full_batch,
            await _energy_meters(config, cluster, profiles, gpus, stack),
            energy_known=all(profile.energy_known for profile in profiles.values()),
        )
        doorkeeper = Doorkeeper(
            keys,
            concurrent_max=config.limits.concurrent_max,
            requests_per_minute_max=config.limits.requests_per_minute_max,
        )
        admin = Doorkeeper(admin_keys) if admin_keys else None
        app = create_app(cluster, metrics, doorkeeper, config.limits, admin=admin)
        await stack.enter_async_context(_accepting(app, listener))
        cluster.start()
        saying = asyncio.create_task(_say_unserved(config, cluster))
        stack.callback(saying.cancel)
        yield cluster, _url(listener)


def _resolved(config: Config) -> Config:
    """With the defaults that depend on the engines. What makes no sense is said before anything slow is started.

    Raises ConfigError.
    """
    engines = config.engines
    engines.check()
    scheduling = config.scheduling.resolved(barrier=_all_barrier(config))
    if engines.barrier and engines.slots is not None and engines.slots < scheduling.full_batch:
        raise ConfigError(f"slots: {engines.slots} of them cannot run a batch of {scheduling.full_batch} at once")
    try:
        scheduling.scheduler()
        config.dispatch.solvers(scheduling, barrier=_all_barrier(config))
        config.dispatch.profiles()
        by_model("predictor", config.prediction.predictor)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if scheduling.goes_by_times and not config.dispatch.profile:
        log.warning(
            "order %s without --profile: how long batches take is not known, so requests are given up only when their "
            "deadlines have passed",
            scheduling.order,
        )
    config = msgspec.structs.replace(config, scheduling=scheduling)
    return config if engines.plan is None else _with_plan(config)


def _all_barrier(config: Config) -> bool:
    """Whether engines run batches to their end; mixed ones are taken for such."""
    return config.engines.barrier or config.engines.has_embedded


def _check_listening(config: Config, *, has_keys: bool) -> None:
    host = config.server.host
    if not _is_loopback(host) and not has_keys and not config.server.anonymous:
        raise ConfigError(
            f"host {host} is reachable from outside and no key is asked for: give --api-key-file FILE, "
            "or --anonymous to serve anyone"
        )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextlib.contextmanager
def _on_stop_signals(callback: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, callback)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


# ---- the cluster --------------------------------------------------------------------------------------------------


async def _start_cluster(config: Config, stack: AsyncExitStack) -> tuple[LiveCluster, str | None]:
    """Engines and predictors up (all at once: each loads for seconds), then the cluster on top of them.

    Also the GPUs that were given to engines started here, see _start_engines.
    """
    from llmserve.cluster.journal import Header, Journal
    from llmserve.cluster.live import LiveCluster
    from llmserve.cluster.record import LengthRecord
    from llmserve.cluster.regroup import Regrouper

    async with _at_once() as group:
        engines_task = group.create_task(_start_engines(config, stack))
        predictors_task = group.create_task(_start_predictors(config, stack))
    (engines, gpus), predictors = engines_task.result(), predictors_task.result()
    forecasts = predictors[""].forecasts if "" in predictors else ()
    planned = _planned(config)
    groups = assign(planned, {}, {})
    header = Header(
        config.scheduling,
        config.scheduling.scores(forecasts),
        config.scheduling.likely_lengths(forecasts),
        groups=groups,
        replan=_replan_when(config),
    )
    cluster = LiveCluster(
        header.scheduler(),
        engines,
        Journal(header, path=Path(config.server.journal) if config.server.journal else None),
        forecaster=_forecaster(config, predictors),
        record=LengthRecord(Path(config.prediction.record)) if config.prediction.record else None,
        config=config.live,
        wanted=_wanted(config),
        solvers=config.dispatch.solvers(config.scheduling, barrier=_all_barrier(config)),
        profiles=config.dispatch.profiles(),
    )
    stack.push_async_callback(cluster.close)
    if groups:
        regrouper = Regrouper(cluster, planned, groups, _replanner(config))
        stack.push_async_callback(regrouper.close)
        regrouper.start()
    return cluster, gpus


@contextlib.asynccontextmanager
async def _at_once() -> AsyncIterator[asyncio.TaskGroup]:
    """A group of tasks of which the first that fails ends the others; its exception is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


def _forecaster(config: Config, predictors: Mapping[str, PredictorProcess]) -> Forecaster | ForecasterByModel:
    """predictors : by model. A model that was given its own, or `none`, learns from its own answers alone."""
    from predictor.forecaster import Forecaster, ForecasterByModel
    from predictor.online import OnlineLearner

    def forecaster(model: str) -> Forecaster:
        learner = OnlineLearner(keys_max=config.prediction.memory_keys)
        return Forecaster(predictors.get(model), learner, budget_s=config.prediction.predictor_budget_s)

    apart = set(by_model("predictor", config.prediction.predictor)) - {""}
    if not apart:
        return forecaster("")
    return ForecasterByModel({model: forecaster(model) for model in sorted(apart)}, others=forecaster(""))


async def _start_engines(config: Config, stack: AsyncExitStack) -> tuple[list[Engine], str | None]:
    """Engines that are started here are up when this returns; engines that are URLs may be down.

    Also the GPUs that ours were given, as CUDA_VISIBLE_DEVICES names them; None: they see all that we see.
    """
    from llmserve.engines.openai_engine import OpenAIEngine, Timeouts
    from llmserve.request import EngineInfo

    engines, full_batch = config.engines, config.scheduling.full_batch
    timeouts = Timeouts(connect_s=engines.engine_connect_s, idle_s=engines.engine_idle_s)
    connect = partial(OpenAIEngine, timeouts=timeouts, api_key=engines.engine_api_key)
    barrier, ahead = engines.barrier, 0 if engines.barrier else engines.look_ahead
    placed = {_engine_name(url): (worker, url) for worker, url in engines.placed_urls}
    if len(placed) < len(engines.urls):
        raise ConfigError("engine: the same server stands twice")
    vllm, slots, gpus = _vllm_processes(config) if engines.has_vllm else ([], None, None)
    embedded = [_embedded_process(config)] if engines.has_embedded else []
    await _start_processes([*embedded, *vllm], stack)
    made: list[Engine] = []
    for process in embedded:
        made.append(connect(EngineInfo("embedded", full_batch, True), process.url, restart=process.restart))
    for process in vllm:
        info = EngineInfo(process.name, full_batch if barrier else slots or SLOTS_GUESS, barrier, look_ahead=ahead)
        made.append(connect(info, process.url, restart=process.restart, learns_slots=not barrier and slots is None))
    for name, (worker, url) in placed.items():
        slots_ = full_batch if barrier else engines.slots or SLOTS_GUESS
        info = EngineInfo(name, slots_, barrier, look_ahead=ahead, worker=worker)
        made.append(connect(info, url, learns_slots=not barrier and engines.slots is None))
    for engine in made:
        stack.push_async_callback(engine.close)
    return made, gpus


async def _start_processes(processes: list[EngineProcess], stack: AsyncExitStack) -> None:
    """All at once, and all are stopped at once. The first that fails ends the others. Raises EngineStartError."""

    async def stop() -> None:
        await asyncio.gather(*(process.stop() for process in processes))

    stack.push_async_callback(stop)
    async with _at_once() as group:
        for process in processes:
            group.create_task(process.start())


def _engine_name(url: str) -> str:
    """Host, port and path of the URL: it is shown to clients. Raises ConfigError when it is not a plain http URL."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii() or parts.query:
        raise ConfigError(f"engine {url!r} is not a URL such as http://127.0.0.1:8001, nor WORKER=URL")
    if parts.username is not None:
        raise ConfigError("engine: give credentials with --engine-api-key, not inside the URL")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{host}:{port or (443 if parts.scheme == 'https' else 80)}{parts.path.rstrip('/').removesuffix('/v1')}"


def _embedded_process(config: Config) -> EngineProcess:
    from llmserve.engines.engine_process import EngineProcess

    def command(port: int) -> list[str]:
        words = [sys.executable, "-m", "llmserve.engines.embedded", "--host", "127.0.0.1", "--port", str(port)]
        words += ["--batch-size-max", str(config.scheduling.full_batch)]
        return words + (["--model", config.engines.model] if config.engines.model else [])

    extras.need_embedded()
    return EngineProcess("the embedded engine", command, start_s=config.engines.engine_start_s)


def _vllm_processes(config: Config) -> tuple[list[EngineProcess], int | None, str | None]:
    """Servers to be started; the slots of each, None when only vLLM knows them; and the GPUs that they were given.

    Raises ConfigError on what can be known to fail before that.
    """
    from llmserve.engines import vllm_process

    engines = config.engines
    assert engines.model is not None, "checked"
    vllm_process.check_model(engines.model)
    slots = vllm_process.slots_of(engines.slots, engines.engine_args)
    python = engines.engine_python or sys.executable
    replicas = vllm_process.plan(
        engines.model,
        python=python,
        slots=slots,
        args=engines.engine_args,
        count=engines.replicas,
        gpus=vllm_process.visible_gpus(os.environ),
    )
    vllm_process.check_python(python)
    # Two front-ends on one machine listen on different ports.
    folder = _log_folder(engines.engine_log_folder, str(config.server.port))
    log.info("starting vLLM: %s; what it says goes to %s", ", ".join(replica.name for replica in replicas), folder)
    made = vllm_process.processes(replicas, start_s=engines.engine_start_s, log_folder=folder)
    given = [replica.environment.get("CUDA_VISIBLE_DEVICES") for replica in replicas]
    together = ",".join(filter(None, given)) if all(given) else None
    return made, None if slots is None else slots * vllm_process.ranks_of(engines.engine_args), together


def _log_folder(chosen: str | None, name: str) -> Path:
    """Made if need be: `name` in our folder for logs, unless one was chosen. Raises ConfigError when it cannot be."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    folder = Path(chosen or f"{state}/llmserve/{name}")
    try:
        folder = folder.expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError) as error:  # RuntimeError: nobody's home
        raise ConfigError(f"engine_log_folder: nothing can be written to {folder}: {error}") from error


async def _start_predictors(config: Config, stack: AsyncExitStack) -> dict[str, PredictorProcess]:
    """By model; "": for every other model."""
    async with _at_once() as group:
        tasks = {
            model: group.create_task(_start_predictor(folder, config, stack))
            for model, folder in _predictor_folders(config).items()
        }
    return {model: task.result() for model, task in tasks.items()}


async def _start_predictor(folder: Path, config: Config, stack: AsyncExitStack) -> PredictorProcess:
    from predictor.errors import PredictorError
    from predictor.process import PredictorProcess

    process = PredictorProcess(folder, threads=config.prediction.predictor_threads)
    stack.push_async_callback(process.close)
    try:
        await process.start()
    except PredictorError as error:
        raise ConfigError(f"predictor: {error}") from error
    return process


def _predictor_folders(config: Config) -> dict[str, Path]:
    """By model; "": for every other model. Those that were told `none` are not among them."""
    chosen = by_model("predictor", config.prediction.predictor)
    folders = {model: Path(folder) for model, folder in chosen.items() if folder != "none"}
    if "" not in chosen and config.engines.engine in ((), ("embedded",)) and not config.engines.model:
        import predictor

        folders[""] = predictor.DEMO  # which knows the demo model's answers only
    return folders


# ---- groups -------------------------------------------------------------------------------------------------------


def _planned(config: Config) -> tuple[PlannedGroup, ...]:
    """The groups that this server has; () without a plan, and where the server is one group. Raises ConfigError."""
    if config.engines.plan is None or config.engines.group is not None:
        return ()
    return _planned_groups(herd.Plan.load(config.engines.plan))


def _planned_groups(plan: herd.Plan) -> tuple[PlannedGroup, ...]:
    return tuple(
        PlannedGroup(group.name, group.gpus, group.models, group.streams, group.workers) for group in plan.groups
    )


def _with_plan(config: Config) -> Config:
    """Its files are looked at before anything slow is started; of one group, only the group's engines are left.

    Raises ConfigError.
    """
    engines = config.engines
    assert engines.plan is not None
    plan = herd.Plan.load(engines.plan)
    _replanner(config)
    if engines.group is None:
        _check_workers(engines, plan)
        return config
    left = _engines_of_group(engines, engines.group, plan)
    return msgspec.structs.replace(config, engines=msgspec.structs.replace(engines, engine=left))


def _engines_of_group(engines: EngineConfig, group: str, plan: herd.Plan) -> tuple[str, ...]:
    """Each --engine that serves the group. A worker that no group names may serve the fallback group, and every group
    that names no worker.

    Raises ConfigError when the plan has no such group, or the group no engine.
    """
    workers = {FALLBACK: (), **{planned.name: planned.workers for planned in plan.groups}}
    if group not in workers:
        raise ConfigError(f"group: {engines.plan} has no group {group!r}{nearest(group, workers)}")
    own, named = workers[group], {worker for some in workers.values() for worker in some}
    takes_unnamed = group == FALLBACK or not own
    found = []
    for entry in engines.engine or ("embedded",):
        worker = _worker_of(engines, entry)
        if worker in own or (takes_unnamed and worker not in named):
            found.append(entry)
    if not found:
        of = f"its workers, {', '.join(own)}" if own else "a worker that no other group names"
        raise ConfigError(f"group {group}: none of the engines is on {of}")
    return tuple(found)


def _wanted(config: Config) -> Callable[[str], bool]:
    """Whether a model that an engine lists is to be served: the one of --model, those of the --group."""
    engines = config.engines
    # What is started here serves nothing else; vLLM's adapters are models of their own.
    only = None if engines.has_vllm or engines.has_embedded else engines.model
    if engines.plan is None or engines.group is None:
        return lambda model: only in (None, model)
    planned = _planned_groups(herd.Plan.load(engines.plan))
    own = {model for group in planned if group.name == engines.group for model in group.served}
    others = {model for group in planned if group.name != engines.group for model in group.models}
    takes_rest = engines.group == FALLBACK
    return lambda model: only in (None, model) and (model in own or (takes_rest and model not in others))


def _check_workers(engines: EngineConfig, plan: herd.Plan) -> None:
    """Raises ConfigError on a worker that no engine can be on. vLLM's are known when it has been started."""
    if engines.has_vllm:
        return
    known = {_worker_of(engines, entry) for entry in engines.engine or ("embedded",)}
    for group in plan.groups:
        for worker in group.workers:
            if worker not in known:
                near = nearest(worker, known)
                raise ConfigError(f"plan: group {group.name} has no engine on its worker {worker}{near}")


def _worker_of(engines: EngineConfig, entry: str) -> str:
    """The worker of an --engine, by the name that a plan has for it."""
    placed = msgspec.structs.replace(engines, engine=(entry,)).placed_urls
    return placed[0][0] or _engine_name(placed[0][1]) if placed else entry


def _replan_when(config: Config) -> Replan | None:
    """Raises ConfigError."""
    engines = config.engines
    if engines.replan_every_s is None or engines.plan_instance is None:
        return None
    streams = herd.streams_of(instance := herd.Instance.load(engines.plan_instance))
    models = [instance.models[index].name for index in streams.model]
    planned = [
        (name, model, float(rate))
        for name, model, rate in zip(streams.names, models, streams.rate_per_s, strict=True)
        if rate > 0
    ]
    # More than are counted apart cannot be compared one by one: the first look then asks for a plan.
    return Replan(engines.replan_every_s, tuple(planned) if len(planned) <= STREAMS_MAX else ())


def _replanner(config: Config) -> Callable[[Rates], tuple[PlannedGroup, ...]] | None:
    """Raises ConfigError when a file of it cannot be read."""
    engines = config.engines
    if engines.plan is None or engines.plan_instance is None:
        return None
    instance, previous = herd.Instance.load(engines.plan_instance), herd.Plan.load(engines.plan)
    streams = herd.streams_of(instance)
    names = [model.name for model in instance.models]
    silent: dict[str | tuple[str, str], float] = {
        (name, names[index]): 0.0 for name, index in zip(streams.names, streams.model, strict=True)
    }

    def replan(rates: Rates) -> tuple[PlannedGroup, ...]:
        nonlocal previous
        now = dict(silent)
        now.update({(stream, model): rate_per_s for stream, model, rate_per_s in rates if model in names})
        previous = herd.replan(instance, now, previous)
        return _planned_groups(previous)

    return replan


# ---- energy -------------------------------------------------------------------------------------------------------


async def _energy_meters(
    config: Config, cluster: LiveCluster, profiles: Mapping[str, Profile], gpus: str | None, stack: AsyncExitStack
) -> list[EnergyMeter]:
    """By NVML where an engine may run on this machine's GPUs, by a model where their profiles tell energy.

    profiles : by model.  gpus : that were given to the engines started here, see _start_engines.
    """
    from llmserve.energy import ModelledEnergy

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
    from llmserve.energy import MeasuredEnergy
    from llmserve.engines.power import GpuEnergy

    engines = config.engines
    here = [_is_loopback(urlsplit(url).hostname or "") for url in engines.urls]
    if not engines.has_vllm and not any(here):
        return None
    energy = GpuEnergy.open(None if any(here) else gpus)  # a server that runs already may use any of ours
    if energy is None:
        return None
    stack.callback(energy.close)
    measured = MeasuredEnergy(energy, of_all_work=all(here) and not engines.has_embedded)
    await stack.enter_async_context(measured.sampling(cluster.now_s))
    return measured


# ---- the listening socket -----------------------------------------------------------------------------------------


def _listener(host: str, port: int) -> socket.socket:
    """A listening socket, before anything slow is started. Raises ListenError when the port cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), backlog=2048, family=family)
    except OSError as error:
        raise ListenError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.asynccontextmanager
async def _accepting(app: ASGIApp, listener: socket.socket) -> AsyncIterator[None]:
    """Serve the application on the socket inside the block."""
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Signals are ours: they drain the cluster first."""
            yield

    server = Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=2,
        )
    )
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await task


async def _until_an_engine_is_ready(cluster: LiveCluster) -> None:
    looks = 0
    while not any(cluster.engines_ready.values()):
        await asyncio.sleep(0.05)
        looks += 1
        if looks == 60:
            log.warning("no engine answers yet: %s", ", ".join(cluster.engines_ready))


async def _say_unserved(config: Config, cluster: LiveCluster) -> None:
    """Warn of settings for models that no engine serves, once all engines have told what they do serve."""
    if config.engines.group is not None:  # the others are its neighbours' models
        return
    while not all(cluster.engines_ready.values()):  # noqa: ASYNC110 (nothing tells of it)
        await asyncio.sleep(0.2)
    slos_ms = [text for text in config.limits.slo_ms if text.startswith(PREFIX)]
    for setting, texts in (
        ("profile", config.dispatch.profile),
        ("predictor", config.prediction.predictor),
        ("slo_ms", slos_ms),
    ):
        for model in sorted(set(by_model(setting, texts)) - {""} - set(cluster.models)):
            log.warning("%s: no engine serves a model %s%s", setting, model, nearest(model, cluster.models))


def _say_where(cluster: LiveCluster, url: str, *, with_key: bool) -> None:
    """Tell a person where to go, now that there is somebody to answer."""
    model = next(iter(cluster.models), "MODEL")
    body = {"model": model, "messages": [{"role": "user", "content": "Count from 1 to 20."}]}
    key = " -H 'authorization: Bearer YOUR_KEY'" if with_key else ""
    print(f"llmserve is ready: {url}/v1  (models: {', '.join(cluster.models)})")
    print(f"\n  curl -s {url}/v1/chat/completions -H 'content-type: application/json'{key} \\")
    print(f"    -d {shlex.quote(json.dumps(body))}\n")
    print("Ctrl-C stops it.", flush=True)
