"""The client library, made careful, and its TLS.

What lives here: what a connection is made with. What may not: making one.
"""

from __future__ import annotations

import ssl

from nats.aio.client import Client

from everbeat.wake.nats_problems import NotEncrypted
from everbeat.wake.options import NatsConfig


class CarefulClient(Client):
    """Speaks no word to a server without encryption where that is wanted: the next word would be a password."""

    wants_tls: bool = False

    def _connect_command(self) -> bytes:
        if self.wants_tls and not self._server_info.get("tls_required"):
            raise NotEncrypted
        return super()._connect_command()


def tls_context(config: NatsConfig) -> ssl.SSLContext:
    """What encrypts; raises OSError or ssl.SSLError for files that are of no use."""
    context = ssl.create_default_context(cafile=config.tls_ca)
    if config.tls_cert is not None and config.tls_key is not None:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    return context
