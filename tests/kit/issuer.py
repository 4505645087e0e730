"""An identity provider: describes itself, shows its keys, and signs tokens."""

from __future__ import annotations

import json
import time
from typing import Any

import jwt
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

MAKE = {
    "RS256": lambda: rsa.generate_private_key(public_exponent=65537, key_size=2048),
    "ES256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate,
}


class Key:
    """A private key, and its public half as a JWK."""

    def __init__(self, kid: str, algorithm: str = "ES256") -> None:
        self.kid, self.algorithm = kid, algorithm
        self.private: Any = MAKE[algorithm]()
        public = jwt.get_algorithm_by_name(algorithm).to_jwk(self.private.public_key(), as_dict=True)
        self.jwk = {**public, "kid": kid, "use": "sig", "alg": algorithm}


def claims(**changed: Any) -> dict[str, Any]:
    """Claims of a right token of the issuer `https://issuer`. changed : None leaves a claim out"""
    now_s = int(time.time())
    usual = {"iss": "https://issuer", "aud": "llmserve", "sub": "alice", "iat": now_s, "exp": now_s + 600}
    return {name: value for name, value in {**usual, **changed}.items() if value is not None}


def signed(key: Key, **changed: Any) -> str:
    return jwt.encode(claims(**changed), key.private, key.algorithm, headers={"kid": key.kid})


def key_set(*keys: Key) -> bytes:
    return json.dumps({"keys": [key.jwk for key in keys]}).encode()


class Issuer:
    """The provider's server, as an async context manager.

    keys : that it shows.  asked : paths.  up : whether it answers
    """

    def __init__(self, *keys: Key) -> None:
        self.keys = list(keys)
        self.asked: list[str] = []
        self.up = True

    async def __aenter__(self) -> Issuer:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    def token(self, key: Key, **changed: Any) -> str:
        return signed(key, **{"iss": self.url, **changed})

    async def _answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if not self.up:
            return web.Response(status=500)
        if request.path == "/keys":
            return web.Response(body=key_set(*self.keys), content_type="application/json")
        return web.json_response({"issuer": self.url, "jwks_uri": f"{self.url}/keys", "scopes_supported": ["openid"]})
