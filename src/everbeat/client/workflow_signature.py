"""What a function that builds a workflow takes, and the key of a start: read and checked once.

What lives here: these checks. What may not: calling it (`workflow`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

from everbeat.client.options import key_of
from everbeat.domain.codec import CallCodec
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
