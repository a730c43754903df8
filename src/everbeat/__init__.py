"""everbeat: a PostgreSQL task queue for Python that detects dead workers and recovers their tasks.

`import everbeat` alone loads no submodule. All public names are loaded from `everbeat._top_level` when one of them is first used.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everbeat._top_level import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # A supervisor imports submodules such as everbeat.errors. Such an import must not load the client code as well.
    if (name.startswith("__") and name != "__all__") or find_spec(f"everbeat.{name}") is not None:
        raise AttributeError(f"module 'everbeat' has no attribute {name!r}")
    listed = vars(import_module("everbeat._top_level"))
    globals().update({each: value for each, value in listed.items() if not each.startswith("_")})
    globals()["__all__"] = sorted(each for each in listed if not each.startswith("_"))
    if name in globals():
        return globals()[name]
    for place in map(
        "everbeat.{}".format, ("errors", "inspection", "logging", "middleware", "recovery", "workflows")
    ):
        if hasattr(import_module(place), name):
            raise AttributeError(f"{name!r} is not in everbeat. Fix: from {place} import {name}.")
    raise AttributeError(f"module 'everbeat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return ["__all__", "__version__", *__getattr__("__all__")]
