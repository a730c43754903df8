"""Task functions that a worker would never know: decorated in the source, but not registered by importing the module.

What lives here: reading source for decorators that did not run. What may not: what everbeat itself refused.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator
from types import ModuleType

from msgspec import Struct
from msgspec.structs import replace

from everbeat.app import App
from everbeat.cli.findings import Finding


class _Place(Struct, frozen=True, kw_only=True):
    """Where a statement stands: under the main guard, in which function, and which names are local there."""

    guarded: bool = False
    function: str | None = None
    local: frozenset[str] = frozenset()


def unregistered(apps: Collection[App], *, registered: Collection[str]) -> Iterator[Finding]:
    """Functions under `if __name__ == "__main__"` or in a function that was not called; `registered` are `file:line`."""
    for module in [*sys.modules.values()]:
        names = {
            name
            for name, value in [*getattr(module, "__dict__", {}).items()]
            if any(value is app for app in apps)
        }
        if names:
            yield from _unregistered_in(module, names, registered)


def _unregistered_in(
    module: ModuleType, names: Collection[str], registered: Collection[str]
) -> Iterator[Finding]:
    path = getattr(module, "__file__", None)
    if path is None:
        return
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - ast decodes the bytes by their coding line
            tree = ast.parse(file.read(), path)
    except (OSError, SyntaxError):
        return  # compiled, or generated: there is nothing to read
    for function, decorator, place in _decorated(tree.body, _Place()):
        name = _app_name(decorator)
        where = f"{path}:{function.decorator_list[0].lineno}"
        if name not in names or name in place.local or where in registered:
            continue
        reason = (
            'it stands under `if __name__ == "__main__"`'
            if place.guarded
            else f"it stands in function {place.function!r}, which the import does not call"
        )
        yield Finding(
            code="NEVER_REGISTERED",
            message=f"Function {function.name!r} is no task for a worker: importing {module.__name__!r} does not reach its "
            f"decorator, since {reason}.",
            fix="move it to the top level of the module.",
            where=where,
        )


_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _decorated(statements: list[ast.stmt], place: _Place) -> Iterator[tuple[_Function, ast.expr, _Place]]:
    """Every decorated function that does not stand where an import runs it, with one of its decorators."""
    for statement in statements:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if place.guarded or place.function is not None:
                    for decorator in statement.decorator_list:
                        yield statement, decorator, place
                inner = replace(place, function=statement.name, local=place.local | _local_names(statement))
                yield from _decorated(statement.body, inner)
            case ast.If(test=test) if _is_main_guard(test):
                yield from _decorated(statement.body, replace(place, guarded=True))
                yield from _decorated(statement.orelse, place)
            case _:
                for field in ("body", "orelse", "finalbody"):
                    yield from _decorated(getattr(statement, field, []), place)


def _app_name(decorator: ast.expr) -> str | None:
    """`app` of `@app.task` and `@app.task(...)`."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    match called:
        case ast.Attribute(value=ast.Name(id=name), attr="task"):
            return name
        case _:
            return None


def _is_main_guard(test: ast.expr) -> bool:
    match test:
        case ast.Compare(
            left=ast.Name(id="__name__"), ops=[ast.Eq()], comparators=[ast.Constant("__main__")]
        ):
            return True
        case ast.Compare(
            left=ast.Constant("__main__"), ops=[ast.Eq()], comparators=[ast.Name(id="__name__")]
        ):
            return True
        case _:
            return False


def _local_names(function: _Function) -> frozenset[str]:
    """What the function binds itself: a parameter or variable named like a global app is another app."""
    arguments = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    assigned = {
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return frozenset(arguments | assigned)
