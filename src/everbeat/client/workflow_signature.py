"""What a function that builds a workflow takes, and the options of a start: read and checked once.

What lives here: these checks. What may not: calling it (`workflow`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

from msgspec import Struct

from everbeat.client.options import call_patience, key_of, require_connection
from everbeat.domain.codec import CallCodec
from everbeat.domain.duration import Duration
from everbeat.domain.settings import refused, shown
from everbeat.domain.signature import is_async_function, location_of, read_signature
from everbeat.errors import RegistrationError

_REST: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def codec_of(function: Callable[..., Any], name: str, *, leading: type[Any]) -> CallCodec:
    """The codec of its parameters behind the first, which is `leading`; raises RegistrationError."""
    owner, where = f"Workflow {name!r}", location_of(function)
    if is_async_function(function):
        reason = f"{owner} is an `async def`, and what builds a workflow waits for nothing."
        raise RegistrationError(reason, fix="write `def`.", where=where)
    read = read_signature(function, owner=owner, leading=leading, sends_result=False)
    if not read.takes_context:
        reason = f"{owner} does not take the Workflow as its first parameter, annotated so."
        raise RegistrationError(reason, fix="write def name(wf: Workflow, ...).", where=where)
    for each in read.parameters:
        if each.kind in _REST:
            reason = f"{owner} takes any number of arguments ({each}), and those of a workflow have names."
            raise RegistrationError(reason, fix="name each parameter, or take a list.", where=where)
    return CallCodec(read, owner=f"workflow {name!r}", name=name)


OWN_TRANSACTION: Final = object()
"""Where a start is not part of any transaction of the caller."""


class StartOptions(Struct, frozen=True, kw_only=True):
    """The options of a start, checked. `connection` None: a transaction of its own. `patience_s` None: the app's."""

    key: str | None = None
    connection: object = None
    patience_s: float | None = None


def start_options(*, key: str | None, connection: object, patience: Duration | None) -> StartOptions:
    """Check the options of a start. Raises ConfigurationError, also for a connection that is None."""
    if connection is not OWN_TRANSACTION:
        require_connection(connection)
    return StartOptions(
        key=None if key is None else key_of(key, subject="key of the workflow"),
        connection=None if connection is OWN_TRANSACTION else connection,
        patience_s=None if patience is None else call_patience(patience, subject="patience of the start"),
    )


def require_promised(function: Callable[..., Any], name: str, output: object) -> None:
    """Raises ConfigurationError where the function returned nothing and its annotation says that it returns a node."""
    promised = getattr(function, "__annotations__", {}).get("return")
    if output is None and promised not in (None, "None", type(None)):
        raise refused(
            None,
            subject=f"output of workflow {name!r}",
            code="WRONG_TYPE",
            rule=f"is not what its annotation says, {shown(promised)}",
            fix="return the node whose value is the workflow's, or annotate -> None",
        )
