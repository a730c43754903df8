"""What a function that builds a workflow takes, and the key of a start: read and checked once.

What lives here: these checks. What may not: calling it (`workflow`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

from everbeat.client.options import key_of, require_connection
from everbeat.domain.codec import CallCodec
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


def checked_key(key: str | None) -> str | None:
    """The key of a start; raises ConfigurationError for what cannot be one."""
    return None if key is None else key_of(key, subject="key of the workflow")


OWN_TRANSACTION: Final = object()
"""Where a start is not part of any transaction of the caller."""


def checked_connection(connection: object) -> object | None:
    """The connection of a start; None: it has a transaction of its own. Raises ConfigurationError for a connection that is None."""
    if connection is OWN_TRANSACTION:
        return None
    require_connection(connection)
    return connection


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
