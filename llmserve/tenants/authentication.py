"""API keys: who a client is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from llmserve.errors import Unauthorized
from llmserve.tenants.key_file import digest_of
from llmserve.tenants.tokens import Tokens


class Keys:
    """Checks keys, and tokens of an identity provider. A key is looked up by its SHA-256 digest.

    The time of a look-up can tell of digests only, and no key follows from a part of its digest.
    keys : name -> key, or its digest; see key_file.digest_of
    tokens  that clients may send in place of a key; None: none
    """

    def __init__(self, keys: Mapping[str, str], tokens: Tokens | None = None) -> None:
        self.tokens = tokens
        self._names: Mapping[bytes, str] = {}
        self.replace(keys)

    def replace(self, keys: Mapping[str, str]) -> None:
        self._names = {digest_of(key): name for name, key in keys.items()}

    @property
    def names(self) -> Mapping[bytes, str]:
        """Of the keys, by digest."""
        return self._names

    def use(self, names: Mapping[bytes, str]) -> None:
        """Know the keys of these digests from now on."""
        self._names = names

    @property
    def required(self) -> bool:
        """Whether clients need a key."""
        return bool(self._names) or self.tokens is not None

    def authenticate(self, authorization: str | None) -> str:
        """Return the name of the key ("" when no key is required). Raises Unauthorized."""
        if not self._names and self.tokens is None:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Unauthorized("the request has no API key; send `Authorization: Bearer KEY`")
        digest = _digest(key := key.strip())
        name = self._names.get(digest)
        if name is None:
            if self.tokens is not None and key.count(".") == 2:
                return self.tokens.account(key, digest)
            raise Unauthorized("the API key is wrong")
        return name


def authorization_of(headers: Mapping[str, str]) -> str | None:
    """The header with the client's key: Anthropic's clients send it as `x-api-key`."""
    authorization, key = headers.get("authorization"), headers.get("x-api-key")
    return f"Bearer {key}" if authorization is None and key else authorization


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
