"""Test that an event is logged under the package that emits it, so that a team can set the level of one package."""

from __future__ import annotations

import ast
from collections import defaultdict
from importlib import import_module
from pkgutil import walk_packages

import everbeat
from everbeat.runtime.events import Event
from tests.architecture.source_tree import PACKAGE, modules, nodes

ROOMS = frozenset({"worker", "supervisor", "recovering", "maintenance", "nats", "hints", "store"})
SHARED = {
    "DatabaseBack": "an outage of the database, which a supervisor reports for its sessions",
    "DatabaseUnreachable": "the same, and the error of the same name",
    "HookFailed": "hooks are a part of recovery, wherever they are called",
    "RecoveriesNotTraced": "the spans of recoveries, which a supervisor asks a worker process to create",
    "ProcessRecycled": "worker processes are recycled by their supervisor, and task processes by their worker",
}


def emitted_in() -> dict[str, set[str]]:
    """Return the packages that call each class, by the name of the class."""
    found = defaultdict[str, set[str]](set)
    for module in modules(PACKAGE):
        for node in nodes(module.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                found[node.func.id].add(module.name.partition("/")[0])
    return found


def events() -> list[type[Event]]:
    for module in walk_packages(everbeat.__path__, "everbeat."):
        if module.name.split(".")[1] in ROOMS | {"runtime"}:
            import_module(module.name)
    found = list(Event.__subclasses__())
    for kind in found:
        found += kind.__subclasses__()
    return [kind for kind in found if kind.__module__.startswith("everbeat.")]


def test_each_event_is_logged_under_the_room_that_emits_it() -> None:
    rooms = emitted_in()
    wrong = {
        kind.__name__: (kind.component, rooms[kind.__name__])
        for kind in events()
        if (emitters := rooms[kind.__name__] & ROOMS) and emitters != {kind.component}
    }
    assert wrong.keys() == SHARED.keys(), wrong
