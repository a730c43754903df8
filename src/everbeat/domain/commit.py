"""The user's rows and the task's completion in one transaction: what code is given for it.

What lives here: `Completion`, and the shape of what `Context.commit` returns. What may not: connections and statements.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Final, Protocol, final

from msgspec import Struct

RESULT: Final = "completion.result"
"""What the error of a result that cannot be stored names as its `parameter`."""


@final
class Completion(Struct):
    """What the task will have returned once the block's transaction is committed: set `result` inside the block."""

    result: Any = None


class TaskCommit(Protocol):
    """One transaction as a block: `with` for sync connections, `async with` for async ones."""

    def __enter__(self) -> Completion: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def __aenter__(self) -> Completion: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
