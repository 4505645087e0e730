"""An authority of certificates for tests, made by OpenSSL's command."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Certificate:
    """Files of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """An authority in a folder. Its own certificate is `certificate`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self._name = folder, name
        self.certificate, self._key = folder / f"{name}.pem", folder / f"{name}.key"
        further = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
        _openssl(
            "req", "-x509", *CURVE, "-keyout", self._key, "-out", self.certificate, "-subj", f"/CN={name}", *further
        )

    def issue(self, name: str, *, subject: str = "", host: str = "DNS:localhost,IP:127.0.0.1") -> Certificate:
        """A certificate for a server of this host, or for a client. name : of its files"""
        made = Certificate(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        by = ("-CA", self.certificate, "-CAkey", self._key)
        further = ("-addext", f"subjectAltName={host}", "-addext", "basicConstraints=critical,CA:FALSE")
        subject = f"/CN={subject or name}"
        _openssl(
            *("req", "-x509", *by, *CURVE, "-keyout", made.key, "-out", made.certificate, "-subj", subject, *further)
        )
        return made


def _openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, timeout=60)
