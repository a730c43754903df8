"""Certificates for test servers."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass
class TlsFiles:
    """A certificate authority and its certificate for `localhost`."""

    ca: Path
    certificate: Path
    key: Path

    @classmethod
    def made_in(cls, folder: Path) -> TlsFiles:
        """Create new ones in this existing folder; skip the test without openssl."""
        program = shutil.which("openssl")
        if program is None:
            pytest.skip("TLS OF NATS IS NOT TESTED: no openssl on the PATH")
        made = cls(folder / "ca.pem", folder / "server.pem", folder / "server.key")
        authority, request, names = folder / "ca.key", folder / "server.csr", folder / "names"
        names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=CA:FALSE\n")
        new = ["-newkey", "rsa:2048", "-nodes"]

        def run(*words: str | Path) -> None:
            subprocess.run([program, *map(str, words)], check=True, capture_output=True, env={**os.environ})

        ca_rules = ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]
        run(
            "req",
            "-x509",
            *new,
            "-days",
            "2",
            "-subj",
            "/CN=tests",
            *ca_rules,
            "-keyout",
            authority,
            "-out",
            made.ca,
        )
        run("req", *new, "-subj", "/CN=localhost", "-keyout", made.key, "-out", request)
        signed = ["-CA", made.ca, "-CAkey", authority, "-CAcreateserial", "-extfile", names, "-days", "2"]
        run("x509", "-req", "-in", request, *signed, "-out", made.certificate)
        return made

    def client_context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.ca))
