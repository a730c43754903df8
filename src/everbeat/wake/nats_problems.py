"""What went wrong with NATS, as errors that name the server, the rule and what helps.

What lives here: judging problems of connections and of JetStream's API. What may not: connections, and passwords in a message.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from everbeat.errors import NatsError, NatsRefused, NatsUnreachable
from everbeat.wake.options import NatsConfig, shown_server, user_info

MOST_CONSUMERS: Final = 10026
NO_STREAM: Final = 10059
NO_CONSUMER: Final = 10014
NO_MESSAGE: Final = 10037
STREAM_NAME_TAKEN: Final = 10058
NO_ROOM: Final = frozenset({10023, 10028, 10047, 10077})
"""The stream, its account or the server has no room for the message."""
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
    """The link ended before the answer came."""


class NoResponders(Exception):
    """The server knows nobody who listens there: the stream is gone, or JetStream is."""


class NotEncrypted(Exception):
    """The server wants no TLS, and the client does."""


class ApiProblem(Exception):
    """JetStream answered, and the answer was an error."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(f"{description} ({err_code})")
        self.code = code
        self.err_code = err_code
        self.description = description

    @property
    def may_pass(self) -> bool:
        """Whether the same may work a little later: no leader yet, a server that starts."""
        return self.code in (408, 500, 503) and self.err_code not in _FIXES

    @property
    def is_of_one_consumer(self) -> bool:
        """Whether only the consumer that was asked for is refused: the stream is there, and JetStream answers."""
        return self.err_code != NO_STREAM and self.code not in (408, 503)


@contextmanager
def of_files(config: NatsConfig) -> Iterator[None]:
    """Files that cannot be read, or hold nothing of use, are NatsRefused."""
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
            f"The TLS files {files} of NatsConfig are of no use: {_said(problem)}.",
            fix="tls_ca, tls_cert and tls_key are PEM files, and the key belongs to the certificate.",
        ) from None


def of_connecting(
    server: str, problem: Exception, reasons: Sequence[Exception], config: NatsConfig
) -> NatsError:
    """Why this server could not be used."""
    name = shown_server(server)
    telling = _telling(problem, reasons)
    said = _said(telling)
    if isinstance(telling, NotEncrypted):
        return NatsRefused(
            f"NATS server {name} offers no TLS, and it is wanted; nothing was sent to it.",
            fix="begin the URL with nats:// and give no TLS files, or set up TLS at the server.",
        )
    if isinstance(telling, ssl.SSLError):
        return NatsRefused(
            f"TLS with NATS server {name} failed: {said}.",
            fix="give the authority of its certificate as NatsConfig.tls_ca (and tls_cert with tls_key where the server asks for one),"
            " and a host that the certificate names.",
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
    """Why none of the servers could be used."""
    if len(problems) == 1:
        return problems[0]
    return NatsUnreachable(
        " ".join(problem.message for problem in problems), fix="start one of them, or correct App(wake=...)."
    )


def of_stream(stream: str, server: str, reason: str) -> NatsRefused:
    """Why a stream that is there is not touched."""
    return NatsRefused(
        f"Stream {stream!r} at NATS server {server} is not used: {reason}.",
        fix="delete it if nobody needs it, or give another name: NatsConfig(stream=...).",
    )


def of_api(stream: str, server: str, problem: ApiProblem) -> NatsRefused:
    """Why JetStream will not have the stream."""
    return NatsRefused(
        f"NATS server {server} refused stream {stream!r}: {problem.description} ({problem.err_code}).",
        fix=f"{_FIXES.get(problem.err_code, 'check the settings of the account and NatsConfig')}.",
    )


def no_jetstream(server: str, reason: object = "") -> NatsRefused:
    """Nobody at this server answers for JetStream."""
    said = f" ({' '.join(str(reason).split())})" if reason else ""
    if "permissions violation" in said.lower():
        return no_right(server, reason)
    return NatsRefused(f"NATS server {server} has no JetStream for this user{said}.", fix=f"{_FIXES[10076]}.")


def no_right(server: str, reason: object) -> NatsRefused:
    """The user may not do what this needs."""
    said = " ".join(str(reason).removeprefix("nats: ").split())
    return NatsRefused(
        f"NATS server {server} does not give the user a right that is needed: {said} (the server tells the subject in small letters).",
        fix="give the user the rights that the page on NATS lists, under 'Set up'.",
    )


def first_of(group: BaseExceptionGroup[Any]) -> BaseException:
    """The exception that ended a group of tasks: what was cancelled because of it is not in there."""
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


def reason_of(problem: Exception) -> str:
    """Why something could not be said or asked, in words."""
    if isinstance(problem, NoResponders):
        return "nobody answers for JetStream"
    return str(problem) or ("no answer in time" if isinstance(problem, TimeoutError) else "the link was lost")


def _telling(problem: Exception, reasons: Sequence[Exception]) -> Exception:
    """The client gives up with the news that it gave up; why is what it complained about before."""
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
