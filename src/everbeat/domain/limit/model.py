"""The types of limits: what the code declares, what a task must pass to start, and the text of keys."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Final, Literal, TypeAlias

from msgspec import Struct, field

WhenFull: TypeAlias = Literal["wait", "drop", "newest"]
MOST_LIMITS: Final = 3
"""The largest number of limits that one task can have."""
LONGEST_KEY_BYTES: Final = 200
OF_TASK: Final = "task:"
OF_QUEUE: Final = "queue:"
_HASHED: Final = "sha256:"


class LimitDefinition(Struct, frozen=True, kw_only=True):
    """A limit as code declares it. A limit has at most `starts` starts per `period_s` seconds, and `burst` of them at once.

    If `sliding` is set, no window of `period_s` seconds contains more than `starts` starts. `key` is the path of the argument that is the key.
    """

    name: str
    concurrency: int | None = None
    starts: int | None = None
    period_s: float | None = None
    burst: int = 1
    sliding: bool = False
    fair: bool = False
    weights: Mapping[str, int] = field(default_factory=dict)
    when_full: WhenFull = "wait"
    key: str | None = None


class NodeGate(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A gate of a workflow node's task. It is known (`gate`), or it is the limit with the argument at `path` as its key.

    `otherwise` is the key if the argument is missing or null.
    """

    gate: str | None = None
    limit: str | None = None
    path: tuple[str, ...] = ()
    otherwise: str = "null"


class Gates(Struct, frozen=True):
    """The gates that a task must pass to start, and the permits that it takes of each. `costs` is None if it takes one of each."""

    names: tuple[str, ...]
    costs: tuple[int, ...] | None = None


NO_GATES: Final = Gates(())


def bounded_key(text: str) -> str:
    """Return the text of a key as it is stored. A text of more than 200 bytes becomes its hash (`workflow/enqueue_nodes` does the same)."""
    encoded = text.encode()
    return text if len(encoded) <= LONGEST_KEY_BYTES else _HASHED + sha256(encoded).hexdigest()


def gate_of(limit: str, key: str | None) -> str:
    """Return the name of the gate of a limit, or of one of its keys. The name of a limit contains no slash, but a key can."""
    return limit if key is None else f"{limit}/{bounded_key(key)}"


def limit_of(gate: str) -> str:
    """Return the name of the limit to which a gate belongs."""
    return gate.partition("/")[0]
