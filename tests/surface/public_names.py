"""Record every name that programs import, with its signature, fields, defaults and public members."""

from __future__ import annotations

import ast
import enum
import importlib
import importlib.util
import inspect
import sys
import typing
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import msgspec

from tests.surface.source import plain

MODULES = (
    "everbeat",
    "everbeat.errors",
    "everbeat.inspection",
    "everbeat.logging",
    "everbeat.metrics",
    "everbeat.middleware",
    "everbeat.recovery",
    "everbeat.tracing",
    "everbeat.sentry",
    "everbeat.workflows",
    "everbeat.testing",
    "everbeat.web",
)
"""What programs may import from; those that do not exist yet are left out."""
_CALLED_BY_SYNTAX = (
    "__call__", "__await__", "__enter__", "__exit__", "__aenter__", "__aexit__", "__getitem__", "__iter__", "__aiter__", "__len__",
    "__contains__", "__bool__", "__rshift__", "__lshift__", "__or__", "__and__",
)  # fmt: skip


def text() -> str:
    """Return the names of each module, sorted."""
    return "\n".join(line for name in MODULES for line in _module(name)) + "\n"


def names_of(module: ModuleType) -> list[str]:
    """Return the public names of a module: its `__all__`, or else its names without an underscore that are not modules."""
    found = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", "").startswith("everbeat")
        and isinstance(value, type)
    ]
    return sorted(found)


def _module(name: str) -> Iterator[str]:
    if importlib.util.find_spec(name) is None:
        return
    module = importlib.import_module(name)
    yield f"module {name}"
    for each in names_of(module):
        home = importlib.import_module("everbeat")
        value = getattr(module, each)
        if name != "everbeat" and getattr(home, each, None) is value and each in home.__all__:
            yield f"  {each}: the one of everbeat"
        else:
            yield from (f"  {line}" for line in _described(each, value))
    yield ""


def _described(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, type) and issubclass(value, enum.Enum):
        yield f"enum {name}({_bases(value)})"
        yield from (f"  {member.name} = {member.value!r}" for member in value)
        yield from (f"  {line}" for line in _members(value) if not line.startswith("attribute"))
    elif isinstance(value, type):
        yield f"class {name}({_bases(value)})"
        yield from (f"  {line}" for line in _constructor(value))
        yield from (f"  {line}" for line in _members(value))
    elif inspect.isroutine(value):
        yield f"def {name}{_signature(value)}"
    elif isinstance(value, frozenset):
        yield f"{name} = {{{', '.join(sorted(map(str, value)))}}}"
    else:
        yield f"{name} = {plain(repr(value))}"


def _bases(kind: type) -> str:
    home = importlib.import_module("everbeat")
    public = {getattr(home, name) for name in home.__all__ if isinstance(getattr(home, name), type)}
    named = (BaseException, enum.Enum, str, tuple)
    known = [
        base
        for base in kind.__mro__[1:]
        if base in public or (issubclass(base, named) and not base.__name__.startswith("_"))
    ]
    return ", ".join(
        base.__name__ for base in known if base not in (BaseException, Exception) or base is known[0]
    )


def _constructor(kind: type) -> Iterator[str]:
    if issubclass(kind, msgspec.Struct) and kind.__struct_config__.frozen:
        yield "frozen"
    if getattr(kind, "__dataclass_params__", None) is not None and kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        yield "frozen"
    if typing.is_typeddict(kind):
        yield from (f"key {name}: {_annotation(hint)}" for name, hint in sorted(kind.__annotations__.items()))
        return
    if issubclass(kind, BaseException) and not _is_ours(kind, "__init__"):
        return
    if getattr(kind, "_is_protocol", False):
        yield "protocol"
        return
    try:
        signature = inspect.signature(kind)
    except (TypeError, ValueError):
        return
    yield f"constructor{_shown(signature)}"


def _is_ours(kind: type, name: str) -> bool:
    return any(name in vars(base) for base in kind.__mro__ if base.__module__.startswith("everbeat"))


def _members(kind: type) -> Iterator[str]:
    ours = [base for base in kind.__mro__ if base.__module__.startswith("everbeat")]
    names = {name for base in ours for name in (*vars(base), *_annotations(base), *_assigned(base))}
    for name in sorted(names):
        if name in getattr(kind, "__members__", ()) or (
            name.startswith("_") and name not in _CALLED_BY_SYNTAX
        ):
            continue
        yield _member(kind, name)


def _assigned(kind: type) -> Iterator[str]:
    """Return the attributes that instances get in `__init__`."""
    made = vars(kind).get("__init__")
    if not inspect.isfunction(made):
        return
    # By the module of `__init__`, because errors have the name of the package that users import.
    module = ast.parse(inspect.getsource(sys.modules[made.__module__]))
    found = (
        each for each in ast.walk(module) if isinstance(each, ast.ClassDef) and each.name == kind.__name__
    )
    for node in (node for each in found for node in ast.walk(each)):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def _annotations(kind: type) -> dict[str, Any]:
    return dict(vars(kind).get("__annotations__", {}))


def _member(kind: type, name: str) -> str:
    found = inspect.getattr_static(kind, name, None)
    hint = next((_annotations(base)[name] for base in kind.__mro__ if name in _annotations(base)), None)
    match found:
        case property():
            made = inspect.signature(found.fget).return_annotation if found.fget else inspect.Signature.empty
            return f"property {name} -> {_made(made)}"
        case classmethod():
            return f"classmethod {name}{_signature(found.__func__)}"
        case staticmethod():
            return f"staticmethod {name}{_signature(found.__func__)}"
        case _ if inspect.isfunction(found):
            word = "async def" if inspect.iscoroutinefunction(found) else "def"
            return f"{word} {name}{_signature(found)}"
        case _ if hint is not None:
            is_constant = isinstance(found, str | int | float | bool | tuple)
            return f"attribute {name}: {_annotation(hint)}" + (f" = {found!r}" if is_constant else "")
        case str() | int() | float() | bool():
            return f"attribute {name} = {found!r}"
        case _:
            return f"attribute {name}"


def _signature(function: Callable[..., Any]) -> str:
    try:
        return _shown(inspect.signature(function))
    except (TypeError, ValueError):
        return "(...)"


def _shown(signature: inspect.Signature) -> str:
    parameters: list[str] = []
    before = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for each in signature.parameters.values():
        if before is each.POSITIONAL_ONLY and each.kind is not before:
            parameters.append("/")
        if each.kind is each.KEYWORD_ONLY and before not in (each.KEYWORD_ONLY, each.VAR_POSITIONAL):
            parameters.append("*")
        before = each.kind
        prefix = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        said = f"{prefix}{each.name}"
        if each.annotation is not each.empty:
            said += f": {_annotation(each.annotation)}"
        if each.default is not each.empty:
            said += f" = {plain(repr(each.default))}"
        parameters.append(said)
    if before is inspect.Parameter.POSITIONAL_ONLY:
        parameters.append("/")
    made = signature.return_annotation
    return f"({', '.join(parameters)})" + ("" if made is signature.empty else f" -> {_made(made)}")


def _made(hint: Any) -> str:
    """Return the type that a caller gets; methods written once for threads and event loops annotate the plan."""
    text = _annotation(hint)
    return text[len("Plan[") : -1] if text.startswith("Plan[") else text


def _annotation(hint: Any) -> str:
    if hint is inspect.Signature.empty:
        return "?"
    if hint is None:
        return "None"
    return plain(hint if isinstance(hint, str) else inspect.formatannotation(hint))
