"""Record all machine-readable log output of everbeat: events, and messages of a name with name=value pairs."""

from __future__ import annotations

import ast
import inspect
import logging
import re
from collections.abc import Iterator
from typing import cast, get_type_hints

from everbeat.runtime.events import Event, event_name
from tests.surface.source import SOURCE, plain, subclasses

_MESSAGE = re.compile(r"[a-z]+(?:_[a-z]+)+(?: .*)?", re.DOTALL)
_FIELD = re.compile(r"(\w+)=%")
_METHODS = {"debug", "info", "warning", "error", "exception", "critical"}


def text() -> str:
    """Return the events, then the messages, sorted by name."""
    events = sorted(_event(kind) for kind in subclasses(Event))
    messages = sorted({said for path in SOURCE.rglob("*.py") for said in _messages(path.read_text("utf-8"))})
    return "\n".join(["events:", *events, "", "messages that no event writes:", *messages]) + "\n"


def _event(kind: type[Event]) -> str:
    name = event_name(
        cast("Event", type(kind.__name__, (), {})())
    )  # it reads only the class name of an event
    hints = get_type_hints(kind)
    fields = ", ".join(f"{field}: {_type_text(hints[field])}" for field in sorted(kind.__struct_fields__))
    varies = "" if kind.loudness is Event.loudness else " (varies)"
    level = f"{logging.getLevelName(kind.level)}{varies}"
    return f"  {name}  {level}  everbeat.{kind.component}  ({fields})"


def _type_text(hint: object) -> str:
    return plain(inspect.formatannotation(hint))


def _messages(code: str) -> Iterator[str]:
    tree = ast.parse(code)
    loggers = {
        target.id: call.args[0].value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(call := node.value, ast.Call)
        and ast.unparse(call.func) == "logging.getLogger" and call.args and isinstance(call.args[0], ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }  # fmt: skip
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=logger), attr=method),
                args=[ast.Constant(value=str(message)), *_],
            ) if logger in loggers and method in _METHODS and _MESSAGE.fullmatch(message):
                name, _, rest = message.partition(" ")
                level = "ERROR" if method == "exception" else method.upper()
                yield f"  {name}  {level}  {loggers[logger]}  ({', '.join(_FIELD.findall(rest))})"
