"""NATS errors. Each error names the server, the rule and the fix."""

from __future__ import annotations

import re
import ssl
from asyncio import Future
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from everbeat.errors import NatsError, NatsRefused, NatsUnreachable
from everbeat.nats.options import NatsConfig, shown_server, user_info

MOST_CONSUMERS: Final = 10026
NO_STREAM: Final = 10059
NO_CONSUMER: Final = 10014
NO_MESSAGE: Final = 10037
STREAM_NAME_TAKEN: Final = 10058
NO_ROOM: Final = frozenset({10023, 10028, 10047, 10077})
"""Error codes which mean that the stream, its account or the server has no room for a message."""
SUBJECTS_TAKEN: Final = 10065

_FIXES: Final = {
    10039: "enable JetStream for this account, or connect as a user of an account that has it",
    10076: "start the server with JetStream ('jetstream { ... }' in its configuration, or -js)",
    10074: "set NatsConfig.replicas to 1, or connect to a cluster",
    10005: "set NatsConfig.replicas to no more than the servers of the cluster that have JetStream",
    10047: "give JetStream more storage, or set NatsConfig.max_bytes lower",
    SUBJECTS_TAKEN: "delete the stream that takes them, or use another schema or NatsConfig.stream",
}


class LinkLost(Exception):
    """The link was lost before the reply arrived."""


class NoResponders(Exception):
    """The subject has no subscriber: the stream or JetStream is missing."""


class RightMissing(TimeoutError):
    """The user cannot publish to this subject. The server reports an error once, and does not reply to the request."""


class NotEncrypted(Exception):
    """The server does not offer TLS, which the client requires."""


class ApiProblem(Exception):
    """JetStream replied with an error."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(f"{description} ({err_code})")
        self.code = code
        self.err_code = err_code
        self.description = description

    @property
    def may_pass(self) -> bool:
        """Return whether the same request may soon succeed, for example if there is no leader or a server is starting."""
        return self.code in (408, 500, 503) and self.err_code not in _FIXES

    @property
    def is_of_one_consumer(self) -> bool:
        """Return whether only the requested consumer is rejected, while the stream exists and JetStream responds."""
        return self.err_code != NO_STREAM and self.code not in (408, 503)


@contextmanager
def of_files(config: NatsConfig) -> Iterator[None]:
    """Raise NatsRefused if a file cannot be read or used."""
    for name in ("credentials", "nkey_seed", "tls_ca", "tls_cert", "tls_key"):
        path = getattr(config, name)
        if path is not None:
            try:
                Path(path).open("rb").close()
            except OSError as problem:
                raise NatsRefused(
                    f"NatsConfig.{name} = {path!r}: the file cannot be read: {problem.strerror}.",
                    fix="check the path and the rights of the file.",
                ) from None
    try:
        yield
    except (ssl.SSLError, OSError) as problem:
        files = ", ".join(repr(path) for path in (config.tls_ca, config.tls_cert, config.tls_key) if path)
        raise NatsRefused(
            f"The TLS files {files} of NatsConfig are not usable: {_said(problem)}.",
            fix="tls_ca, tls_cert and tls_key are PEM files, and the key belongs to the certificate.",
        ) from None


def of_connecting(
    server: str, problem: Exception, reasons: Sequence[Exception], config: NatsConfig
) -> NatsError:
    """Return the error for a server to which a connection could not be opened."""
    name = shown_server(server)
    telling = _telling(problem, reasons)
    said = _said(telling)
    if isinstance(telling, NotEncrypted):
        return NatsRefused(
            f"NATS server {name} offers no TLS, which is required; nothing was sent to it.",
            fix="begin the URL with nats:// and give no TLS files, or set up TLS at the server.",
        )
    if isinstance(telling, ssl.SSLError):
        return NatsRefused(
            f"TLS with NATS server {name} failed: {said}.",
            fix="set NatsConfig.tls_ca to the authority of its certificate (and tls_cert with tls_key if the server requires them),"
            " and use a host that the certificate names.",
        )
    if isinstance(telling, ImportError):
        return NatsRefused(f"NATS server {name} needs a package: {said}.", fix="pip install nkeys.")
    if "authorization" in said.lower() or "authentication" in said.lower():
        return NatsRefused(
            f"NATS server {name} refused {_who(server, config)}: {said}.",
            fix="check user and password (or token) in the URL, or NatsConfig.credentials or nkey_seed; special characters are percent-encoded.",
        )
    if (
        not isinstance(telling, OSError | EOFError)
        and (config.credentials or config.nkey_seed)
        and "nkeys" in type(telling).__module__
    ):
        return NatsRefused(
            f"The seed for NATS server {name} cannot be used: {said}.",
            fix="check the file of NatsConfig.credentials or nkey_seed.",
        )
    return NatsUnreachable(
        f"NATS server {name} does not answer: {said}.", fix="start it, or correct App(wake=...)."
    )


def of_nobody(problems: Sequence[NatsError]) -> NatsError:
    """Return the error to raise if no server could be used."""
    if len(problems) == 1:
        return problems[0]
    return NatsUnreachable(
        " ".join(problem.message for problem in problems), fix="start one of them, or correct App(wake=...)."
    )


def of_stream(stream: str, server: str, reason: str) -> NatsRefused:
    """Return the error for an existing stream that everbeat must not change."""
    return NatsRefused(
        f"Stream {stream!r} at NATS server {server} is not used: {reason}.",
        fix="delete it if it is not needed, or set another name: NatsConfig(stream=...).",
    )


def of_api(stream: str, server: str, problem: ApiProblem) -> NatsRefused:
    """Return the error for a stream request that JetStream rejected."""
    return NatsRefused(
        f"NATS server {server} refused stream {stream!r}: {problem.description} ({problem.err_code}).",
        fix=f"{_FIXES.get(problem.err_code, 'check the settings of the account and NatsConfig')}.",
    )


def no_jetstream(server: str, reason: object = "") -> NatsRefused:
    """Return the error for a server without JetStream."""
    said = f" ({' '.join(str(reason).split())})" if reason else ""
    if "permissions violation" in said.lower():
        return no_right(server, reason)
    return NatsRefused(f"NATS server {server} has no JetStream for this user{said}.", fix=f"{_FIXES[10076]}.")


def no_right(server: str, reason: object) -> NatsRefused:
    """Return the error for a permission that the user lacks."""
    said = " ".join(str(reason).removeprefix("nats: ").split())
    return NatsRefused(
        f"NATS server {server} denies the user a right that everbeat needs: {said} (the server shows the subject in lower case).",
        fix="grant the user the rights that the page on NATS lists, under 'Set up'.",
    )


def first_of(group: BaseExceptionGroup[Any]) -> BaseException:
    """Return the exception that stopped a task group. The group does not contain the cancellations that followed."""
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


def reason_of(problem: Exception) -> str:
    """Describe why a message or a request failed."""
    if isinstance(problem, NoResponders):
        return "JetStream does not answer"
    return str(problem) or ("no answer in time" if isinstance(problem, TimeoutError) else "the link was lost")


def _telling(problem: Exception, reasons: Sequence[Exception]) -> Exception:
    """Return the cause of a failure. The client's last error only reports that no server is left."""
    if isinstance(problem, TimeoutError) or "no servers" in str(problem).lower():
        return next((each for each in reversed(reasons) if "no servers" not in str(each).lower()), problem)
    return problem


def _said(problem: Exception) -> str:
    if isinstance(problem, TimeoutError) or not str(problem):
        return "no answer in time" if isinstance(problem, TimeoutError) else type(problem).__name__
    return " ".join(str(problem).removeprefix("nats: ").split()).rstrip(".")


def _who(server: str, config: NatsConfig) -> str:
    user, _, token = user_info(server)
    if config.credentials is not None or config.nkey_seed is not None:
        return f"the user of {config.credentials or config.nkey_seed!r}"
    if user is not None:
        return f"the user {user!r}"
    return "the token of the URL" if token is not None else "a client without credentials"


MOST_DENIED: Final = 20
"""A link remembers at most this many subjects to which the user cannot publish."""
_DENIED: Final = re.compile(r'permissions violation for publish to "([^"]*)"', re.IGNORECASE)
_ACKNOWLEDGEMENT: Final = "$js.ack."


class Rights:
    """The permissions that the server has denied on one link. `on_denied` is called once per subject."""

    def __init__(self) -> None:
        self.denied: dict[str, str] = {}
        """Subjects to which the user cannot publish, each with its error. The subjects are in lower case, as the server reports them."""
        self.on_denied: Callable[[str], None] = lambda _: None
        self._asked: dict[Future[Any], str] = {}

    def asked(self, subject: str, answer: Future[Any]) -> None:
        """Remember the request that is waiting for a reply from this subject."""
        self._asked[answer] = subject.lower()
        answer.add_done_callback(lambda _: self._asked.pop(answer, None))

    def complained(self, problem: Exception) -> None:
        """Make the requests to a denied subject fail with RightMissing."""
        found = _DENIED.search(str(problem))
        if found is None:
            return
        denied, said = found[1].lower(), " ".join(str(problem).removeprefix("nats: ").split())
        for answer, subject in list(self._asked.items()):
            if subject == denied and not answer.done():
                answer.set_exception(RightMissing(said))
                answer.exception()  # retrieve the exception, in case no code awaits it
        # Each acknowledgement has a separate subject.
        known = _ACKNOWLEDGEMENT if denied.startswith(_ACKNOWLEDGEMENT) else denied
        if known not in self.denied and len(self.denied) < MOST_DENIED:
            self.denied[known] = said
            self.on_denied(said)
