"""Stop a cluster: gateways refuse new requests and end those in flight, then groups and engines end.

Whatever does not end is killed, so that the command ends within --drain-s and half a minute.

The Ray that `llmserve up` has started is stopped, too; a Ray given by --address goes on.
"""

from __future__ import annotations

import argparse

from llmserve.machines import address as cluster_address


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cluster_address.add_arguments(parser)
    parser.add_argument(
        "--drain-s",
        type=float,
        default=45.0,
        metavar="X",
        help="longest time for requests in flight (default %(default)g)",
    )


def main(args: argparse.Namespace) -> int:
    with cluster_address.connected(args):
        from llmserve.machines import local_ray, on_ray

        on_ray.take_down(args.name, args.drain_s)
    state = on_ray.folder_of(args.name)
    if args.address is None and (own := local_ray.running(state)) is not None:
        local_ray.stop(state, own)
    print(f"cluster {args.name} is down")
    return 0
