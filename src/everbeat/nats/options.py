"""The NATS settings: servers, credentials, stream and acknowledgement wait."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Self
from urllib.parse import SplitResult, unquote, urlsplit

from everbeat.config import RecoveryConfig
from everbeat.domain.settings.checks import each, optional, several, whole
from everbeat.domain.settings.settings import Settings, by, checked, refused
from everbeat.domain.settings.units import Duration, size, span, spelled_duration
from everbeat.errors import ConfigurationError, Problem
from everbeat.errors.wording import amount

DEFAULT_PORT: Final = 4222
LEAST_ACK_WAIT_S: Final = 600.0
"""The default acknowledgement wait in seconds, unless recovery takes longer."""
BYTES_PER_SHARE: Final = 4_096
"""A queue may have one waiting message per this many bytes of `max_bytes`. These messages fill about a tenth of the stream."""
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
    """Check one server's URL, and return its normal form: scheme, unchanged user info, host and port."""
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
        raise _wrong_url(value, subject, "nothing can follow after host and port")
    if not _HOST.fullmatch(host):
        raise _wrong_url(value, subject, "it does not name a host")
    if port == 0:
        raise _wrong_url(value, subject, "a port is a number from 1 to 65535")
    address = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{_user_info(parts)}{address}:{DEFAULT_PORT if port is None else port}"


def _servers(value: object, /, *, subject: str) -> tuple[str, ...]:
    # sequence_of is not used, because its errors show the whole value, including passwords.
    if isinstance(value, str | bytes):
        rule = "must be a list or tuple of URLs, not a text"
        fix = "write ['nats://host:4222'], or NatsConfig.parse('nats://host:4222,host2:4222')"
        raise refused(_hidden(str(value)), subject=subject, code="WRONG_TYPE", rule=rule, fix=fix)
    items = several(value, subject=subject)
    if not 1 <= len(items) <= _MOST_SERVERS:
        rule = f"must have 1 to {_MOST_SERVERS} entries, not {len(items)}"
        raise refused(
            amount(len(items), "server"),
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
    """The settings of NATS JetStream as the transport of hints.

    NATS redelivers an unacknowledged message after `ack_wait`. None means ten minutes, or longer if recovery is slower. `credentials` is
    the path of a .creds file, and `nkey_seed` the path of a file with a user's seed. `tls_ca`, `tls_cert` and `tls_key` are paths of PEM
    files. Raises a ConfigurationError that lists every problem and shows no passwords.

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
        """Return the settings of `App(wake=...)`. A string has the form "nats://host:4222[,host2[:port]...]".

        The scheme and user info of the first server apply to the other servers, unless they have their own. Raises ConfigurationError if a
        setting is invalid.
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
            # An unencoded comma in a password splits the password. Show only text that cannot be part of one.
            problem = error.problems[0]
            raise refused(
                _hidden(wake), subject=SUBJECT, code=problem.code, rule=problem.rule, fix=problem.fix
            ) from None

    @property
    def shown(self) -> str:
        """Return the servers without user info."""
        return ",".join(shown_server(url) for url in self.servers)

    @property
    def wants_tls(self) -> bool:
        """Return whether TLS is required."""
        return any(url.startswith("tls://") for url in self.servers) or any((self.tls_ca, self.tls_cert))

    @property
    def share(self) -> int | None:
        """Return how many messages of one queue may wait in the stream, so that other queues have room, or None if `max_bytes` is not set."""
        if self.max_bytes is None:
            return None
        assert isinstance(self.max_bytes, int), "its check made it a number of bytes"
        return max(1, self.max_bytes // BYTES_PER_SHARE)

    def ack_wait_s(self, recovery: RecoveryConfig) -> float:
        """Return the acknowledgement wait in seconds."""
        if self.ack_wait is None:
            return max(LEAST_ACK_WAIT_S, 2 * _noticed_after_s(recovery))
        given = self.ack_wait
        assert isinstance(given, int | float), "its check made it a number of seconds"
        return float(given)

    def problems(self, recovery: RecoveryConfig) -> tuple[Problem, ...]:
        """Return the conflicts with these recovery settings. NATS must not redeliver a message before a death can be detected."""
        noticed_s, wait_s = _noticed_after_s(recovery), self.ack_wait_s(recovery)
        if wait_s > noticed_s:
            return ()
        return refused(
            spelled_duration(wait_s),
            subject="NatsConfig.ack_wait",
            code="ACK_WAIT_TOO_SHORT",
            rule=(
                f"must be longer than {spelled_duration(noticed_s)}, the stale threshold plus one check interval of RecoveryConfig:"
                " NATS must not redeliver a message before a death can be noticed"
            ),
            fix=f"set ack_wait to {spelled_duration(2 * noticed_s)!r}, or to None, which derives it, or lower the thresholds of recovery",
        ).problems

    def _contradictions(self) -> Iterator[Problem]:
        for name, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
            if getattr(self, name) is not None and getattr(self, other) is None:
                rule, fix = f"needs {other}", f"set {other} too, or omit {name}"
                yield from refused(
                    getattr(self, name), subject=f"NatsConfig.{name}", code="MISSING", rule=rule, fix=fix
                ).problems
        if self.credentials is not None and self.nkey_seed is not None:
            rule, fix = (
                "cannot be set together with credentials, which contain a seed",
                "omit one of them",
            )
            yield from refused(
                self.nkey_seed, subject="NatsConfig.nkey_seed", code="CONTRADICTION", rule=rule, fix=fix
            ).problems


def shown_server(url: str) -> str:
    """Return the URL of a server in its normal form, without user info."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def user_info(url: str) -> tuple[str | None, str | None, str | None]:
    """Return the decoded user, password and token of a server in its normal form."""
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
    """Return the part of a text that cannot be a password. URLs are reduced to their schemes and servers, and other text to `***`."""
    found = _PLAIN_FORM.fullmatch(text.strip())
    if found is None:
        return "***"
    return f"{found['scheme'] or ''}{'***@' if found['user'] else ''}{found['servers']}"


def _wrong_url(value: str, subject: str, rule: str) -> ConfigurationError:
    return refused(_hidden(value), subject=subject, code="WRONG_NATS_URL", rule=rule, fix=_FORM)
