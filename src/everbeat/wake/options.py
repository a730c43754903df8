"""Where the NATS servers are, and how hints travel through them, as users write it.

What lives here: NatsConfig, its checks, and reading it from a URL. What may not: nats itself, which need not be installed for this, and
connections. No password is ever shown: neither in a repr nor in an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Self
from urllib.parse import SplitResult, unquote, urlsplit

from everbeat.config import RecoveryConfig
from everbeat.domain.checks import each, optional, several, whole
from everbeat.domain.duration import Duration, span, spelled
from everbeat.domain.settings import Settings, by, checked, refused
from everbeat.domain.size import size
from everbeat.errors import ConfigurationError, Problem

DEFAULT_PORT: Final = 4222
LEAST_ACK_WAIT_S: Final = 600.0
"""The acknowledgement wait of who says nothing, where recovery is not slower than that."""
BYTES_PER_SHARE: Final = 4_096
"""One waiting message of a queue for so many of `max_bytes`: about a tenth of a full stream, whatever waits in that queue."""
SUBJECT: Final = "App.wake"

_SCHEMES: Final = ("nats", "tls")
_MOST_SERVERS: Final = 100
_PLAIN_SERVER: Final = r"(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?"
_PLAIN_FORM: Final = re.compile(
    rf"(?P<scheme>(?:nats|tls|ws|wss|http|https|amqp|redis)://)?(?P<user>[^@/?#,=\s]*@)?(?P<servers>{_PLAIN_SERVER}(?:,{_PLAIN_SERVER})*)"
)
_FORM: Final = "write it as 'nats://user:password@host:4222' (or 'tls://...'), special characters of a password percent-encoded"
_STREAM_NAME: Final = re.compile(r"[^\s.*>/\\\x00-\x1f\x7f]{1,200}")
_HOST: Final = re.compile(r"[A-Za-z0-9_.:%-]+")


def server_url(value: object, /, *, subject: str) -> str:
    """The check of one server's URL; its normal form has scheme, user info as it was, host and port."""
    if not isinstance(value, str):
        rule = f"a NATS server is a text, not {type(value).__name__}"
        raise refused("***", subject=subject, code="WRONG_TYPE", rule=rule, fix=_FORM)
    try:
        parts = urlsplit(value.strip())
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise _wrong_url(
            value, subject, "its host or port cannot be read; a port is a number from 1 to 65535"
        ) from None
    if parts.scheme not in _SCHEMES or "://" not in value:
        raise _wrong_url(value, subject, "a NATS server begins with nats:// or tls://")
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise _wrong_url(value, subject, "after host and port nothing may follow")
    if not _HOST.fullmatch(host):
        raise _wrong_url(value, subject, "it names no host")
    if port == 0:
        raise _wrong_url(value, subject, "a port is a number from 1 to 65535")
    address = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{_user_info(parts)}{address}:{DEFAULT_PORT if port is None else port}"


def _servers(value: object, /, *, subject: str) -> tuple[str, ...]:
    # Not sequence_of, whose errors show the whole value, passwords and all.
    if isinstance(value, str | bytes):
        rule = "must be a list or tuple of URLs, not a text"
        fix = "write ['nats://host:4222'], or NatsConfig.parse('nats://host:4222,host2:4222')"
        raise refused(_hidden(str(value)), subject=subject, code="WRONG_TYPE", rule=rule, fix=fix)
    items = several(value, subject=subject)
    if not 1 <= len(items) <= _MOST_SERVERS:
        rule = f"must have 1 to {_MOST_SERVERS} entries, not {len(items)}"
        raise refused(
            f"{len(items)} servers",
            subject=subject,
            code="WRONG_COUNT",
            rule=rule,
            fix="name a server, such as 'nats://host:4222'",
        )
    return each(items, server_url, subject=subject)


def _stream_name(value: object, /, *, subject: str) -> str:
    if isinstance(value, str) and _STREAM_NAME.fullmatch(value):
        return value
    rule = "must be 1 to 200 characters without spaces, control characters and . * > / \\"
    raise refused(
        value, subject=subject, code="WRONG_NAME", rule=rule, fix="use a name such as 'EVERBEAT_jobs'"
    )


def _path(value: object, /, *, subject: str) -> str:
    if isinstance(value, str | os.PathLike) and str(value).strip():
        return os.fspath(value) if isinstance(value, str) else str(value)
    rule = f"must be the path of a file, not {'empty' if isinstance(value, str) else type(value).__name__}"
    raise refused(value, subject=subject, code="WRONG_TYPE", rule=rule, fix="give the path of a file")


_file = by(optional(_path, none="uses none"))


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class NatsConfig(Settings):
    """NATS JetStream as the carrier of hints. Raises ConfigurationError with every problem, without a password.

    `ack_wait`: after this time a message that nobody acknowledged is delivered again; None: ten minutes, or longer where recovery is slower.
    `credentials` and `nkey_seed`: paths of a .creds file and of a file with a user's seed. `tls_ca`, `tls_cert`, `tls_key`: paths of PEM files.

        NatsConfig(servers=["nats://user:password@host:4222", "nats://host2"], replicas=3)
    """

    servers: Sequence[str] = field(repr=False, metadata=by(_servers))
    stream: str | None = field(
        default=None, metadata=by(optional(_stream_name, none="derives it from the schema"))
    )
    replicas: int = field(default=1, metadata=by(whole(1, 5)))
    ack_wait: Duration | None = field(
        default=None,
        metadata=by(optional(span(0.1, 86_400), none="derives it from the thresholds of recovery")),
    )
    credentials: str | None = field(default=None, metadata=_file)
    nkey_seed: str | None = field(default=None, metadata=_file)
    tls_ca: str | None = field(default=None, metadata=_file)
    tls_cert: str | None = field(default=None, metadata=_file)
    tls_key: str | None = field(default=None, metadata=_file)
    max_bytes: int | None = field(
        default=None, metadata=by(optional(size(1 << 16, 1 << 50), none="sets no bound"))
    )

    @classmethod
    def parse(cls, wake: str | Self | None) -> Self | None:
        """What `App(wake=...)` means; raises ConfigurationError. A text is "nats://host:4222[,host2[:port]...]".

        Scheme and user info of the first server are those of the others unless they bring their own.
        """
        if wake is None or isinstance(wake, cls):
            return wake
        if not isinstance(wake, str):
            rule = f"must be a NATS URL or a NatsConfig, not {type(wake).__name__}"
            raise refused("***", subject=SUBJECT, code="WRONG_TYPE", rule=rule, fix=_FORM)
        first, *others = (part.strip() for part in wake.strip().split(","))
        try:
            server_url(first, subject=SUBJECT)
            scheme, _, rest = first.partition("://")
            user, at, _ = rest.rpartition("@")
            spelt = [_completed(other, scheme, user + at) for other in others]
            return cls(servers=[server_url(url, subject=SUBJECT) for url in (first, *spelt)])
        except ConfigurationError as error:
            # A comma in a password that was not encoded cuts it in two: what is shown is what cannot be part of one.
            problem = error.problems[0]
            raise refused(
                _hidden(wake), subject=SUBJECT, code=problem.code, rule=problem.rule, fix=problem.fix
            ) from None

    @property
    def shown(self) -> str:
        """The servers without user info."""
        return ",".join(shown_server(url) for url in self.servers)

    @property
    def wants_tls(self) -> bool:
        """Whether a connection in plain text would be a mistake."""
        return any(url.startswith("tls://") for url in self.servers) or any((self.tls_ca, self.tls_cert))

    @property
    def share(self) -> int | None:
        """How many waiting messages of one queue may be in the stream, so that others have room; None without `max_bytes`."""
        if self.max_bytes is None:
            return None
        assert isinstance(self.max_bytes, int), "its check made it a number of bytes"
        return max(1, self.max_bytes // BYTES_PER_SHARE)

    def ack_wait_s(self, recovery: RecoveryConfig) -> float:
        """The acknowledgement wait in seconds."""
        if self.ack_wait is None:
            return max(LEAST_ACK_WAIT_S, 2 * _noticed_after_s(recovery))
        given = self.ack_wait
        assert isinstance(given, int | float), "its check made it a number of seconds"
        return float(given)

    def problems(self, recovery: RecoveryConfig) -> tuple[Problem, ...]:
        """What does not fit these settings of recovery; a message must not come again before a death can have been noticed."""
        noticed_s, wait_s = _noticed_after_s(recovery), self.ack_wait_s(recovery)
        if wait_s > noticed_s:
            return ()
        return refused(
            spelled(wait_s),
            subject="NatsConfig.ack_wait",
            code="ACK_WAIT_TOO_SHORT",
            rule=(
                "must be longer than the stale threshold and one check interval of RecoveryConfig together,"
                f" which is {spelled(noticed_s)}: a message must not come again before a death can have been noticed"
            ),
            fix=f"set ack_wait to {spelled(2 * noticed_s)!r}, or to None, which derives it, or lower the thresholds of recovery",
        ).problems

    def _contradictions(self) -> Iterator[Problem]:
        for name, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
            if getattr(self, name) is not None and getattr(self, other) is None:
                rule, fix = f"is of no use without {other}", f"give {other} too, or leave {name} out"
                yield from refused(
                    getattr(self, name), subject=f"NatsConfig.{name}", code="MISSING", rule=rule, fix=fix
                ).problems
        if self.credentials is not None and self.nkey_seed is not None:
            rule, fix = (
                "credentials hold a seed of their own, so only one of them can be meant",
                "leave one of them out",
            )
            yield from refused(
                self.nkey_seed, subject="NatsConfig.nkey_seed", code="CONTRADICTION", rule=rule, fix=fix
            ).problems


def shown_server(url: str) -> str:
    """The URL of a server in its normal form, without user info."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def user_info(url: str) -> tuple[str | None, str | None, str | None]:
    """User, password and token of a server in its normal form, decoded."""
    parts = urlsplit(url)
    if parts.username is None:
        return None, None, None
    if parts.password is None:
        return None, None, unquote(parts.username)
    return unquote(parts.username), unquote(parts.password), None


def _user_info(parts: SplitResult) -> str:
    user, at, _ = parts.netloc.rpartition("@")
    return user + at


def _completed(server: str, scheme: str, user: str) -> str:
    own_scheme, separator, rest = server.rpartition("://")
    return f"{own_scheme if separator else scheme}://{'' if '@' in rest else user}{rest}"


def _noticed_after_s(recovery: RecoveryConfig) -> float:
    threshold = max(recovery.running_stale_threshold_ms, recovery.claimed_stale_threshold_ms)
    return (threshold + recovery.check_interval_ms) / 1_000


def _hidden(text: str) -> str:
    """What of a text is known to be no password: its scheme and servers if it has the form of URLs, otherwise nothing."""
    found = _PLAIN_FORM.fullmatch(text.strip())
    if found is None:
        return "***"
    return f"{found['scheme'] or ''}{'***@' if found['user'] else ''}{found['servers']}"


def _wrong_url(value: str, subject: str, rule: str) -> ConfigurationError:
    return refused(_hidden(value), subject=subject, code="WRONG_NATS_URL", rule=rule, fix=_FORM)
