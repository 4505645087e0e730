"""Where `llmserve status` and `llmserve down` find the cluster."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager

from llmserve.errors import NoAnswer
from llmserve.runtime.extras import need


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", default="llmserve", help="name of the cluster (default: llmserve)")
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="its Ray (default: the one that `llmserve up` has started here)"
    )


def connected(args: argparse.Namespace) -> AbstractContextManager[None]:
    """A connection to the cluster's Ray, for a block. Raises NoAnswer."""
    need("ray", "ray", why="a cluster of several machines")
    from llmserve.machines import local_ray, on_ray

    address = args.address
    if address is None:
        ray = local_ray.running(on_ray.folder_of(args.name))
        if ray is None:
            raise NoAnswer(f"no Ray of cluster {args.name} runs on this machine: name it with --address")
        address = ray.address
    return on_ray.connected(address, args.name)
