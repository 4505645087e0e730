"""Services and InferencePools, watched through a stand-in of Kubernetes' API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from front import until
from kubernetes_api import KubernetesApi

from llmserve.discovery import kubernetes
from llmserve.discovery.kubernetes import Api, Pool, Service
from llmserve.discovery.source import CannotFind, Source


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[KubernetesApi]:
    async with KubernetesApi(tmp_path / "kubernetes") as api:
        yield api


class Following:
    """Reads a source to its end and on, as a follower does. last : what it told last"""

    def __init__(self) -> None:
        self.last: frozenset[str] | None = None
        self.troubles: list[str] = []

    async def run(self, source: Source) -> None:
        while True:
            try:
                async with aclosing(source.found()) as looks:
                    async for urls in looks:
                        self.last = urls
            except CannotFind as error:
                self.troubles.append(str(error))
                await source.close()
            await asyncio.sleep(0.01)


@asynccontextmanager
async def following(source: Source) -> AsyncIterator[Following]:
    followed = Following()
    task = asyncio.create_task(followed.run(source))
    try:
        yield followed
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await source.close()


def service(api: KubernetesApi, namespace: str = "", port: str = "") -> Service:
    return Service(Api(api.address, api.credentials), namespace, "vllm", port)


def urls(*numbers: int) -> set[str]:
    return {f"http://10.0.0.{number}:8000" for number in numbers}


async def test_a_service_is_listed_once_and_then_watched(api: KubernetesApi) -> None:
    api.slice("vllm-a", {"10.0.0.1": True, "10.0.0.2": False}, 8000)
    api.put("endpointslices", "other", {"kubernetes.io/service-name": "other"}, endpoints=[])
    async with following(service(api)) as seen:
        await until(lambda: seen.last == urls(1) and api.watches == 1)
        api.slice("vllm-a", {"10.0.0.1": True, "10.0.0.2": True}, 8000)
        await until(lambda: seen.last == urls(1, 2))
        api.slice("vllm-b", {"10.0.0.3": True}, 8000)
        await until(lambda: seen.last == urls(1, 2, 3))
        api.delete("endpointslices", "vllm-a")
        await until(lambda: seen.last == urls(3))
    assert api.lists() == 1
    assert api.asked[0] == (
        "/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices",
        {"labelSelector": "kubernetes.io/service-name=vllm"},
    ), "the namespace is the server's own where none is named"


async def test_a_watch_that_breaks_off_goes_on_from_the_last_version(api: KubernetesApi) -> None:
    api.slice("vllm-a", {"10.0.0.1": True}, 8000)
    async with following(service(api)) as seen:
        for number in range(2, 8):
            await until(lambda: api.watches == 1)
            api.drop()
            api.slice("vllm-a", {f"10.0.0.{number}": True}, 8000)
            await until(lambda number=number: seen.last == urls(number))  # type: ignore[misc]
        assert seen.troubles == []
    assert api.lists() == 1, "nothing is listed again"
    assert api.watched_from() == sorted(api.watched_from())


@pytest.mark.parametrize("by_status", [True, False])
async def test_after_an_expired_version_everything_is_listed_again(api: KubernetesApi, by_status: bool) -> None:
    api.gone_by_status = by_status
    api.slice("vllm-a", {"10.0.0.1": True}, 8000)
    async with following(service(api)) as seen:
        await until(lambda: seen.last == urls(1) and api.watches == 1)
        api.slice("vllm-a", {"10.0.0.2": True}, 8000)
        await until(lambda: seen.last == urls(2))
        api.renew_token("while it is away")
        api.credentials.joinpath("token").write_text("not yet")
        api.drop()
        await until(lambda: bool(seen.troubles))
        api.delete("endpointslices", "vllm-a")
        api.slice("vllm-c", {"10.0.0.3": True}, 8000)
        api.forget()
        api.renew_token("while it is away")
        await until(lambda: seen.last == urls(3))
    assert api.lists() == 2


async def test_bookmarks_spare_a_quiet_watch_the_list(api: KubernetesApi) -> None:
    api.slice("vllm-a", {"10.0.0.1": True}, 8000)
    async with following(service(api)) as seen:
        await until(lambda: api.watches == 1)
        for _ in range(3):
            api.put("endpointslices", "other", {"kubernetes.io/service-name": "other"}, endpoints=[])
        api.bookmark("endpointslices")
        api.slice("vllm-a", {"10.0.0.2": True}, 8000)
        await until(lambda: seen.last == urls(2))
        api.drop()
        await until(lambda: len(api.watched_from()) == 2)
        assert int(api.watched_from()[1]) > int(api.watched_from()[0]) + 3
        assert api.lists() == 1


async def test_a_token_is_read_again_for_each_request(api: KubernetesApi) -> None:
    api.slice("vllm-a", {"10.0.0.1": True}, 8000)
    async with following(service(api)) as seen:
        await until(lambda: api.watches == 1)
        api.renew_token("token-2")
        api.drop()
        api.slice("vllm-a", {"10.0.0.2": True}, 8000)
        await until(lambda: seen.last == urls(2))
        assert seen.troubles == []


async def test_what_the_api_refuses_is_told_in_its_own_words(api: KubernetesApi) -> None:
    message = 'endpointslices.discovery.k8s.io is forbidden: User "x" cannot list resource "endpointslices"'
    api.refuse = (403, message)
    with pytest.raises(CannotFind, match=r"403: endpointslices\.discovery\.k8s\.io is forbidden"):
        await anext(service(api).found())
    api.refuse = None
    (api.credentials / "token").unlink()
    with pytest.raises(CannotFind, match="the pod's token of Kubernetes cannot be read"):
        await anext(service(api, "serving").found())


async def test_an_api_of_another_authority_gets_no_token(api: KubernetesApi, tmp_path: Path) -> None:
    async with KubernetesApi(tmp_path / "other") as other:
        asked = Service(Api(other.address, api.credentials), "serving", "vllm")
        with pytest.raises(CannotFind, match=r"gives no answer: .*certificate"):
            await anext(asked.found())
        assert other.asked == []
        await asked.close()


async def test_a_pool_selects_pods_and_its_new_selector_counts(
    api: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "POOL_WATCH_S", 1.3)  # the API takes whole seconds
    api.put(
        "inferencepools", "chat", spec={"selector": {"matchLabels": {"app": "a"}}, "targetPorts": [{"number": 8000}]}
    )
    api.pod("a-1", {"app": "a"}, "10.0.0.1")
    api.pod("a-2", {"app": "a"}, "10.0.0.2", ready=False)
    api.pod("b-1", {"app": "b"}, "10.0.0.3")
    async with following(Pool(Api(api.address, api.credentials), "serving", "chat")) as seen:
        await until(lambda: seen.last == urls(1))
        api.pod("a-2", {"app": "a"}, "10.0.0.2")
        await until(lambda: seen.last == urls(1, 2))
        spec = {"selector": {"matchLabels": {"app": "b"}}, "targetPorts": [{"number": 8000}]}
        api.put("inferencepools", "chat", spec=spec)
        await until(lambda: seen.last == urls(3))
        assert seen.troubles == []


async def test_a_pool_that_is_not_there_is_said(api: KubernetesApi) -> None:
    with pytest.raises(CannotFind, match=r'404: inferencepools.* "chat" not found'):
        await anext(Pool(Api(api.address, api.credentials), "serving", "chat").found())
