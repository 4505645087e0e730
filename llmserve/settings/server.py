"""The section [server]: where the server listens, and for which clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from llmserve.runtime.logs import LogFormat


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where the server listens, and for which clients"""

    removed: ClassVar[Mapping[str, str]] = {"door_key_file": "the setting is gateway_key_file now"}

    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0: any free port")] = 8000
    workers: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | Literal["auto"],
        Meta(
            description="processes that hold the connections, beside one process that schedules. 1: one process does "
            "both; auto: as many as this machine has cores, less one"
        ),
    ] = 1
    api_key_file: Annotated[
        str | None,
        Meta(
            description="file of keys: `name: key` lines, or a *.toml file. A *.toml file may give each key limits, a "
            "weight and budgets. Without the file, no key is required"
        ),
    ] = None
    tls_cert: Annotated[
        str | None,
        Meta(
            description="file of the server's certificate and of the chain behind it, as PEM: clients then speak "
            "HTTPS. SIGHUP reads it again (default: plain HTTP)"
        ),
    ] = None
    tls_key: Annotated[
        str | None, Meta(description="file of the certificate's key, as PEM (default: in the file of --tls-cert)")
    ] = None
    jwt_issuer: Annotated[
        str | None,
        Meta(
            description="issuer whose tokens (JWT) clients may send in place of a key, as in their claim `iss`, such "
            "as https://login.example.com/realms/ai. Its keys are read by OpenID Connect Discovery. Needs the extra "
            "`auth` (default: no tokens)"
        ),
    ] = None
    jwt_audience: Annotated[
        str | None, Meta(description="audience that tokens must be for, their claim `aud`; needed with --jwt-issuer")
    ] = None
    jwt_keys: Annotated[
        str | None, Meta(description="URL or file of the issuer's keys, a JWK set (default: as the issuer tells)")
    ] = None
    jwt_account_claim: Annotated[
        str, Meta(description="claim of tokens whose value is the account that their requests count for")
    ] = "sub"
    jwt_tenant_claim: Annotated[
        str | None,
        Meta(
            description="claim whose value is the account instead, for all clients of a tenant together; "
            "[tenants.VALUE] of a *.toml file of --api-key-file has the limits, weight and budgets of each tenant, and "
            "with such tables no other tenant is served (default: none)"
        ),
    ] = None
    gateway_key_file: Annotated[
        str | None,
        Meta(
            description="file with the key of gateways (servers with --engines-are-groups). Whoever sends this key may "
            "say for which client a request is. Without --api-key-file, only gateways are served"
        ),
    ] = None
    admin_key_file: Annotated[
        str | None, Meta(description="file with the key of /admin. Without the file, /admin is disabled")
    ] = None
    anonymous: Annotated[bool, Meta(description="listen beyond loopback without requiring a key")] = False
    cors_origin: Annotated[
        tuple[str, ...],
        Meta(
            description="origin whose pages may call the server from a browser, such as https://chat.example.com; *: "
            "every origin; repeat for several (default: none)",
            extra={"metavar": "ORIGIN"},
        ),
    ] = ()
    allowed_host: Annotated[
        tuple[str, ...],
        Meta(
            description="name under which clients reach a server that listens on loopback without keys, such as "
            "chat.example.com behind a proxy; *: any; repeat for several. IP addresses, names without a dot and names "
            "of local networks (.local, .internal) are always allowed. Any other name could belong to a web page that "
            "calls the server from a browser on the same machine (default: none)",
            extra={"metavar": "NAME"},
        ),
    ] = ()
    trusted_proxy: Annotated[
        tuple[str, ...],
        Meta(
            description="address or network of a proxy in front of the server, such as 10.0.0.0/8, whose "
            "X-Forwarded-For header names the client (for --fair-by address, and to divide the buffers); repeat for "
            "several (default: none)",
            extra={"metavar": "ADDRESS"},
        ),
    ] = ()
    metrics_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        Meta(
            description="a second port that serves /metrics, /health and /ready without a key (default: none; with "
            "--api-key-file, /metrics and the engines of /ready need a key on the port of clients)"
        ),
    ] = None
    metrics_host: Annotated[str | None, Meta(description="address of --metrics-port (default: 127.0.0.1)")] = None
    drain_s: Annotated[
        float, Meta(ge=0, description="how long the server waits for running requests when it stops")
    ] = 30.0
    journal: Annotated[
        str | None, Meta(description="file for every scheduling step, as JSON lines. An existing file is continued")
    ] = None
    state: Annotated[
        str | None,
        Meta(
            description="folder that keeps what the server has learnt for the next start. It is written every minute "
            "and at the end, and holds lengths under hashes of prompts, sums from the predictor, names and times of "
            "tools, and which key has asked for which response of /v1/responses, but no text of a prompt or an answer "
            "(default: nothing is kept)",
            extra={"metavar": "DIR"},
        ),
    ] = None
    usage_file: Annotated[
        str | None,
        Meta(
            description="SQLite file that records what keys have spent of their budgets; several servers may share one "
            "(default: usage.sqlite in the folder of --state)"
        ),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="lowest level that is logged")
    ] = "info"
    log_format: Annotated[
        LogFormat, Meta(description="format of log lines on standard error: text, or one JSON object per line")
    ] = "text"
    traces_sample: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="fraction of requests whose spans are sent by OTLP to OTEL_EXPORTER_OTLP_ENDPOINT. A client's "
            "`traceparent` decides for its own request. 0: no request is traced. Needs the extra `traces`",
        ),
    ] = 0.0
    access_log: Annotated[
        bool,
        Meta(
            description="log each request when it ends: status, milliseconds, request id, key, model, engine, tokens; "
            "never a prompt, an answer or a key's value"
        ),
    ] = False
