"""Stop a cluster: doors refuse new requests and end those in flight, then groups and engines end.

The Ray that `llmserve up` has started is stopped, too; a Ray given by --address goes on.
"""

from __future__ import annotations

import argparse

from llmserve import cluster_address


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cluster_address.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    cluster_address.connect(args)
    import ray

    from llmserve.machines import local_ray, on_ray

    on_ray.take_down(args.name)
    ray.shutdown()
    state = on_ray.folder_of(args.name)
    if args.address is None and (own := local_ray.running(state)) is not None:
        local_ray.stop(state, own)
    print(f"cluster {args.name} is down")
    return 0
