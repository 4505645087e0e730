"""Bearer tokens of an identity provider (JWT): who signs, for whom, and as which account their client counts.

The account is the value of a claim, with the prefix `jwt:`, so that no token counts as a key of the key file. Only
signatures with a private key of the issuer are believed, by the algorithm of the issuer's own key; a token's header
never chooses how it is checked. A token that was right is remembered by its digest until it expires.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmserve.errors import Unauthorized, Unavailable

if TYPE_CHECKING:
    from jwt import PyJWK

log = logging.getLogger("llmserve")

PREFIX = "jwt:"
ALGORITHMS = frozenset(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"))
KNOWN_MAX = 10_000  # tokens that are remembered
TOKEN_CHARS_MAX = 16 << 10
LEEWAY_S = 30.0  # by which the issuer's clock may be wrong
RETRY_AFTER_S = 1.0  # while the issuer's keys are read
ASK_AGAIN_S = 10.0  # between two looks at the issuer's keys for the sake of a token


@dataclass(frozen=True)
class TokenRules:
    """What a token must say.

    account_claim  whose value is the account
    tenant_claim   whose value is the account instead, and names its limits in the key file; None: every account has
                   the server's default limits
    """

    issuer: str
    audience: str
    account_claim: str = "sub"
    tenant_claim: str | None = None


class Tokens:
    """Checks tokens by the issuer's keys.

    tenants  that may be named; None: any
    wanted   set when a token names a key that is not known: the keys should be read again
    """

    def __init__(
        self,
        rules: TokenRules,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.wanted = asyncio.Event()
        self._rules = rules
        self._wall_clock, self._clock = wall_clock, clock
        self._asked_s = -ASK_AGAIN_S
        self._tenants: Collection[str] | None = None
        self._keys: dict[str, PyJWK] | None = None
        self._known: dict[bytes, tuple[str, float]] = {}  # account and expiry, by digest

    @property
    def tenants(self) -> Collection[str] | None:
        """The tenants that tokens may name; None: any."""
        return self._tenants

    def allow(self, tenants: Collection[str] | None) -> None:
        """Let tokens name these tenants. None: any"""
        if tenants != self._tenants:
            self._tenants = tenants
            self._known.clear()

    def use(self, keys: bytes) -> int:
        """Believe the keys of this JWK set from now on, and no others. Returns their number. Raises ValueError."""
        from jwt import PyJWK
        from jwt.exceptions import PyJWTError

        document = json.loads(keys)
        if not isinstance(document, dict) or not isinstance(document.get("keys"), list):
            raise ValueError("no set of JSON web keys")
        believed: dict[str, PyJWK] = {}
        for number, each in enumerate(document["keys"]):
            if not isinstance(each, dict) or each.get("use", "sig") != "sig":
                continue
            try:
                key = PyJWK(each)
            except PyJWTError:
                continue  # of a kind that is not known here
            if key.algorithm_name in ALGORITHMS:
                believed[str(each.get("kid", f"/{number}"))] = key
        if self._keys is None or _marks(self._keys) != _marks(believed):
            self._known.clear()
        self._keys = believed
        return len(believed)

    def account(self, token: str, digest: bytes) -> str:
        """The account of a token. digest : of the token. Raises Unauthorized, Unavailable."""
        known = self._known.get(digest)
        if known is not None and self._wall_clock() < known[1]:
            return known[0]
        claims = self._claims(token)
        account = PREFIX + self._named(claims)
        if len(self._known) >= KNOWN_MAX:
            del self._known[next(iter(self._known))]
        self._known[digest] = account, float(claims["exp"])
        return account

    def _claims(self, token: str) -> Mapping[str, Any]:
        import jwt
        from jwt import exceptions as wrong

        if len(token) > TOKEN_CHARS_MAX:
            raise Unauthorized("the token is too long")
        try:
            key = self._key(jwt.get_unverified_header(token))
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                audience=self._rules.audience,
                issuer=self._rules.issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp"], "verify_sub": False, "verify_jti": False},
            )
        except wrong.ExpiredSignatureError as error:
            raise Unauthorized("the token has expired") from error
        except wrong.InvalidAudienceError as error:
            raise Unauthorized("the token is for another audience") from error
        except wrong.InvalidIssuerError as error:
            raise Unauthorized("the token is of another issuer") from error
        except wrong.MissingRequiredClaimError as error:
            raise Unauthorized(f"the token has no claim `{error.claim}`") from error
        except wrong.ImmatureSignatureError as error:
            raise Unauthorized("the token is not valid yet") from error
        except wrong.PyJWTError as error:
            raise Unauthorized("the API key is wrong: it is no token that the issuer has signed") from error
        return claims

    def _key(self, header: Mapping[str, Any]) -> PyJWK:
        if self._keys is None:
            self._ask()
            raise Unavailable(
                "the issuer's keys are not known yet", code="issuer_unavailable", retry_after_s=RETRY_AFTER_S
            )
        kid = header.get("kid")
        if kid is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        key = self._keys.get(kid) if isinstance(kid, str) else None
        if key is None:
            if header.get("alg") in ALGORITHMS and self._ask():  # a new key of the issuer may have signed it
                raise Unavailable(
                    "the token's key is not known, and the issuer's keys are read again",
                    code="issuer_keys_renewed",
                    retry_after_s=RETRY_AFTER_S,
                )
            raise Unauthorized("the token is signed with a key that the issuer does not show")
        return key

    def _ask(self) -> bool:
        """Have the issuer's keys read again, unless this has just been done."""
        now_s = self._clock()
        if now_s - self._asked_s < ASK_AGAIN_S:
            return False
        self._asked_s = now_s
        self.wanted.set()
        return True

    def _named(self, claims: Mapping[str, Any]) -> str:
        claim = self._rules.tenant_claim or self._rules.account_claim
        value = claims.get(claim)
        name = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
        if not name or not name.isprintable():
            raise Unauthorized(f"the token has no claim `{claim}` with a name")
        if self._rules.tenant_claim and self._tenants is not None and name not in self._tenants:
            raise Unauthorized(f"the tenant {name!r} is not known here")
        return name.replace("%", "%25").replace("/", "%2F")  # a slash would make it a stream of another account


def _marks(keys: Mapping[str, PyJWK]) -> dict[str, Any]:
    return {kid: key._jwk_data for kid, key in keys.items()}
