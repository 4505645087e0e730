"""What a token of an identity provider costs a request, beside a key of the file.

    python scripts/lab performance.tokens --output docs/results/tokens.json

The processor time to know who sends a request, by its header `authorization`: a key; a token that came before; and one
that comes for the first time, whose signature is checked. Medians over batches of requests, in turns.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from kit.arguments import add_results, parser_of, whole
from kit.results import day_and_machine, write_json
from kit.tables import show

from llmserve.tenants.authentication import Keys
from llmserve.tenants.tokens import TokenRules, Tokens

BATCH = 200  # requests
MAKE: dict[str, Any] = {
    "RS256": lambda: rsa.generate_private_key(public_exponent=65537, key_size=2048),
    "ES256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate,
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=whole(1), default=30, help="batches of each kind (default: 30)")
    add_results(parser)
    args = parser.parse_args()
    private = {name: make() for name, make in MAKE.items()}
    keys = issuer_keys(private)
    times_us: dict[str, list[float]] = {}
    for number in range(args.rounds):
        known = token(private["RS256"], "RS256", "everyone")
        keys.authenticate(f"Bearer {known}")
        kinds = {"key of the file": ["Bearer sk-one"] * BATCH, "token that came before": [f"Bearer {known}"] * BATCH}
        for name, key in private.items():
            kinds[f"new token, {name}"] = [f"Bearer {token(key, name, f'{number}-{each}')}" for each in range(BATCH)]
        for kind, headers in kinds.items():
            times_us.setdefault(kind, []).append(microseconds(keys, headers))
    rows = [{"sent": kind, "us": round(statistics.median(times), 1)} for kind, times in times_us.items()]
    show("who sends a request", ["sent", "processor time (us)"], [[row["sent"], f"{row['us']:.1f}"] for row in rows])
    write_json(args.output, {**day_and_machine(), "rounds": args.rounds, "batch": BATCH, "rows": rows})


def issuer_keys(private: dict[str, Any]) -> Keys:
    """Keys that take tokens of an issuer with these keys."""
    shown = []
    for name, key in private.items():
        public = jwt.get_algorithm_by_name(name).to_jwk(key.public_key(), as_dict=True)
        shown.append({**public, "kid": name, "use": "sig", "alg": name})
    tokens = Tokens(TokenRules("https://issuer", "llmserve"))
    tokens.use(json.dumps({"keys": shown}).encode())
    return Keys({"one": "sk-one"}, tokens)


def token(key: Any, algorithm: str, name: str) -> str:
    claims = {"iss": "https://issuer", "aud": "llmserve", "sub": name, "exp": int(time.time()) + 3600}
    return jwt.encode(claims, key, algorithm, headers={"kid": algorithm})


def microseconds(keys: Keys, headers: Sequence[str]) -> float:
    """Of one request."""
    began_s = time.process_time()
    for header in headers:
        keys.authenticate(header)
    return 1e6 * (time.process_time() - began_s) / len(headers)
