"""Builds workers, supervisors, in-process workers and sweeps from an app definition.

The names of this package are imported lazily. So a program that only sends tasks does not load the code that runs them, which would
double the import time of everbeat. NATS is loaded only if it is configured.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from everbeat.errors import NatsNotInstalled

if TYPE_CHECKING:
    from everbeat.assembly.in_process import in_process_worker as in_process_worker
    from everbeat.assembly.nats import inspect_nats as inspect_nats
    from everbeat.assembly.nats import prepare_nats as prepare_nats
    from everbeat.assembly.operations import prune_plan as prune_plan
    from everbeat.assembly.operations import release_plan as release_plan
    from everbeat.assembly.operations import sweep_plan as sweep_plan
    from everbeat.assembly.supervision import run_supervisor as run_supervisor

_MODULES: Final = {
    "in_process_worker": "in_process",
    "inspect_nats": "nats",
    "prepare_nats": "nats",
    "prune_plan": "operations",
    "release_plan": "operations",
    "run_supervisor": "supervision",
    "sweep_plan": "operations",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    except ModuleNotFoundError as problem:
        if problem.name != "nats":
            raise
        raise NatsNotInstalled from None
