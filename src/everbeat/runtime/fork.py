"""What must happen in a forked child before anything else does.

What lives here: registering a method for it without keeping its object alive. What may not: what the method
forgets.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable


def call_in_forked_child(method: Callable[[], None]) -> None:
    """Calls a bound method in every child that this process forks, as long as its object lives.

    A lock that another thread held at the fork stays held in the child for ever; threads and connections stay
    the parent's. Objects that have such make new ones there.
    """
    if hasattr(os, "register_at_fork"):
        held = weakref.WeakMethod(method)
        os.register_at_fork(after_in_child=lambda: _call(held))


def _call(held: weakref.WeakMethod[Callable[[], None]]) -> None:
    method = held()
    if method is not None:
        method()
