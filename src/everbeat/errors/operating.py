"""Errors of operators: names that nobody knows, and what is not as they believe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from uuid import UUID

from everbeat.errors.base import EverbeatError
from everbeat.errors.wording import nearest, some


class UnknownName(EverbeatError):
    """A task function, queue or worker of this name is known neither to the app nor to the database; nothing was done."""

    code = "UNKNOWN_NAME"

    def __init__(
        self, kind: str, names: Sequence[str], *, known: Iterable[str] = (), former: Iterable[str] = ()
    ) -> None:
        choices = sorted(known)
        likely = [*choices, *former]
        guesses = [guess for guess in (nearest(name, likely) for name in names) if guess is not None]
        plural = "" if len(names) == 1 else "s"
        verb = "is" if len(names) == 1 else "are"
        message = f"{kind.capitalize()}{plural} {', '.join(map(repr, names))} {verb} not known here; known: {some(choices)}."
        fix = (
            f"did you mean {', '.join(map(repr, guesses))}?"
            if guesses
            else "check the spelling, the database and the schema."
        )
        super().__init__(message, fix=fix)
        self.kind = kind
        self.names = tuple(names)


class NotPaused(EverbeatError):
    """What is to be resumed is not paused; nothing was done."""

    code = "NOT_PAUSED"

    def __init__(self, kind: str, name: str, *, paused: Iterable[str] = ()) -> None:
        choices = sorted(paused)
        guess = nearest(name, choices)
        fix = f"did you mean {guess!r}?" if guess is not None else "see what is: everbeat tasks pauses."
        super().__init__(
            f"{kind.capitalize()} {name!r} is not paused; paused {kind}s: {some(choices)}.", fix=fix
        )
        self.kind = kind
        self.name = name


class SignalRefused(EverbeatError):
    """What has ended receives no signals any more; nothing was stored."""

    code = "SIGNAL_REFUSED"

    def __init__(self, target: UUID | str, *, kind: str, state: str, name: str) -> None:
        super().__init__(
            f"Signal {name!r} was not stored: {kind} {target} is {state}, and what has ended receives no signals any more.",
            fix="check the id; signal what is still under way.",
        )
        self.target = target
        self.kind = kind
        self.state = state


class NatsError(EverbeatError):
    """Base of what can be wrong with the NATS servers that carry hints; the database works on without them."""

    code = "NATS_ERROR"


class NatsUnreachable(NatsError):
    """No NATS server answered in time."""

    code = "NATS_UNREACHABLE"


class NatsRefused(NatsError):
    """A NATS server answered, and will not or must not be used: credentials, TLS, no JetStream, or a stream of somebody else."""

    code = "NATS_REFUSED"


class NatsNotInstalled(NatsError):
    """The app wants messages by NATS, and the package that speaks to NATS is missing."""

    code = "NATS_NOT_INSTALLED"

    def __init__(self) -> None:
        super().__init__(
            "App(wake=...) wants messages by NATS, and the package nats-py is missing.",
            fix="pip install 'everbeat[nats]', or leave wake out.",
        )
