"""A receiver is told of each batch that has ended, at least once while the server lives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from batch_client import at, client_of, create, ended, jsonl, request
from front import Front, StartFront, until

from llmserve.engines.timed.server import FakeEngine
from llmserve.errors import ConfigError
from llmserve.server.serving import checked
from llmserve.settings.tree import Config, JobsConfig, ServerConfig
from llmserve.webhook.sender import PAUSES_S, Receiver, Sender, secret_of, signature

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


class Inbox:
    """A receiver that keeps what it gets. statuses : of its next answers; afterwards 200"""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.notices: list[tuple[dict[str, str], bytes]] = []
        self.url = ""

    async def take(self, request: web.Request) -> web.Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.notices.append((headers, await request.read()))
        return web.Response(status=self.statuses.pop(0) if self.statuses else 200, text="thanks")

    @property
    def ids(self) -> list[str]:
        return [headers["webhook-id"] for headers, _ in self.notices]


@asynccontextmanager
async def receiving() -> AsyncIterator[Inbox]:
    inbox, app = Inbox(), web.Application()
    app.router.add_post("/hook/", inbox.take)
    async with TestServer(app) as server:
        inbox.url = str(server.make_url("/hook/?tenant=a"))
        yield inbox


@pytest.fixture
async def inbox() -> AsyncIterator[Inbox]:
    async with receiving() as inbox:
        yield inbox


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(slots=8, step_s=0.0005) as engine:
        yield engine


@pytest.fixture
async def front(start_front: StartFront, engine: FakeEngine, inbox: Inbox, tmp_path: Path) -> Front:
    secret = tmp_path / "secret"
    secret.write_text(f"{SECRET}\n")
    secret.chmod(0o600)
    jobs = JobsConfig(batch_webhook=inbox.url, batch_webhook_key_file=str(secret))
    return await start_front(engine, server=ServerConfig(port=0, state=str(tmp_path / "state")), jobs=jobs)


async def metric(front: Front) -> list[str]:
    async with front.session.get(f"{front.url}/metrics") as answer:
        text = await answer.text()
    return [line for line in text.splitlines() if line.startswith("llmserve_batch_webhooks_total")]


async def test_the_receiver_gets_the_batch_as_its_client_sees_it_signed_for_the_official_client(
    front: Front, inbox: Inbox
) -> None:
    client = client_of(front.url)
    batch = await ended(client, await create(client, jsonl([request(number) for number in range(3)])))
    await until(lambda: bool(inbox.notices))
    headers, body = inbox.notices[0]
    async with front.session.get(f"{front.url}/v1/batches/{batch.id}") as answer:
        assert json.loads(body) == await answer.json()
    assert (headers["webhook-id"], headers["content-type"]) == (batch.id, "application/json")
    client.webhooks.verify_signature(body, headers, secret=SECRET)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.verify_signature(body.replace(b'"completed"', b'"failed"'), headers, secret=SECRET)
    assert await metric(front) == ['llmserve_batch_webhooks_total{outcome="sent"} 1.0']


async def test_every_end_of_a_batch_is_told_and_nothing_before_it(
    front: Front, inbox: Inbox, engine: FakeEngine
) -> None:
    client = client_of(front.url)
    failed = await create(client, b"no JSON\n")
    cancelled = await create(client, jsonl([request(1, max_tokens=2000)]))
    await until(lambda: engine.running == 1)
    assert cancelled.id not in inbox.ids, "the batch is in progress"
    await client.batches.cancel(cancelled.id)
    for batch, status in ((failed, "failed"), (cancelled, "cancelled")):
        await at(client, batch, status)
        await until(lambda batch=batch: batch.id in inbox.ids)  # type: ignore[misc]
    statuses = {headers["webhook-id"]: json.loads(body)["status"] for headers, body in inbox.notices}
    assert statuses == {failed.id: "failed", cancelled.id: "cancelled"}


async def test_a_receiver_that_hangs_delays_neither_batches_nor_the_end_of_the_server(
    start_front: StartFront, engine: FakeEngine, tmp_path: Path
) -> None:
    hangs = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{hangs.sockets[0].getsockname()[1]}/"
    jobs = JobsConfig(batch_webhook=url)
    front = await start_front(engine, server=ServerConfig(port=0, state=str(tmp_path / "state")), jobs=jobs)
    client = client_of(front.url)
    for _ in range(2):
        batch = await ended(client, await create(client, jsonl([request(1)])), within_s=20)
        assert batch.status == "completed"


# ---- the sender alone ----------------------------------------------------------------------------------------------


class Told:
    """A sender to a receiver, whose pauses take no time. outcomes : how notices ended"""

    def __init__(self, receiver: Receiver, body: Callable[[], bytes | None] = lambda: b"{}") -> None:
        self.outcomes: list[str] = []
        self.pauses_s: list[float] = []

        async def read(key: str, batch_id: str) -> bytes | None:
            return body()

        async def sleep(seconds: float) -> None:
            self.pauses_s.append(seconds)

        self.sender = Sender(receiver, read, self.outcomes.append, clock=lambda: 1_700_000_000.0, sleep=sleep)


async def test_a_notice_that_is_refused_is_sent_again_with_growing_pauses(inbox: Inbox) -> None:
    inbox.statuses = [500, 302, 429]
    told = Told(Receiver(inbox.url))
    told.sender.notice("key", "batch_1")
    await until(lambda: bool(told.outcomes))
    assert (told.outcomes, told.pauses_s) == (["sent"], list(PAUSES_S[:3]))
    assert inbox.ids == ["batch_1"] * 4
    assert "webhook-signature" not in inbox.notices[0][0], "there is no secret"
    await told.sender.close()


async def test_after_the_last_try_the_notice_is_given_up_with_a_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = Told(Receiver("http://127.0.0.1:9/"))
    told.sender.notice("key", "batch_1")
    await until(lambda: bool(told.outcomes))
    assert (told.outcomes, told.pauses_s) == (["given_up"], list(PAUSES_S))
    assert "the receiver was not told that batch batch_1 has ended" in caplog.text
    await told.sender.close()


async def test_a_store_that_fails_is_read_again_and_a_batch_that_goes_on_elsewhere_is_not_told(inbox: Inbox) -> None:
    answers: list[bytes | Exception | None] = [OSError("the store is away"), b'{"id":"batch_1"}', None]

    def body() -> bytes | None:
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    told = Told(Receiver(inbox.url), body)
    told.sender.notice("key", "batch_1")
    await until(lambda: told.outcomes == ["sent"])
    told.sender.notice("key", "batch_2")
    await until(lambda: not answers)
    await told.sender.close()
    assert inbox.ids == ["batch_1"]


async def test_the_end_of_the_server_gives_up_what_waits_for_its_next_try(inbox: Inbox) -> None:
    outcomes: list[str] = []

    async def read(key: str, batch_id: str) -> bytes:
        return b"{}"

    inbox.statuses = [500]
    sender = Sender(Receiver(inbox.url), read, outcomes.append, sleep=lambda seconds: asyncio.Event().wait())
    sender.notice("key", "batch_1")
    await until(lambda: len(inbox.notices) == 1)
    async with asyncio.timeout(2):
        await sender.close()
    assert outcomes == ["given_up"]


def test_a_signature_is_that_of_standard_webhooks() -> None:
    """The example of standardwebhooks.com."""
    body = b'{"test": 2432232314}'
    made = signature(secret_of(SECRET), "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body)
    assert made == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert secret_of("a plain secret") == b"a plain secret"


@pytest.mark.parametrize(
    ("jobs", "state", "message"),
    [
        ({"batch_webhook": "ftp://a"}, True, "is not a URL such as"),
        ({"batch_webhook": "http://a b/"}, True, "is not a URL such as"),
        ({"batch_webhook": "http://me:pw@a/"}, True, "no credentials in its URL"),
        ({"batch_webhook": "http://a/"}, False, "no effect without --store or --state"),
        ({"batch_webhook_key_file": "/nowhere"}, True, "no effect without --batch-webhook"),
        ({"batch_webhook": "http://a/", "batch_webhook_key_file": "/nowhere"}, True, "cannot read a key"),
        ({"batch_webhook": "http://a/", "batch_webhook_key_file": "/dev/null"}, True, "has no key"),
    ],
)
def test_wrong_settings_are_refused_before_the_start(
    tmp_path: Path, jobs: dict[str, str], state: bool, message: str
) -> None:
    config = Config(server=ServerConfig(state=str(tmp_path)) if state else ServerConfig(), jobs=JobsConfig(**jobs))
    with pytest.raises(ConfigError, match=message):
        checked(config)


def test_a_secret_that_is_no_base64_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("whsec_no base64\n")
    jobs = JobsConfig(batch_webhook="http://a/", batch_webhook_key_file=str(secret))
    with pytest.raises(ConfigError, match="not base64"):
        checked(Config(server=ServerConfig(state=str(tmp_path)), jobs=jobs))
