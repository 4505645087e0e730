"""Services and InferencePools of Kubernetes, watched through its API with the credentials of the server's own pod."""

from __future__ import annotations

import asyncio
import os
import random
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Generic, TypeVar
from urllib.parse import urlencode

import msgspec

from llmserve.discovery.endpoints import EndpointSlice, InferencePool, Pod, of_pods, of_slices
from llmserve.discovery.mirror import GONE, Expired, Mirror, Refused, Status
from llmserve.discovery.source import CannotFind
from llmserve.http.client import HttpClient
from llmserve.http.connecting import HttpError, printable

CREDENTIALS = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CONNECT_S, ANSWER_S = 5.0, 30.0
WATCH_S = 240.0  # of one watch, after which the next one goes on
POOL_WATCH_S = 30.0  # the same of pods, between two looks at their pool
SILENCE_S = 15.0  # beyond the end of a watch: then its connection is dead
EVENT_BYTES_MAX = 16 << 20
SERVICE_LABEL = "kubernetes.io/service-name"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices"
PODS = "/api/v1/namespaces/{}/pods"
POOLS = (  # by version, the newest first
    "/apis/inference.networking.k8s.io/v1/namespaces/{}/inferencepools/{}",
    "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/{}/inferencepools/{}",
)

T = TypeVar("T")


class Api:
    """Kubernetes' API, as pods reach it. Each request reads the token again, which is renewed every hour.

    address  host:port.  credentials : folder with `token`, `ca.crt` and `namespace`
    """

    def __init__(self, address: str, credentials: Path = CREDENTIALS) -> None:
        self._address, self._credentials = address, credentials
        self._open: HttpClient | None = None

    @classmethod
    def of_this_pod(cls) -> Api | None:
        """The API of the cluster in which this process runs; None: it runs in none."""
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host or not (CREDENTIALS / "token").is_file():
            return None
        return cls(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", CREDENTIALS)

    def namespace(self) -> str:
        """The server's own. Raises CannotFind."""
        return self._read("namespace")

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> bytes:
        """Raises CannotFind, Refused."""
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await self._client().answer("GET", _with(path, query), self._headers())
        except (HttpError, TimeoutError) as error:
            raise self._unreachable(error) from error
        if answer.status != 200:
            raise _refusal(answer.status, answer.body, answer.headers.get(b"retry-after"))
        return answer.body

    async def lines(self, path: str, query: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """The lines of a watch, until the API ends it or the connection breaks. Raises CannotFind, Refused."""
        client = self._client()
        try:
            response = await client.request(client.opening("GET", _with(path, query), self._headers()))
        except HttpError as error:
            raise self._unreachable(error) from error
        try:
            if response.status != 200:
                body = await response.read(EVENT_BYTES_MAX)
                raise _refusal(response.status, body, response.headers.get(b"retry-after"))
            rest = b""
            while data := await response.next_bytes():
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if line.strip():
                        yield line
                if len(rest) > EVENT_BYTES_MAX:
                    raise CannotFind(f"an event of more than {EVENT_BYTES_MAX:,} bytes")
        except HttpError:
            return  # a watch may break off at any time: the next one goes on from the last version
        finally:
            response.close()

    async def close(self) -> None:
        client, self._open = self._open, None
        if client is not None:
            await client.close()

    def _client(self) -> HttpClient:
        if self._open is None:
            try:
                tls = ssl.create_default_context(cafile=str(self._credentials / "ca.crt"))
            except (OSError, ssl.SSLError) as error:
                raise CannotFind(f"the authority of Kubernetes' API cannot be read: {error}") from error
            tls.verify_flags &= ~ssl.VERIFY_X509_STRICT  # some clusters' authorities lack what this asks for
            longest_s = WATCH_S + SILENCE_S
            self._open = HttpClient(
                f"https://{self._address}", connect_s=CONNECT_S, idle_s=longest_s, answer_s=longest_s, tls=tls
            )
        return self._open

    def _headers(self) -> dict[str, str]:
        token = self._read("token")
        return {"authorization": f"Bearer {token}", "accept": "application/json", "user-agent": "llmserve"}

    def _read(self, name: str) -> str:
        try:
            return (self._credentials / name).read_text("ascii").strip()
        except (OSError, ValueError) as error:
            raise CannotFind(f"the pod's {name} of Kubernetes cannot be read: {error}") from error

    def _unreachable(self, error: HttpError | TimeoutError) -> CannotFind:
        why = str(error) or f"nothing came within {ANSWER_S:g} s"
        return CannotFind(f"Kubernetes' API at {self._address} gives no answer: {why}")


def _with(path: str, query: Mapping[str, str] | None) -> str:
    return f"{path}?{urlencode(query)}" if query else path


def _refusal(status: int, body: bytes, retry_after: bytes | None) -> Exception:
    try:
        message = msgspec.json.decode(body, type=Status).message
    except msgspec.MsgspecError:
        message = ""
    text = printable(message) or "no reason given"
    if status in (429, 503) and retry_after is not None and retry_after.isdigit():
        return CannotFind(f"Kubernetes' API answers {status}: {text}", after_s=float(retry_after))
    return Refused(status, f"Kubernetes' API answers {status}: {text}")


class Watched(Generic[T]):
    """Objects that one query selects, listed once and then watched.

    query : the selector, as the API takes it
    """

    def __init__(self, api: Api, path: str, query: Mapping[str, str], kind: type[T]) -> None:
        self._api, self._path, self._query = api, path, dict(query)
        self._mirror = Mirror(kind)

    async def changes(self, watch_s: float) -> AsyncGenerator[dict[str, T], None]:
        """All objects: first, and after each change, until the watch ends; a further call goes on with the next watch.

        Raises CannotFind. A list after an expired version takes the place of all that was known at once, so
        nothing is missing meanwhile.
        """
        mirror = self._mirror
        try:
            if not mirror.version:
                mirror.listed(await self._api.get(self._path, self._query))
            yield mirror.objects
            seconds = str(round(watch_s * random.uniform(0.8, 1.0)))
            further = {"watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": seconds}
            query = {**self._query, **further, "resourceVersion": mirror.version}
            async with aclosing(self._api.lines(self._path, query)) as lines:
                async for line in lines:
                    if mirror.take(line):
                        yield mirror.objects
        except Expired:
            return
        except Refused as error:
            if error.code == GONE:
                mirror.version = ""
                return
            raise CannotFind(str(error)) from error
        except msgspec.MsgspecError as error:
            mirror.version = ""
            raise CannotFind(f"Kubernetes' API says what llmserve does not understand: {error}") from error


class Service:
    """The ready endpoints of a Service, by its EndpointSlices. port : see endpoints.of_slices"""

    def __init__(self, api: Api, namespace: str, name: str, port: str = "", scheme: str = "http") -> None:
        self._api, self._namespace, self._name = api, namespace, name
        self._port, self._scheme = port, scheme
        self._slices: Watched[EndpointSlice] | None = None

    async def found(self) -> AsyncGenerator[frozenset[str], None]:
        if self._slices is None:
            path = SLICES.format(self._namespace or self._api.namespace())
            query = {"labelSelector": f"{SERVICE_LABEL}={self._name}"}
            self._slices = Watched(self._api, path, query, EndpointSlice)
        async with aclosing(self._slices.changes(WATCH_S)) as changes:
            async for slices in changes:
                yield of_slices(slices.values(), self._scheme, self._port)

    async def close(self) -> None:
        await self._api.close()


class Pool:
    """The ready pods that an InferencePool selects, at its ports. The pool is read again between two watches."""

    def __init__(self, api: Api, namespace: str, name: str, scheme: str = "http") -> None:
        self._api, self._namespace, self._name, self._scheme = api, namespace, name, scheme
        self._labels: dict[str, str] = {}
        self._pods: Watched[Pod] | None = None

    async def found(self) -> AsyncGenerator[frozenset[str], None]:
        namespace = self._namespace or self._api.namespace()
        spec = (await self._pool(namespace)).spec
        if not spec.labels or not spec.ports:
            raise CannotFind(f"the InferencePool {self._name} has no selector, or no port")
        if self._pods is None or spec.labels != self._labels:
            self._labels = spec.labels
            query = {"labelSelector": ",".join(f"{name}={value}" for name, value in sorted(spec.labels.items()))}
            self._pods = Watched(self._api, PODS.format(namespace), query, Pod)
        async with aclosing(self._pods.changes(POOL_WATCH_S)) as changes:
            async for pods in changes:
                yield of_pods(pods, self._scheme, spec.ports)

    async def _pool(self, namespace: str) -> InferencePool:
        for path in POOLS:
            try:
                body = await self._api.get(path.format(namespace, self._name))
                return msgspec.json.decode(body, type=InferencePool)
            except Refused as error:
                refused = error
                if error.code != 404:
                    break
            except msgspec.MsgspecError as error:
                raise CannotFind(f"the InferencePool {self._name} is not understood: {error}") from error
        raise CannotFind(str(refused)) from refused

    async def close(self) -> None:
        await self._api.close()
