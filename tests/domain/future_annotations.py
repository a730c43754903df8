"""Functions whose annotations Python cannot resolve, because of the line below."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decimal import Decimal


def with_a_local_class() -> Any:
    class Order: ...

    def pay(amount: int, order: Order) -> None: ...

    return pay


def only_for_checkers(amount: Decimal) -> None: ...


def unknown_result() -> Decimal: ...


def broken(amount: int[str]) -> None: ...  # type: ignore[type-arg]
