"""The front-ends that are compared, all in front of the same engines."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from kit.keys import KEY_FILE
from kit.servers import Server, flags_of, running

from llmserve.engines.process import free_ports
from questions.scale.load import Processes, all_of

ONE, ROUTER, NGINX = "one process", "vllm-router", "nginx"
KEYS = ", keys and limits"  # of a label
SLOTS = 20_000  # of all engines: nothing waits
NGINX_CONF = """
worker_processes 1; pid nginx.pid; error_log stderr error; daemon off;
events {{ worker_connections 16000; }}
http {{
    access_log off; client_max_body_size 16m; keepalive_requests 1000000000;
    client_body_buffer_size 1m; client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi; scgi_temp_path scgi;
    upstream engines {{ {servers} keepalive 16384; keepalive_requests 1000000000; }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
        }}
    }}
}}
"""


@dataclass(frozen=True)
class Side:
    """A front-end. relays : of llmserve; 1: one process for everything; None: another front-end"""

    name: str
    relays: int | None = None
    keys: bool = False

    @property
    def label(self) -> str:
        return self.name + KEYS * self.keys


def of_llmserve(relays: Sequence[int], *, keys: bool = False) -> list[Side]:
    return [Side(ONE if count == 1 else f"{count} relays", count, keys) for count in relays]


@asynccontextmanager
async def serving(
    side: Side, engines: Sequence[str], folder: Path, router: str | None, *flags: str
) -> AsyncIterator[tuple[Server, Processes]]:
    """The side as a server, and its processes by what they do. flags : more of llmserve's"""
    if side.name == ROUTER:
        assert router is not None, "vllm-router is where it was found"

        def command(port: int) -> list[str]:
            (other,) = free_ports(1)
            words = [router, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(other)]
            words += ["--policy", "round_robin", "--log-level", "error", "--max-concurrent-requests", str(SLOTS)]
            return [*words, "--worker-urls", *engines]

        ready = "/health"
    elif side.name == NGINX:

        def command(port: int) -> list[str]:
            servers = "".join(f"server {urlsplit(url).netloc}; " for url in engines)
            file = folder / "nginx.conf"
            file.write_text(NGINX_CONF.format(servers=servers, port=port), encoding="utf-8")
            return [str(nginx()), "-p", str(folder), "-c", str(file)]

        ready = "/health"
    else:

        def command(port: int) -> list[str]:
            words = [sys.executable, "-m", "llmserve", "serve", "--workers", str(side.relays)]
            return [*words, *_flags(side, engines, folder), *flags, "--port", str(port)]

        ready = "/ready"
    async with running(side.label, command, ready=ready) as server:
        yield server, by_kind(server)


def nginx() -> str | None:
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


def _flags(side: Side, engines: Sequence[str], folder: Path) -> list[str]:
    words = [*flags_of("engine", engines), "--slots", str(SLOTS // len(engines)), "--log-level", "error"]
    if side.keys:
        file = folder / "keys.toml"
        file.write_text(KEY_FILE, encoding="utf-8")
        file.chmod(0o600)
        words += ["--api-key-file", str(file)]
    return words


def by_kind(server: Server) -> Processes:
    """The processes of a front-end by what they do. Of llmserve with relays: see workers/processes.py."""
    processes = all_of(server)
    scheduler = [process for process in processes if is_scheduler(process)]
    if not scheduler:
        return {"server": processes}
    parent = scheduler[0].ppid()
    relays = [process for process in processes if process.ppid() == parent and process not in scheduler]
    rest = [process for process in processes if process not in scheduler and process not in relays]
    return {"relays": relays, "scheduler": scheduler, "rest": rest}


def is_scheduler(process: psutil.Process) -> bool:
    """Whether the process listens where relays pass requests on."""
    return any(str(one.laddr).endswith("/requests") for one in process.net_connections(kind="unix"))
