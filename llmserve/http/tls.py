"""TLS: contexts of a server and of clients, from files."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

PROTOCOLS = ["http/1.1"]  # by ALPN
HANDSHAKE_S = 10.0  # for which a client may take to begin
SHUTDOWN_S = 5.0  # for which a client may take to end


class TlsError(Exception):
    """A certificate or key cannot be used. The message says which file, and why."""


def server_context(certificate: Path, key: Path | None = None) -> ssl.SSLContext:
    """A server with a certificate, and the chain behind it. key : None: in the same file. Raises TlsError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    load_chain(context, certificate, key)
    context.set_alpn_protocols(PROTOCOLS)
    return context


def client_context(
    authorities: Path | None = None, certificate: Path | None = None, key: Path | None = None
) -> ssl.SSLContext:
    """Clients that trust these authorities, and show a certificate where servers ask for one. Raises TlsError.

    authorities : None: those of the system.  key : None: in the file of the certificate
    """
    try:
        context = ssl.create_default_context(cafile=str(authorities) if authorities is not None else None)
    except (OSError, ssl.SSLError) as error:
        raise TlsError(f"{authorities}: no certificate of an authority can be read: {_why(error)}") from error
    if certificate is not None:
        load_chain(context, certificate, key)
    return context


def load_chain(context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    """Have new connections of a context show this certificate. Raises TlsError."""
    try:
        context.load_cert_chain(certificate, key, password=_no_password(key or certificate))
    except (OSError, ssl.SSLError) as error:
        files = f"{certificate}" if key is None else f"{certificate}, {key}"
        raise TlsError(f"{files}: the certificate or its key cannot be used: {_why(error)}") from error


def _no_password(path: Path) -> Callable[[], str]:
    def ask() -> str:
        raise TlsError(f"{path}: the key has a password, which nobody can give while the server starts")

    return ask


def _why(error: OSError) -> str:
    reason = getattr(error, "reason", None)
    return str(reason or error.strerror or error).replace("_", " ").lower()
