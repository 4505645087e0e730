"""Tokens of an identity provider in place of keys: which are refused, and what they count for."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from front import StartFront, until
from issuer import Issuer, Key, claims, key_set, signed

from llmserve.engines.timed.server import FakeEngine
from llmserve.errors import ConfigError, RequestError, Unauthorized, Unavailable
from llmserve.server.serving import checked
from llmserve.settings.tree import Config, EngineConfig, ServerConfig
from llmserve.tenants import issuer_keys
from llmserve.tenants import tokens as tokens_module
from llmserve.tenants.authentication import Keys
from llmserve.tenants.tokens import TokenRules, Tokens

RULES = TokenRules("https://issuer", "llmserve")


@pytest.fixture(scope="module")
def key() -> Key:
    return Key("k1")


def checking(*keys: Key, rules: TokenRules = RULES, **clocks: Callable[[], float]) -> Keys:
    tokens = Tokens(rules, **clocks)
    tokens.use(key_set(*keys))
    return Keys({"bob": "sk-1"}, tokens)


def bearer(token: str) -> str:
    return f"Bearer {token}"


def refusal(keys: Keys, token: str) -> str:
    with pytest.raises(RequestError) as refused:
        keys.authenticate(bearer(token))
    return f"{refused.value.status} {refused.value}"


def part(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
def test_a_token_that_the_issuer_has_signed_is_an_account(algorithm: str) -> None:
    own = Key("k", algorithm)
    keys = checking(own)
    for _ in range(2):
        assert keys.authenticate(bearer(signed(own))) == "jwt:alice"
    assert keys.authenticate("Bearer sk-1") == "bob", "keys are keys as before"
    assert refusal(keys, "sk-2") == "401 the API key is wrong"


def test_wrong_tokens_are_refused_and_say_why(key: Key) -> None:
    keys, now_s = checking(key), int(time.time())
    stranger = Key("k1")
    assert "no token that the issuer has signed" in refusal(keys, signed(stranger)), "another key of the same name"
    assert "has expired" in refusal(keys, signed(key, exp=now_s - 60))
    assert "not valid yet" in refusal(keys, signed(key, nbf=now_s + 600))
    assert "another audience" in refusal(keys, signed(key, aud="others"))
    assert "no claim `aud`" in refusal(keys, signed(key, aud=None))
    assert "another issuer" in refusal(keys, signed(key, iss="https://other"))
    assert "no claim `exp`" in refusal(keys, signed(key, exp=None))
    assert "no claim `sub`" in refusal(keys, signed(key, sub=None))
    head, body, signature = signed(key).split(".")
    assert refusal(keys, f"{head}.{part(claims(sub='root'))}.{signature}").startswith("401")
    assert refusal(keys, f"{head}.{body}.").startswith("401")
    assert refusal(keys, "a.b.c").startswith("401")
    assert "too long" in refusal(keys, signed(key, more="x" * 20_000))


def test_a_tokens_header_never_chooses_how_it_is_checked(key: Key) -> None:
    keys = checking(key)
    for algorithm in ("none", "None", "NONE"):
        unsigned = f"{part({'alg': algorithm, 'kid': 'k1', 'typ': 'JWT'})}.{part(claims())}."
        assert refusal(keys, unsigned).startswith("401")
        assert refusal(keys, unsigned.replace("k1", "k9")).startswith("401")
    public = json.dumps(key.jwk).encode()
    signing = f"{part({'alg': 'HS256', 'kid': 'k1'})}.{part(claims())}"
    digest = hmac.new(public, signing.encode(), hashlib.sha256).digest()
    forged = f"{signing}.{base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"
    assert refusal(keys, forged).startswith("401"), "the public key is no secret"
    secret = {"kty": "oct", "k": "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LXNlY3JldA", "kid": "s", "alg": "HS256"}
    assert Tokens(RULES).use(json.dumps({"keys": [secret]}).encode()) == 0, "a shared secret signs no token"


def test_a_key_that_is_not_known_is_looked_for_once_in_a_while(key: Key) -> None:
    now_s = 0.0
    keys = checking(key, clock=lambda: now_s)
    tokens = keys.tokens
    assert tokens is not None
    fresh = Key("k2")
    assert refusal(keys, signed(fresh)).startswith("503"), "the client asks again, and is served then"
    assert tokens.wanted.is_set()
    assert "does not show" in refusal(keys, signed(fresh))
    now_s = 11.0
    assert refusal(keys, signed(fresh)).startswith("503")
    tokens.use(key_set(key, fresh))
    assert keys.authenticate(bearer(signed(fresh))) == "jwt:alice"
    tokens.use(key_set(fresh))
    assert refusal(keys, signed(key)).startswith("401"), "the issuer shows the old key no more"


def test_what_is_remembered_ends_with_the_token_and_with_its_key(key: Key) -> None:
    wall_s = time.time()
    keys = checking(key, wall_clock=lambda: wall_s)
    token = signed(key, exp=int(wall_s) - 10)
    assert keys.authenticate(bearer(token)) == "jwt:alice", "clocks may differ"
    token = signed(key)
    assert keys.authenticate(bearer(token)) == "jwt:alice"
    assert keys.tokens is not None
    keys.tokens.use(key_set(Key("k2")))
    assert refusal(keys, token).startswith(("401", "503"))


def test_tokens_that_are_remembered_are_bounded(key: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "KNOWN_MAX", 3)
    keys = checking(key)
    for number in range(5):
        assert keys.authenticate(bearer(signed(key, sub=f"u{number}"))) == f"jwt:u{number}"
    assert keys.tokens is not None
    assert len(keys.tokens._known) == 3


def test_a_name_is_no_stream_of_another_account_nor_a_key(key: Key) -> None:
    keys = checking(key)
    assert keys.authenticate(bearer(signed(key, sub="team/bob"))) == "jwt:team%2Fbob"
    assert keys.authenticate(bearer(signed(key, sub="bob"))) == "jwt:bob"
    assert "no claim `sub` with a name" in refusal(keys, signed(key, sub="a\nb"))
    assert "no claim `sub` with a name" in refusal(keys, signed(key, sub=["a"]))


def test_a_tenant_is_one_of_those_that_have_limits(key: Key) -> None:
    keys = checking(key, rules=TokenRules("https://issuer", "llmserve", tenant_claim="org"))
    assert keys.tokens is not None
    assert keys.authenticate(bearer(signed(key, org="red"))) == "jwt:red"
    keys.tokens.allow(frozenset({"blue"}))
    assert "the tenant 'red' is not known here" in refusal(keys, signed(key, org="red"))
    assert "no claim `org`" in refusal(keys, signed(key))


def test_nothing_is_believed_before_the_issuers_keys_are_known(key: Key) -> None:
    keys = Keys({}, Tokens(RULES))
    assert keys.required
    with pytest.raises(Unavailable):
        keys.authenticate(bearer(signed(key)))
    with pytest.raises(Unauthorized):
        keys.authenticate(None)


# ---- served ---------------------------------------------------------------------------------------------------------


async def test_a_server_reads_the_issuers_keys_and_follows_their_rotation(start_front: StartFront) -> None:
    first, second = Key("k1"), Key("k2")
    async with FakeEngine(step_s=0) as engine, Issuer(first) as issuer:
        front = await start_front(engine, server=ServerConfig(port=0, jwt_issuer=issuer.url, jwt_audience="llmserve"))

        async def ask(token: str) -> int:
            async with front.post(headers={"authorization": bearer(token)}, max_tokens=2) as response:
                await response.read()
                return int(response.status)

        assert issuer.asked == ["/.well-known/openid-configuration", "/keys"]
        assert await ask(issuer.token(first)) == 200
        assert await ask("") == 401
        issuer.keys = [second]
        assert await ask(issuer.token(second)) == 503
        await until(lambda: len(issuer.asked) == 4)
        statuses = []

        async def is_served() -> bool:
            statuses.append(await ask(issuer.token(second)))
            return statuses[-1] == 200

        for _ in range(100):
            if await is_served():
                break
        assert statuses[-1] == 200
        assert await ask(issuer.token(first)) == 401
        async with front.session.get(f"{front.url}/v1/models", headers={"authorization": "Bearer a.b.c"}) as response:
            assert response.status == 401


async def test_tenants_have_limits_of_the_key_file_and_follow_a_reload(start_front: StartFront, tmp_path: Path) -> None:
    own = Key("k1")
    (tmp_path / "admin").write_text("admin\n")
    file = tmp_path / "keys.toml"

    def write(limit: int) -> None:
        file.write_text(f"[tenants.red]\nrequests_per_minute = {limit}\n[tenants.blue]\nweight = 2\n")
        file.chmod(0o600)

    write(2)
    async with FakeEngine(step_s=0) as engine, Issuer(own) as issuer:
        server = ServerConfig(
            port=0,
            api_key_file=str(file),
            admin_key_file=str(tmp_path / "admin"),
            jwt_issuer=issuer.url,
            jwt_audience="llmserve",
            jwt_tenant_claim="org",
        )
        front = await start_front(engine, server=server)

        async def ask(org: str, sub: str) -> int:
            token = issuer.token(own, org=org, sub=sub)
            async with front.post(headers={"authorization": bearer(token)}, max_tokens=2) as response:
                await response.read()
                return int(response.status)

        assert [await ask("red", sub) for sub in ("ann", "ben", "cyd")] == [200, 200, 429], "a tenant has one account"
        assert [await ask("blue", sub) for sub in ("ann", "ben", "cyd")] == [200, 200, 200]
        assert await ask("green", "ann") == 401
        write(4)
        async with front.session.post(
            f"{front.url}/admin/reload", headers={"authorization": "Bearer admin"}
        ) as response:
            assert response.status == 200
        assert [await ask("red", "ann") for _ in range(3)] == [200, 200, 429], "what was used stays used"


async def test_an_issuer_that_is_away_at_the_start_is_asked_again(
    start_front: StartFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuer_keys, "AGAIN_S", 0.1)
    own = Key("k1")
    async with FakeEngine(step_s=0) as engine, Issuer(own) as issuer:
        issuer.up = False
        front = await start_front(engine, server=ServerConfig(port=0, jwt_issuer=issuer.url, jwt_audience="llmserve"))
        headers = {"authorization": bearer(issuer.token(own))}
        async with front.post(headers=headers, max_tokens=2) as response:
            assert (response.status, response.headers["retry-after"]) == (503, "1")
        issuer.up = True

        async def status() -> int:
            async with front.post(headers=headers, max_tokens=2) as response:
                return int(response.status)

        async with asyncio.timeout(60):
            while await status() != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.2)


def test_settings_that_would_believe_anybody_are_refused(tmp_path: Path) -> None:
    def said(**fields: Any) -> str:
        with pytest.raises(ConfigError) as refused:
            checked(Config(server=ServerConfig(**fields), engines=EngineConfig(engine=("http://a",))))
        return str(refused.value)

    issuer = "https://issuer"
    assert "give --jwt-audience" in said(jwt_issuer=issuer)
    assert "give --jwt-issuer" in said(jwt_audience="a")
    assert "is not https" in said(jwt_issuer="http://issuer.example.com", jwt_audience="a")
    assert "is not https" in said(jwt_issuer=issuer, jwt_keys="http://keys.example.com", jwt_audience="a")
    file = tmp_path / "keys.toml"
    file.write_text("[tenants.red]\nweight = 2\n")
    assert "give --jwt-tenant-claim" in said(api_key_file=str(file), jwt_issuer=issuer, jwt_audience="a")
    file.write_text('[tenants.red]\nkey = "x"\n')
    assert "a tenant has no key" in said(api_key_file=str(file), jwt_issuer=issuer, jwt_audience="a")


def test_a_server_that_takes_tokens_may_be_reached_by_others() -> None:
    server = ServerConfig(host="0.0.0.0", jwt_issuer="https://issuer", jwt_audience="a")
    checked(Config(server=server, engines=EngineConfig(engine=("http://a",))))
