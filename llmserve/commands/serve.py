"""Run the front-end.

    llmserve serve                                             no GPU: the built-in small model, on the CPU
    llmserve serve --engine http://127.0.0.1:8001              in front of vLLM, or any OpenAI-compatible server
    llmserve serve --engine vllm --model MODEL -- --dtype auto starts vLLM, one server for each GPU
    llmserve serve --engine URL --engine URL --api-key-file F  two engines, for clients with a key
    llmserve serve --engine URL --order edf --slo-ms 30000     deadline of each answer: 30 s after its arrival
    llmserve serve --config llmserve.toml                      all settings in a file

Each setting is a flag (--batch-size), an environment variable (LLMSERVE_BATCH_SIZE) and a key of the TOML file
([scheduling] batch_size): flags win over variables, variables over the file. The common settings:
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import json
import logging
import os
import shlex
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from llmserve.errors import ConfigError
from llmserve.runtime import logs
from llmserve.settings import load as configuration
from llmserve.settings.tree import COMMON, TITLES, Config, aliases_of

if TYPE_CHECKING:
    from llmserve.forecasts.saving import Saver
    from llmserve.http.exchange import Exchange
    from llmserve.http.server import DoorLimits
    from llmserve.live.driver import LiveCluster
    from llmserve.observe.key_usage import KeyUsage
    from llmserve.observe.metrics import Metrics
    from llmserve.observe.traces import Traces
    from llmserve.server.reload import Reloader

log = logging.getLogger("llmserve")

FIRST_WORD_S, WORD_EVERY_S = 3.0, 10.0  # while no engine is ready
METRICS_CONNECTIONS_MAX = 64  # scrapers and probes are few
LOOPBACK = "127.0.0.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--help-all", action=configuration.HelpAll, nargs=0, help="show every setting, and exit")
    parser.add_argument("--config", metavar="FILE", help="TOML file, e.g. llmserve.toml")
    parser.add_argument("--show-config", action="store_true", help="print all settings and their sources")
    for section, struct in configuration.sections(Config).items():
        configuration.add_flags(parser, struct, TITLES[section], common=COMMON)


def main(args: argparse.Namespace) -> int:
    names = {name for struct in configuration.sections(Config).values() for name in struct.__struct_fields__}
    flags = {name: value for name, value in vars(args).items() if name in names}
    file = args.config or os.environ.get(f"{configuration.ENVIRONMENT_PREFIX}CONFIG")

    def read() -> tuple[Config, dict[str, str]]:
        return configuration.load(Config, flags, os.environ, file)

    config, origin = read()
    if args.show_config:
        print(config.shown(origin))
        return 0
    logs.configure(config.server.log_level, config.server.log_format)
    if ignored := configuration.service_variables(os.environ):
        log.warning(
            "%d variables of the environment are ignored (%s, ...): Kubernetes sets them for a Service whose name "
            "begins with llmserve; `enableServiceLinks: false` in the pod leaves them out",
            len(ignored),
            ignored[0],
        )
    _allow_many_sockets()
    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.run(run(config, lambda: read()[0], has_file=file is not None))
    return asyncio.run(run(config, lambda: read()[0], has_file=file is not None))


def _allow_many_sockets() -> None:
    """Raise the limit of open files to the system's maximum: each request needs two sockets."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def run(config: Config, read: Callable[[], Config], *, has_file: bool = False) -> int:
    """Serve until SIGTERM or SIGINT, then drain. Returns the exit status.

    SIGHUP reads keys, limits and engines again, if a file says them; else it is a stop, too.
    read : reads the settings again.  has_file : whether a file of settings is given
    """
    from llmserve.server.reload import Reloader

    stop, stop_now = asyncio.Event(), asyncio.Event()
    reloader, reloading = Reloader(config, read), set[asyncio.Task[None]]()
    starting = asyncio.current_task()

    def on_stop() -> None:
        nonlocal starting
        if starting is not None:  # the server is not ready yet: no request to drain
            starting.cancel()
            starting = None
        elif stop.is_set():
            stop_now.set()
        stop.set()

    def on_hangup() -> None:
        task = asyncio.ensure_future(_reload(reloader))
        reloading.add(task)
        task.add_done_callback(reloading.discard)

    has_file = has_file or config.server.api_key_file is not None
    with _on_signals(on_stop, on_hangup if has_file else None), contextlib.suppress(asyncio.CancelledError):
        async with serving(config, reloader) as (cluster, url):
            await _wait_for_engine(cluster, url)
            starting = None
            gc.collect()
            gc.freeze()  # loaded modules live forever: a full collection that scans these objects stalls every stream
            _print_address(cluster, url, with_key=config.server.api_key_file is not None)
            await stop.wait()
            await _drain(cluster, config.server.drain_s, stop_now)
    return 0


async def _reload(reloader: Reloader) -> None:
    if not reloader.has_parts:
        log.warning("nothing is read again: the server is starting")
        return
    try:
        await reloader.reload()
    except ConfigError as error:
        log.error("nothing is changed: %s", error)
    else:
        log.info("keys, limits and engines were read again")


async def _drain(cluster: LiveCluster, within_s: float, stop_now: asyncio.Event) -> None:
    log.info("draining: new requests are refused, running requests have %.0f s; a second signal stops now", within_s)
    draining = asyncio.ensure_future(cluster.drain(within_s))
    stopping = asyncio.ensure_future(stop_now.wait())
    await asyncio.wait({draining, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not draining.done() or not draining.result():
        log.warning("some requests have not ended and are aborted")
    draining.cancel()


@contextlib.asynccontextmanager
async def serving(config: Config, reloader: Reloader | None = None) -> AsyncIterator[tuple[LiveCluster, str]]:
    """Run the whole server inside the block: engines, predictor, cluster, endpoints. Yields the cluster and base URL.

    reloader : reads the settings again; None: files are read again, by the same settings
    Raises LLMServeError when the server cannot start.
    """
    from llmserve.forecasts import state_file
    from llmserve.gateway.app import App
    from llmserve.http.server import accepting, base_url, check_host, is_loopback, listening_socket
    from llmserve.jobs.endpoints import BatchEndpoints
    from llmserve.jobs.parts import open_jobs
    from llmserve.server.reload import Reloader, engines_part, keys_part
    from llmserve.server.start import checked, start_cluster, warn_of_unserved
    from llmserve.tenants.keys import admin_keys_of, key_limits_of, keys_of, open_ledger
    from llmserve.web.browsers import Browsers
    from llmserve.web.cors import Cors

    key_file, admin = keys_of(config), admin_keys_of(config)
    check_host(config.server.host, may_serve_anyone=bool(key_file.keys) or config.server.anonymous)
    limits = _door_limits(config)
    if config.server.metrics_host is not None and config.server.metrics_port is None:
        raise ConfigError("metrics_host: there is no port for it to listen on: give --metrics-port, too")
    reloader = reloader or Reloader(config)
    config = checked(config)
    async with AsyncExitStack() as stack:
        kept = stack.enter_context(state_file.opened(Path(config.server.state))) if config.server.state else None
        ledger = open_ledger(config, stack)
        server = config.server
        listener = stack.enter_context(listening_socket(server.host, server.port))
        if server.metrics_port is not None:
            state_listener = stack.enter_context(listening_socket(server.metrics_host or LOOPBACK, server.metrics_port))
        cluster, gpus, saver = await start_cluster(config, stack, reloader, kept)
        usage, metrics = await _counted(config, cluster, gpus, saver, stack)
        key_limits = key_limits_of(config, key_file, cluster, metrics, ledger, usage)
        reloader.add(keys_part(key_limits))
        reloader.add(engines_part(config, cluster))
        jobs = await stack.enter_async_context(open_jobs(config, cluster, key_limits))
        traces = _traces(config, cluster, metrics)
        batches = BatchEndpoints(jobs, key_limits.keys) if jobs is not None else None
        on_loopback = is_loopback(server.host)
        browsers = Browsers(server.cors_origin, server.allowed_host, on_loopback=on_loopback)
        app = App(
            *(cluster, metrics, key_limits, config.limits, admin, reloader.reload),
            *(Cors(server.cors_origin), browsers, aliases_of(config.engines.alias), batches),
            *(metrics.meter_of_all, traces),
        )
        if server.metrics_port is not None:
            few = dataclasses.replace(limits, connections_max=METRICS_CONNECTIONS_MAX)
            await stack.enter_async_context(accepting(app.state_handler(), state_listener, few))
            log.info("metrics are at %s/metrics, without a key", base_url(state_listener))
        if traces is not None:
            stack.push_async_callback(traces.close)  # after the door, whose last requests have spans
        door = await stack.enter_async_context(accepting(app, listener, limits))
        metrics.follow_server(door)
        door.followers += _followers(config, traces)
        stack.push_async_callback(cluster.abort)  # before the door closes: clients can still be told
        cluster.start()
        if jobs is not None:
            stack.push_async_callback(jobs.close)
            jobs.start()
            metrics.follow_jobs(jobs.runner.feed)
        warning = asyncio.create_task(warn_of_unserved(config, cluster))
        stack.callback(warning.cancel)
        yield cluster, base_url(listener)


def _door_limits(config: Config) -> DoorLimits:
    from llmserve.http.proxies import TrustedProxies
    from llmserve.http.server import DoorLimits
    from llmserve.jobs.endpoints import FILES

    return DoorLimits(
        config.limits.body_bytes_max,
        config.live.buffer_bytes_max,
        config.limits.buffers_bytes_max,
        config.live.client_stall_s,
        keep_alive_s=config.live.keep_alive_s,
        streamed=(FILES,),
        trusted_proxies=TrustedProxies(config.server.trusted_proxy),
    )


def _traces(config: Config, cluster: LiveCluster, metrics: Metrics) -> Traces | None:
    """What traces requests; None: nothing does, and OpenTelemetry is not imported."""
    if not config.server.traces_sample:
        return None
    from llmserve.observe.traces import Traces, otlp

    return Traces(config.server.traces_sample, lambda: metrics.order, cluster.now_s, otlp())


def _followers(config: Config, traces: Traces | None) -> list[Callable[[Exchange], None]]:
    """Who hears of each request that has ended."""
    from llmserve.observe import access_log

    followers: list[Callable[[Exchange], None]] = [traces.ended] if traces is not None else []
    if config.server.access_log:
        access_log.enable()
        followers.append(access_log.write)
    return followers


async def _counted(
    config: Config, cluster: LiveCluster, gpus: str | None, saver: Saver | None, stack: AsyncExitStack
) -> tuple[KeyUsage | None, Metrics]:
    """What counts the use of keys, None without keys, and the metrics."""
    from llmserve.observe.counters import Families
    from llmserve.observe.energy import meter_of_all
    from llmserve.observe.energy_meters import energy_meters
    from llmserve.observe.key_usage import KeyUsage
    from llmserve.observe.metrics import Metrics
    from llmserve.observe.table import TABLE

    families = Families(TABLE)
    usage = KeyUsage(lambda: cluster.models, families) if config.server.api_key_file else None
    if usage is not None:
        cluster.journal.listen(usage.observe)
    profiles = config.dispatch.profiles()
    meters = await energy_meters(config, cluster, profiles, gpus, stack)
    if usage is not None:
        usage.meter = meter_of_all(meters)
    metrics = Metrics(
        cluster,
        config.scheduling.full_batch,
        meters,
        energy_known=all(profile.energy_known for profile in profiles.values()),
        saver=saver,
        families=families,
    )
    return usage, metrics


@contextlib.contextmanager
def _on_signals(on_stop: Callable[[], None], on_hangup: Callable[[], None] | None) -> Iterator[None]:
    """on_hangup : None: SIGHUP is a stop, unless `nohup` ignores the end of the terminal."""
    loop = asyncio.get_running_loop()
    callbacks = {signal.SIGTERM: on_stop, signal.SIGINT: on_stop}
    if on_hangup is not None or signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        callbacks[signal.SIGHUP] = on_hangup or on_stop
    for number, callback in callbacks.items():
        loop.add_signal_handler(number, callback)
    try:
        yield
    finally:
        for number in callbacks:
            loop.remove_signal_handler(number)


async def _wait_for_engine(
    cluster: LiveCluster, url: str, first_word_s: float = FIRST_WORD_S, word_every_s: float = WORD_EVERY_S
) -> None:
    """Wait for an engine that is ready, and say meanwhile where the server listens and what it waits for."""
    word_at_s = cluster.now_s() + first_word_s
    while not any(cluster.engines_ready.values()):
        await asyncio.sleep(0.05)
        if cluster.now_s() >= word_at_s:
            log.warning("listening on %s; waiting for an engine: %s", url, ", ".join(cluster.engines_ready))
            word_at_s += word_every_s


def _print_address(cluster: LiveCluster, url: str, *, with_key: bool) -> None:
    """Print the server's URL, its page, and an example request."""
    model = next(iter(cluster.models), "MODEL")
    body = {"model": model, "messages": [{"role": "user", "content": "Count from 1 to 20."}]}
    key = " -H 'authorization: Bearer YOUR_KEY'" if with_key else ""
    print(f"llmserve is ready: {url}/v1  (models: {', '.join(cluster.models)})")
    print(f"page: {url}/")
    print(f"\n  curl -s {url}/v1/chat/completions -H 'content-type: application/json'{key} \\")
    print(f"    -d {shlex.quote(json.dumps(body))}\n")
    print("Ctrl-C stops it.", flush=True)
