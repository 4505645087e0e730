"""Several machines: what is lost when parts are killed, what groups add up to, and what a gateway costs.

    python scripts/lab machines kills --count 100 --output docs/results/machines.json
    python scripts/lab machines head --output docs/results/machines.json
    python scripts/lab machines groups --output docs/results/machines.json
    python scripts/lab machines hop --output docs/results/machines.json

All on this machine: a Ray head, and worker nodes that are processes, with timed engines. `kills` kills an engine, a
group's server, a gateway, a keeper (the actor that keeps one of these), or a whole worker node, at random by --seed,
and waits until everything runs before the next; `head` kills Ray's head for 20 s. `groups` measures groups together and
each alone, in turns; `hop` adds a gateway before a server, in turns. Parts of an earlier run stay in the file.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
from kit.arguments import add_results, numbers, parser_of
from kit.progress import log
from kit.results import day_and_machine, read_parts, rounded, write_json

MODELS = ["left", "right"]
DOORS = 2
CLUSTER = """
name = "lab"
host = "127.0.0.1"
group_cpus = 0.5

[[engine]]
name = "left"
kind = "timed"
model = "left"
replicas = 2
cpus = 1
args = ["--step-s", "0.05", "--slots", "16"]

[[engine]]
name = "right"
kind = "timed"
model = "right"
replicas = 2
cpus = 1
args = ["--step-s", "0.05", "--slots", "16"]

[[group]]
name = "left"
gpus = 2
models = ["left"]

[[group]]
name = "right"
gpus = 2
models = ["right"]

[gateway]
count = 2
cpus = 0.5
port = {port}
"""
NODES, CPUS = 3, 4  # 6 of 12 are used: two nodes have room for all


async def kills(args: Any) -> dict[str, Any]:
    from questions.machines.clients import Clients
    from questions.machines.kills import KINDS, kill_one, summary, until_back
    from questions.machines.nodes import nodes

    rng = np.random.default_rng(args.seed)
    kinds = [(args.kinds or KINDS)[number % len(args.kinds or KINDS)] for number in range(args.count)]
    rng.shuffle(kinds)
    rows = []
    with nodes(NODES, CPUS, args.logs) as ray_nodes:
        gateways = _up(ray_nodes)
        clients = Clients(gateways, MODELS, args.rate, args.seed)
        clients.start()
        await asyncio.sleep(3.0)
        for number, kind in enumerate(kinds):
            await asyncio.sleep(float(rng.uniform(0.5, 2.0)))
            victim = await kill_one(ray_nodes, "lab", kind, rng)
            killed_s = time.monotonic()
            served_s, whole_s = await until_back("lab", clients, MODELS, killed_s, victim.pids)
            for node in ray_nodes.workers:
                if node.process.poll() is not None:
                    await asyncio.to_thread(node.start_again)
            rows.append({"kind": kind, "name": victim.name, "served_s": served_s, "whole_s": whole_s})
            log(f"{number + 1}/{len(kinds)} {victim.name}: served after {served_s:.1f} s, whole after {whole_s:.1f} s")
            if args.stop_after_s and time.monotonic() - args.began_s > args.stop_after_s:
                break
        await clients.stop()
    return {"seed": args.seed, "rate_per_s": args.rate, "kills": rows, **summary(clients.asked), **_by_kind(rows)}


def _by_kind(rows: list[dict[str, Any]]) -> dict[str, Any]:
    kinds = sorted({row["kind"] for row in rows})
    return {
        "by_kind": {
            kind: {
                "kills": sum(row["kind"] == kind for row in rows),
                **{
                    f"{name}_{which}": float(of([row[name] for row in rows if row["kind"] == kind]))
                    for name in ("served_s", "whole_s")
                    for which, of in (("median", np.median), ("max", max))
                },
            }
            for kind in kinds
        }
    }


async def head(args: Any) -> dict[str, Any]:
    """Kill Ray's head for args.away_s, while clients ask."""
    from questions.machines.clients import Clients
    from questions.machines.kills import report, summary, until_back
    from questions.machines.nodes import nodes

    with nodes(NODES, CPUS) as ray_nodes:
        gateways = _up(ray_nodes)
        clients = Clients(gateways, MODELS, args.rate, args.seed)
        clients.start()
        await asyncio.sleep(5.0)
        before = {row["name"]: row["pid"] for row in (await report("lab"))["processes"]}
        await asyncio.to_thread(ray_nodes.head.kill)
        killed_s = time.monotonic()
        await asyncio.sleep(args.away_s)
        log(f"the head was away for {args.away_s:g} s: {summary(clients.asked)['ends']}")
        # `ray start` would take the nodes of this machine for a head that runs already.
        (ray_nodes.folder / "ray_current_cluster").unlink(missing_ok=True)
        await asyncio.to_thread(ray_nodes.head.start_again)
        started_s = time.monotonic()
        _reconnect(ray_nodes)
        _, whole_s = await until_back("lab", clients, MODELS, started_s, frozenset())
        after = {row["name"]: row.get("pid") for row in (await report("lab"))["processes"]}
        await clients.stop()
    kept = sum(after.get(name) == pid for name, pid in before.items())
    times = {"away_s": started_s - killed_s, "reports_again_after_s": whole_s}
    return {"seed": args.seed, **times, "processes": len(before), "processes_kept": kept, **summary(clients.asked)}


def _reconnect(ray_nodes: Any) -> None:
    import ray

    from llmserve.machines import on_ray

    ray.shutdown()
    on_ray.connect(ray_nodes.address, "lab")


def _up(ray_nodes: Any, text: str = CLUSTER) -> list[str]:
    """Bring the cluster up, and connect this process to its Ray. Returns the gateways' URLs."""
    from llmserve.__main__ import main as llmserve
    from llmserve.engines.process import free_port
    from llmserve.machines import on_ray

    file = Path(ray_nodes.folder) / "cluster.toml"
    port = next(port for port in iter(free_port, None) if port < 60_000)
    file.write_text(text.replace("{port}", str(port)))
    assert llmserve(["up", str(file), "--address", ray_nodes.address]) == 0
    on_ray.connect(ray_nodes.address, "lab")
    rows = on_ray.report_of("lab")["processes"]
    return [row["url"] for row in rows if row["kind"] == "gateway"]


# ---- groups and gateways without kills
# --------------------------------------------------------------------------------

GROUP_ENGINE = ("--step-s", "0.05", "--slots", "8")  # an engine that sleeps: 8 answers a second
GROUP_TOKENS = 20
CONNECTIONS = 12  # more than slots: some always wait


async def groups(args: Any) -> dict[str, Any]:
    """Groups together, and each alone, through one entrance."""
    from kit.client import session_of

    from questions.machines.servers import Load, body_of, cpu_s, gateway_and_groups

    models = [f"m{number}" for number in range(max(args.groups))]
    rows = []
    async with gateway_and_groups(models, *GROUP_ENGINE) as (gateway, servers), session_of() as session:
        loads = [Load(session, gateway.url, body_of(model, GROUP_TOKENS)) for model in models]
        for load in loads:
            await load.run(CONNECTIONS, 2.0)  # the first answers teach the engines' slots
        for number in range(args.rounds):
            alone = [await load.run(CONNECTIONS, args.seconds) for load in loads]
            for count in args.groups:
                before_s, began_s = cpu_s([gateway, *servers]), time.monotonic()
                together = await asyncio.gather(*(load.run(CONNECTIONS, args.seconds) for load in loads[:count]))
                answers = sum(len(load.latencies_s) for load in loads[:count])
                ratio = sum(together) / sum(alone[:count])
                cpu_ms = 1e3 * (cpu_s([gateway, *servers]) - before_s) / answers
                took_s = time.monotonic() - began_s
                rows.append({"groups": count, "per_s": sum(together), "ratio": ratio, "cpu_ms_per_request": cpu_ms})
                log(f"round {number + 1}: {count} groups: {sum(together):.1f}/s, {ratio:.3f} of alone, {took_s:.0f} s")
    return {"rows": rows, "medians": _medians(rows, "groups")}


async def hop(args: Any) -> dict[str, Any]:
    """An instant engine directly, behind a group's server, and behind a gateway and this server, in turns."""
    from kit.client import session_of

    from questions.machines.servers import KEY, Load, body_of, cpu_s, gateway_and_groups

    rows = []
    async with gateway_and_groups(["m"], "--step-s", "0") as (gateway, (group,)), session_of() as session:
        engine_url = (await _engine_url(session, group.url, KEY)).rstrip("/")
        body = body_of("m", 1)
        through = {
            "engine": (Load(session, engine_url, body), []),
            "group": (Load(session, group.url, body, KEY), [group]),
            "gateway and group": (Load(session, gateway.url, body), [gateway]),
        }
        for number in range(args.rounds):
            for name, (load, servers) in through.items():
                await load.run(1, args.seconds)
                alone_ms, before_s = load.latency_ms_p05, cpu_s(servers)
                per_s = await load.run(32, args.seconds)
                answers = len(load.latencies_s)
                cpu_ms = 1e3 * (cpu_s(servers) - before_s) / max(1, answers)
                rows.append({"through": name, "latency_ms": alone_ms, "per_s": per_s, "cpu_ms_per_request": cpu_ms})
            log(f"round {number + 1}: {[(row['through'], round(row['latency_ms'], 2)) for row in rows[-3:]]}")
    medians = _medians(rows, "through")
    # Of the round that other work disturbed least.
    best = {name: min(row["latency_ms"] for row in rows if row["through"] == name) for name in through}
    hop_ms, gateway_ms = best["group"] - best["engine"], best["gateway and group"] - best["group"]
    cpu = medians["gateway and group"]["cpu_ms_per_request"] / medians["group"]["cpu_ms_per_request"]
    return {
        "rows": rows,
        "medians": medians,
        "best_ms": best,
        "gateway_hop_over_single_hop": gateway_ms / hop_ms,
        "gateway_cpu_over_single": cpu,
    }


async def _engine_url(session: Any, url: str, key: str) -> str:
    """The engine's address, as a group's answer names it."""
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "hello"}]}
    headers = {"authorization": f"Bearer {key}"}
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
        return f"http://{response.headers['x-llmserve-engine']}"


def _medians(rows: list[dict[str, Any]], by: str) -> dict[str, dict[str, float]]:
    names = list(dict.fromkeys(row[by] for row in rows))
    return {
        str(name): {
            field: float(np.median([row[field] for row in rows if row[by] == name])) for field in rows[0] if field != by
        }
        for name in names
    }


PARTS = {"kills": kills, "head": head, "groups": groups, "hop": hop}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--count", type=int, default=100, help="kills")
    parser.add_argument(
        "--kinds", nargs="+", help="what is killed: engine, group, gateway, keeper, node (default: all)"
    )
    parser.add_argument("--rate", type=float, default=12.0, help="requests a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--away-s", type=float, default=20.0, help="how long the head is away")
    parser.add_argument("--groups", type=numbers, default=(2, 4, 8), help="numbers of groups (default 2,4,8)")
    parser.add_argument("--rounds", type=int, default=3, help="of groups and hop")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each load, of groups and hop")
    parser.add_argument("--stop-after-s", type=float, help="begin no further kill after this time")
    parser.add_argument("--logs", type=Path, help="of kills: folder for the logs of Ray and of all processes")
    add_results(parser)
    args = parser.parse_args()
    args.began_s = time.monotonic()
    result = asyncio.run(PARTS[args.part](args))
    parts = {**read_parts(args.output), args.part: rounded({**day_and_machine(), **result})}
    write_json(args.output, parts)
    shown = {name: value for name, value in result.items() if name not in ("kills", "rows")}
    log(str(shown))
