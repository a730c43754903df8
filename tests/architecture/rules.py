"""Rules that a linter does not check: each is a function from a parsed module to its violations.

`test_rules.py` applies them, and tries each on code planted for it.
"""

import ast
import re
from collections.abc import Iterator

from tests.architecture.source_tree import PACKAGE, FunctionNode, Module, functions, nodes

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 70
ATTIC_NAMES = {"common", "helper", "helpers", "manager", "managers", "misc", "util", "utils"}

AMBIENT_CLOCK = {
    "datetime.date.today",
    "datetime.datetime.now",
    "datetime.datetime.today",
    "datetime.datetime.utcnow",
    "time.time",
    "time.time_ns",
}
INJECTED_DICE = {"random.Random", "random.SystemRandom"}
STRAY_TASKS = {"asyncio.create_task", "asyncio.ensure_future"}
BENCHMARKS_MAY_IMPORT = {"", "errors", "bench"}
INTERNAL_ROOMS = {path.stem for path in PACKAGE.iterdir()} - BENCHMARKS_MAY_IMPORT


def imports_in_functions(module: Module) -> Iterator[str]:
    lines = {
        node.lineno
        for function in functions(module.tree)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    for line in sorted(lines):
        yield f"{module.name}:{line}: an import inside a function hides a dependency; move it to the top"


def ambient_clock_and_dice(module: Module) -> Iterator[str]:
    for node, name in _qualified_names(module.tree):
        if name in AMBIENT_CLOCK:
            yield f"{module.name}:{node.lineno}: {name}: take a Clock, or let the database tell the time"
        elif name.startswith("random.") and name not in INJECTED_DICE:
            yield f"{module.name}:{node.lineno}: {name}: take a random.Random"


def stray_tasks(module: Module) -> Iterator[str]:
    lines = {node.lineno for node, name in _qualified_names(module.tree) if name in STRAY_TASKS}
    for node in nodes(module.tree):
        match node:
            case ast.Attribute(value=ast.Name(id=owner), attr="create_task") if owner.endswith("group"):
                pass  # an asyncio.TaskGroup holds its tasks
            case ast.Attribute(attr="create_task"):
                lines.add(node.lineno)
    for line in sorted(lines):
        yield f"{module.name}:{line}: nothing holds this task; use the task set of runtime, or a TaskGroup"


def unbounded_sessions(module: Module) -> Iterator[str]:
    """Find connections and transactions made without the time limits that all of everbeat's have."""
    for node in nodes(module.tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="transaction")):
                yield f"{module.name}:{node.lineno}: begin it with store.transaction, which bounds it"
            case ast.Call(
                func=ast.Attribute(
                    value=ast.Name(id="psycopg" | "Connection" | "AsyncConnection"), attr="connect"
                )
            ):
                yield f"{module.name}:{node.lineno}: connect by a Target, which bounds the session"


def unguarded_output(module: Module) -> Iterator[str]:
    called = {id(node.func) for node in nodes(module.tree) if isinstance(node, ast.Call)}
    for node, name in _qualified_names(module.tree):
        if (name == "rich.console.Console" and id(node) in called) or name in (
            "sys.__stdout__", "sys.__stderr__", "sys.stdout.buffer", "sys.stderr.buffer", "rich.print",
        ):  # fmt: skip
            yield f"{module.name}:{node.lineno}: {name} lets control characters through; use cli/output.py"


def too_long(module: Module) -> Iterator[str]:
    lines = module.text.count("\n")
    if lines > MAX_FILE_LINES:
        yield f"{module.name}: {lines} lines, at most {MAX_FILE_LINES}: split it by subject"
    for function in functions(module.tree):
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        if length > MAX_FUNCTION_LINES:
            yield (
                f"{module.name}:{function.lineno}: {function.name} has {length} lines, "
                f"at most {MAX_FUNCTION_LINES}: name its steps"
            )


def attic_names(module: Module) -> Iterator[str]:
    parts = module.name.removesuffix(".py").split("/")
    for part in parts:
        if part.strip("_") in ATTIC_NAMES:
            yield f"{module.name}: `{part}` says nothing of what lives there; name the subject"


def internals_in_benchmarks(module: Module) -> Iterator[str]:
    """Imports of `benchmarks` besides the public names of everbeat and the parts of `everbeat.bench`."""
    for node in nodes(module.tree):
        match node:
            case ast.Import(names=names):
                imported = [alias.name for alias in names]
            case ast.ImportFrom(module="everbeat", names=names):
                imported = [f"everbeat.{alias.name}" for alias in names if alias.name in INTERNAL_ROOMS]
            case ast.ImportFrom(module=str(source)):
                imported = [source]
            case _:
                continue
        for name in imported:
            first, _, rest = name.partition(".")
            if first == "everbeat" and rest.partition(".")[0] not in BENCHMARKS_MAY_IMPORT:
                yield f"{module.name}:{node.lineno}: {name} is internal; use everbeat, everbeat.errors or everbeat.bench"


def tests_without_assertion(module: Module) -> Iterator[str]:
    for function in _tests(module):
        if not any(_asserts(node) for node in ast.walk(function)):
            yield f"{module.name}:{function.lineno}: {function.name} cannot fail; assert something"


def sleeps_without_reason(module: Module) -> Iterator[str]:
    lines = module.text.splitlines()
    for node in nodes(module.tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="time" | "asyncio"), attr="sleep")):
                around = lines[max(0, node.lineno - 2) : node.end_lineno]
                if not any("#" in line for line in around):
                    yield f"{module.name}:{node.lineno}: await an event, or say why only a sleep can do"


def _tests(module: Module) -> list[FunctionNode]:
    return [function for function in functions(module.tree) if function.name.startswith("test_")]


def _asserts(node: ast.AST) -> bool:
    match node:
        case ast.Assert():
            return True
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
            return re.match(r"_?(assert_|check_|expect|verify|raises$|warns$)", name) is not None
        case _:
            return False


def _qualified_names(tree: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    """Every dotted name that starts with an imported one, spelt from the import on."""
    imported: dict[str, str] = {}
    for node in nodes(tree):
        match node:
            case ast.Import(names=names):
                imported |= {alias.asname or alias.name: alias.name for alias in names}
            case ast.ImportFrom(module=str(source), names=names):
                imported |= {alias.asname or alias.name: f"{source}.{alias.name}" for alias in names}
    for node in nodes(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            first, _, rest = _dotted(node).partition(".")
            if first in imported:
                yield node, f"{imported[first]}.{rest}".rstrip(".")


def _dotted(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name) if owner := _dotted(value):
            return f"{owner}.{name}"
        case _:
            return ""
