"""Puts the rooms together: what workers, supervisors and sweeps are made of, from an app's blueprint.

What lives here: wiring. What may not: decisions, loops and statements, which belong to the rooms that are wired.

This file is the one place of lazy imports: a program that only sends tasks does not load the half that runs them, which
would double the time of `import everbeat`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from everbeat.errors import NatsNotInstalled

if TYPE_CHECKING:
    from everbeat.assembly.guest import Guest, run_guest
    from everbeat.assembly.nats_parts import look_at_nats, messenger_of, prepare_nats
    from everbeat.assembly.pruning import prune_plan
    from everbeat.assembly.sweep import release_plan, sweep_plan
    from everbeat.assembly.tree import supervise

__all__ = [
    "Guest",
    "look_at_nats",
    "messenger_of",
    "prepare_nats",
    "prune_plan",
    "release_plan",
    "run_guest",
    "supervise",
    "sweep_plan",
]

_HOMES: Final = {
    "Guest": "guest",
    "look_at_nats": "nats_parts",
    "messenger_of": "nats_parts",
    "prepare_nats": "nats_parts",
    "prune_plan": "pruning",
    "release_plan": "sweep",
    "run_guest": "guest",
    "supervise": "tree",
    "sweep_plan": "sweep",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as problem:
        if problem.name != "nats":
            raise
        raise NatsNotInstalled from None
