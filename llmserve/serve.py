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
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from llmserve import config as configuration
from llmserve.config import Config
from llmserve.errors import ConfigError, ListenError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from bins.profile import Profile
    from llmserve.cluster.live import LiveCluster
    from llmserve.energy import EnergyMeter, MeasuredEnergy
    from llmserve.engines.engine import Engine
    from llmserve.engines.engine_process import EngineProcess
    from predictor.forecaster import Forecaster
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
        profile = _profile(config)
        metrics = Metrics(
            cluster,
            config.scheduling.full_batch,
            await _energy_meters(config, cluster, profile, gpus, stack),
            energy_known=profile is None or profile.energy_known,
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
        config.dispatch.solver(scheduling, barrier=_all_barrier(config))
        _profile(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return msgspec.structs.replace(config, scheduling=scheduling)


def _all_barrier(config: Config) -> bool:
    """Whether engines run batches to their end; mixed ones are taken for such."""
    return config.engines.barrier or config.engines.has_embedded


def _profile(config: Config) -> Profile | None:
    """Raises ValueError when it cannot be read."""
    from bins import profile

    return profile.resolve(config.dispatch.profile) if config.dispatch.profile is not None else None


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
    """Engines and predictor up (both at once: each loads for seconds), then the cluster on top of them.

    Also the GPUs that were given to engines started here, see _start_engines.
    """
    from llmserve.cluster.journal import Header, Journal
    from llmserve.cluster.live import LiveCluster
    from llmserve.cluster.record import LengthRecord

    async with _at_once() as group:
        engines_task = group.create_task(_start_engines(config, stack))
        predictor_task = group.create_task(_start_predictor(config, stack))
    (engines, gpus), predictor = engines_task.result(), predictor_task.result()
    forecasts = predictor.forecasts if predictor is not None else ()
    header = Header(config.scheduling, config.scheduling.scores(forecasts), config.scheduling.likely_lengths(forecasts))
    cluster = LiveCluster(
        header.scheduler(),
        engines,
        Journal(header, path=Path(config.server.journal) if config.server.journal else None),
        forecaster=_forecaster(config, predictor),
        record=LengthRecord(Path(config.prediction.record)) if config.prediction.record else None,
        config=config.live,
        # What is started here serves nothing else; vLLM's adapters are models of their own.
        only_model=None if config.engines.has_vllm or config.engines.has_embedded else config.engines.model,
        solver=config.dispatch.solver(config.scheduling, barrier=_all_barrier(config)),
    )
    stack.push_async_callback(cluster.close)
    return cluster, gpus


@contextlib.asynccontextmanager
async def _at_once() -> AsyncIterator[asyncio.TaskGroup]:
    """A group of tasks of which the first that fails ends the others; its exception is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


def _forecaster(config: Config, predictor: PredictorProcess | None) -> Forecaster:
    from predictor.forecaster import Forecaster
    from predictor.online import OnlineLearner

    learner = OnlineLearner(keys_max=config.prediction.memory_keys)
    return Forecaster(predictor, learner, budget_s=config.prediction.predictor_budget_s)


async def _start_engines(config: Config, stack: AsyncExitStack) -> tuple[list[Engine], str | None]:
    """Those of ours are up, whether they run or not those of others.

    Also the GPUs that ours were given, as CUDA_VISIBLE_DEVICES names them; None: they see all that we see.
    """
    from llmserve.engines.openai_engine import OpenAIEngine, Timeouts
    from llmserve.request import EngineInfo

    engines, full_batch = config.engines, config.scheduling.full_batch
    timeouts = Timeouts(connect_s=engines.engine_connect_s, idle_s=engines.engine_idle_s)
    connect = partial(OpenAIEngine, timeouts=timeouts, api_key=engines.engine_api_key)
    barrier, ahead = engines.barrier, 0 if engines.barrier else engines.look_ahead
    urls = {_engine_name(url): url for url in engines.urls}
    if len(urls) < len(engines.urls):
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
    for name, url in urls.items():
        info = EngineInfo(name, full_batch if barrier else engines.slots or SLOTS_GUESS, barrier, look_ahead=ahead)
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
        raise ConfigError(f"engine {url!r} is not a URL such as http://127.0.0.1:8001")
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


async def _start_predictor(config: Config, stack: AsyncExitStack) -> PredictorProcess | None:
    folder = _predictor_folder(config)
    if folder is None:
        return None
    from predictor.errors import PredictorError
    from predictor.process import PredictorProcess

    process = PredictorProcess(folder, threads=config.prediction.predictor_threads)
    stack.push_async_callback(process.close)
    try:
        await process.start()
    except PredictorError as error:
        raise ConfigError(f"predictor: {error}") from error
    return process


def _predictor_folder(config: Config) -> Path | None:
    chosen = config.prediction.predictor
    if chosen == "none":
        return None
    if chosen is not None:
        return Path(chosen)
    if config.engines.engine not in ((), ("embedded",)) or config.engines.model:
        return None  # the demo predictor knows the demo model's answers only
    import predictor

    return predictor.DEMO


# ---- energy -------------------------------------------------------------------------------------------------------


async def _energy_meters(
    config: Config, cluster: LiveCluster, profile: Profile | None, gpus: str | None, stack: AsyncExitStack
) -> list[EnergyMeter]:
    """By NVML where an engine may run on this machine's GPUs, by a model where their profile tells energy.

    gpus : that were given to the engines started here, see _start_engines.
    """
    from llmserve.energy import ModelledEnergy

    meters: list[EnergyMeter] = []
    if (measured := await _gpu_meter(config, cluster, gpus, stack)) is not None:
        meters.append(measured)
    if profile is not None and not profile.energy_known:
        log.warning("the profile %s tells no energy: /metrics has no modelled joules", profile.name)
    elif profile is not None:
        modelled = ModelledEnergy(profile)
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


def _say_where(cluster: LiveCluster, url: str, *, with_key: bool) -> None:
    """Tell a person where to go, now that there is somebody to answer."""
    model = next(iter(cluster.models), "MODEL")
    body = {"model": model, "messages": [{"role": "user", "content": "Count from 1 to 20."}]}
    key = " -H 'authorization: Bearer YOUR_KEY'" if with_key else ""
    print(f"llmserve is ready: {url}/v1  (models: {', '.join(cluster.models)})")
    print(f"\n  curl -s {url}/v1/chat/completions -H 'content-type: application/json'{key} \\")
    print(f"    -d {shlex.quote(json.dumps(body))}\n")
    print("Ctrl-C stops it.", flush=True)
