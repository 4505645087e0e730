"""A stand-in of Kubernetes' API: lists and watches of objects, with versions, bookmarks, 410s, drops and tokens.

The protocol is that of the API's own documentation ("Efficient detection of changes"): a list has a resourceVersion; a
watch from that version is a stream of JSON lines {"type": ..., "object": ...}; the API forgets old versions, and says
so with the status 410, or with an event ERROR whose object is a Status with the code 410.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from certificates import Authority

KINDS = {"endpointslices": "EndpointSlice", "pods": "Pod", "inferencepools": "InferencePool"}
VERSIONS = {"endpointslices": "discovery.k8s.io/v1", "pods": "v1", "inferencepools": "inference.networking.k8s.io/v1"}


class KubernetesApi:
    """The API, as an async context manager. `credentials` is the folder that a pod would have.

    token        the only right one; `renew_token` changes it here and in the folder
    gone_by_status  whether an expired version is told by the status 410, else by an event
    refuse       status and message of every answer; None: by the objects
    asked        (path, query) of each request
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.credentials = folder / "serviceaccount"
        self.credentials.mkdir(parents=True)
        self.authority = Authority(folder)
        (self.credentials / "ca.crt").write_bytes(self.authority.certificate.read_bytes())
        (self.credentials / "namespace").write_text("serving")
        self.renew_token("token-1")
        self.gone_by_status = False
        self.refuse: tuple[int, str] | None = None
        self.asked: list[tuple[str, dict[str, str]]] = []
        self._objects: dict[str, dict[str, dict[str, Any]]] = {kind: {} for kind in KINDS}
        self._version, self._forgotten = 1000, 0
        self._events: list[tuple[int, str, str, dict[str, Any]]] = []  # version, collection, type, object
        self._changed = asyncio.Event()
        self._watches: set[web.StreamResponse] = set()

    async def __aenter__(self) -> KubernetesApi:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        own = self.authority.issue("apiserver")
        tls.load_cert_chain(own.certificate, own.key)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        self.address = f"127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    # ---- what a test does ----

    def renew_token(self, token: str) -> None:
        self.token = token
        (self.credentials / "token").write_text(token)

    def put(self, collection: str, name: str, labels: Mapping[str, str] | None = None, **fields: Any) -> None:
        """Add or change an object."""
        kind = "MODIFIED" if name in self._objects[collection] else "ADDED"
        self._version += 1
        metadata = {"name": name, "namespace": "serving", "uid": f"uid-{name}", "labels": dict(labels or {})}
        metadata["resourceVersion"] = str(self._version)
        about = {"kind": KINDS[collection], "apiVersion": VERSIONS[collection]}
        self._objects[collection][name] = {**about, "metadata": metadata, **fields}
        self._note(collection, kind, self._objects[collection][name])

    def slice(self, name: str, addresses: Mapping[str, bool], port: int, **fields: Any) -> None:
        """Put an EndpointSlice of the Service `vllm`. addresses : whether each is ready"""
        endpoints = [
            {
                "addresses": [address],
                "conditions": {"ready": ready, "serving": ready, "terminating": False},
                "targetRef": {"kind": "Pod", "namespace": "serving", "name": f"vllm-{address}"},
                "nodeName": "node-1",
            }
            for address, ready in addresses.items()
        ]
        ports = [{"name": "http", "port": port, "protocol": "TCP"}]
        whole = {"addressType": "IPv4", "endpoints": endpoints, "ports": ports, **fields}
        self.put("endpointslices", name, {"kubernetes.io/service-name": "vllm"}, **whole)

    def pod(self, name: str, labels: Mapping[str, str], address: str, *, ready: bool = True) -> None:
        conditions = [
            {"type": "Initialized", "status": "True"},
            {"type": "Ready", "status": "True" if ready else "False"},
        ]
        status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": conditions}
        self.put("pods", name, labels, spec={"containers": []}, status=status)

    def delete(self, collection: str, name: str) -> None:
        gone = self._objects[collection].pop(name)
        self._version += 1
        metadata = {**gone["metadata"], "resourceVersion": str(self._version)}
        self._note(collection, "DELETED", {**gone, "metadata": metadata})

    def forget(self) -> None:
        """Forget all versions before now, as etcd's compaction does."""
        self._version += 1
        self._forgotten = self._version
        self._events.clear()

    def bookmark(self, collection: str) -> None:
        about = {"kind": KINDS[collection], "apiVersion": VERSIONS[collection]}
        self._version += 1
        self._note(collection, "BOOKMARK", {**about, "metadata": {"resourceVersion": str(self._version)}})

    def drop(self) -> None:
        """Cut all watches off, in the middle of a line if need be."""
        for watch in list(self._watches):
            transport = watch._req.transport if watch._req is not None else None
            if transport is not None:
                transport.abort()

    @property
    def watches(self) -> int:
        return len(self._watches)

    def watched_from(self) -> list[str]:
        """The version of each watch so far."""
        return [query["resourceVersion"] for _, query in self.asked if "watch" in query]

    def lists(self) -> int:
        return sum([path.rpartition("/")[2] in KINDS and "watch" not in query for path, query in self.asked])

    def _note(self, collection: str, kind: str, thing: dict[str, Any]) -> None:
        self._events.append((self._version, collection, kind, thing))
        self._changed.set()
        self._changed = asyncio.Event()

    # ---- what the API answers ----

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path, query = request.path, dict(request.query)
        self.asked.append((path, query))
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized", "Unauthorized")
        if self.refuse is not None:
            return _status(self.refuse[0], self.refuse[1], "Forbidden")
        *_, before, last = path.split("/")
        if last in KINDS:
            return await self._watch(request, last, query) if "watch" in query else self._list(last, query)
        if before in KINDS and last in self._objects[before] and path.startswith(f"/apis/{VERSIONS[before]}/"):
            return web.json_response(self._objects[before][last])
        return _status(404, f'{before}.{VERSIONS.get(before, "")} "{last}" not found', "NotFound")

    def _list(self, collection: str, query: Mapping[str, str]) -> web.Response:
        items = [thing for thing in self._objects[collection].values() if _selected(thing, query)]
        about = {"kind": f"{KINDS[collection]}List", "apiVersion": VERSIONS[collection]}
        return web.json_response({**about, "metadata": {"resourceVersion": str(self._version)}, "items": items})

    async def _watch(self, request: web.Request, collection: str, query: Mapping[str, str]) -> web.StreamResponse:
        seen = int(query["resourceVersion"])
        expired = {
            **{"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "reason": "Expired"},
            **{"message": f"too old resource version: {seen} ({self._forgotten})", "code": 410},
        }
        is_old = seen < self._forgotten
        if is_old and self.gone_by_status:
            return web.json_response(expired, status=410)
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        self._watches.add(response)
        try:
            if is_old:
                await response.write(_line("ERROR", expired))
                return response
            async with asyncio.timeout(float(query["timeoutSeconds"])):
                while True:
                    changed = self._changed
                    for version, of, kind, thing in list(self._events):
                        if version > seen and of == collection and (kind == "BOOKMARK" or _selected(thing, query)):
                            await response.write(_line(kind, thing))
                    seen = max([seen, *[version for version, *_ in self._events]])
                    await changed.wait()
        except (TimeoutError, ConnectionError):
            return response
        finally:
            self._watches.discard(response)


def _line(kind: str, thing: Any) -> bytes:
    return msgspec.json.encode({"type": kind, "object": thing}) + b"\n"


def _selected(thing: Mapping[str, Any], query: Mapping[str, str]) -> bool:
    labels = thing["metadata"]["labels"]
    wanted = [pair.partition("=") for pair in query.get("labelSelector", "").split(",") if pair]
    return all(labels.get(name) == value for name, _, value in wanted)


def _status(code: int, message: str, reason: str) -> web.Response:
    about = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return web.json_response({**about, "message": message, "reason": reason, "code": code}, status=code)
