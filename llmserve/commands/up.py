"""Start engines, groups and gateways on a Ray cluster, or bring a running cluster in line with its file.

    llmserve up cluster.toml                          starts a Ray on this machine first
    llmserve up cluster.toml --address auto           uses the Ray that runs here
    llmserve up cluster.toml --plan plan.json         the groups of `llmserve plan`, instead of those in the file

The command ends when everything runs. `llmserve status` shows the cluster, `llmserve down` stops it. After a change of
the file, of its plan or of its keys, run `llmserve up` again: requests in flight are not lost.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from llmserve.errors import ConfigError, NoAnswer
from llmserve.machines.cluster_file import ClusterFile, read_cluster
from llmserve.planning import Instance
from llmserve.runtime.extras import need

LOOPBACK = "127.0.0.1"
POLL_S = 0.5
LINE_EVERY_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="CLUSTER.toml", help="the engines, groups and gateways")
    parser.add_argument("--plan", metavar="PLAN.json", help="file of `llmserve plan`: the groups")
    parser.add_argument("--address", metavar="HOST:PORT", help="a Ray that runs; `auto`: the one on this machine")
    parser.add_argument("--num-cpus", type=int, metavar="N", help="CPUs of the Ray that is started (default: all)")
    parser.add_argument("--num-gpus", type=int, metavar="N", help="GPUs of the Ray that is started (default: all)")
    parser.add_argument(
        "--wait-s",
        type=float,
        default=900.0,
        metavar="X",
        help="longest wait until everything runs (default %(default)g)",
    )


def main(args: argparse.Namespace) -> int:
    need("ray", "ray", why="a cluster of several machines")
    file = read_cluster(args.file, args.plan)
    keys = _keys_text(file)
    from llmserve.machines import on_ray
    from llmserve.machines.controller import Desired
    from llmserve.machines.processes import Secrets, engines_of

    made = Secrets(*(f"sk-{secrets.token_urlsafe(32)}" for _ in range(3)))
    engines_of(file, made)  # raises ConfigError before anything starts
    address, file = _ray_for(file, args)
    with on_ray.connected(address, file.name):
        before = on_ray.known(file.name)
        desired = Desired(
            file=file,
            plan=file.first_plan(),
            secrets=made if before is None else before.secrets,
            keys=keys,
            instance=None if file.planning.instance is None else Instance.load(file.planning.instance),
            owners={} if before is None else before.owners,
            replicas={} if before is None else before.replicas,
        )
        on_ray.bring_up(desired)
        report = _when_ready(file.name, args.wait_s)
    _print_gateways(file.name, report)
    return 0


def _keys_text(file: ClusterFile) -> str | None:
    """The text of the gateways' key file, which is checked here: not only where a gateway starts."""
    from llmserve.tenants.key_file import read_key_file

    path = file.gateway.api_key_file
    if path is None:
        return None
    read_key_file(Path(path))
    return Path(path).read_text(encoding="utf-8")


def _ray_for(file: ClusterFile, args: argparse.Namespace) -> tuple[str, ClusterFile]:
    """The address of Ray, which is started if none is given: then everything is on loopback."""
    from llmserve.machines import local_ray
    from llmserve.machines.on_ray import folder_of

    if args.address is not None:
        if args.num_cpus is not None or args.num_gpus is not None:
            raise ConfigError("--num-cpus and --num-gpus are for a Ray that is started, not for --address")
        anonymous = file.gateway.settings.get("server", {}).get("anonymous", False)
        if file.host != LOOPBACK and file.gateway.api_key_file is None and not anonymous:
            raise ConfigError(
                "other machines can reach the gateways, and no API key is required: give api_key_file in [gateway], "
                'anonymous = true in [gateway.settings.server], or host = "127.0.0.1" on a single machine'
            )
        return args.address, file
    state = folder_of(file.name)
    ray = local_ray.running(state)
    if ray is None:
        print("starting Ray on this machine", file=sys.stderr, flush=True)
        ray = local_ray.start(state, args.num_cpus, args.num_gpus)
    return ray.address, replace(file, host=file.host or LOOPBACK)


def _when_ready(cluster: str, within_s: float) -> dict[str, Any]:
    """The report, once everything runs. Raises NoAnswer, which names what does not."""
    from llmserve.machines.on_ray import report_of

    began_s = said_s = time.monotonic()
    while True:
        time.sleep(POLL_S)
        report = report_of(cluster)
        if report["ready"]:
            return report
        missing = [_told(row) for row in report["processes"] if row["state"] != "running"]
        now_s = time.monotonic()
        if now_s - began_s > within_s:
            raise NoAnswer(f"not everything runs after {within_s:g} s: {', '.join(missing)}")
        if now_s - said_s > LINE_EVERY_S:
            said_s = now_s
            print(f"waiting for {', '.join(missing)} ({now_s - began_s:.0f} s)", file=sys.stderr, flush=True)


def _told(row: dict[str, Any]) -> str:
    ended = f", {row['last_end'].splitlines()[0]}" if row.get("last_end") else ""
    return f"{row['name']} ({row['state']}{ended})"


def _print_gateways(cluster: str, report: dict[str, Any]) -> None:
    gateways = [row["url"] for row in report["processes"] if row["kind"] == "gateway"]
    print(f"cluster {cluster} is ready: {', '.join(f'{url}/v1' for url in gateways)}")
