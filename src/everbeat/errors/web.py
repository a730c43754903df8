"""Errors of the dashboard's server."""

from __future__ import annotations

from everbeat.errors.tree import EverbeatError


class WebNotInstalled(EverbeatError):
    """The dashboard was started, but its libraries are not installed."""

    code = "WEB_NOT_INSTALLED"

    def __init__(self) -> None:
        super().__init__(
            "The dashboard needs libraries that are not installed.", fix="run pip install 'everbeat[web]'."
        )


class AddressInUse(EverbeatError):
    """A server cannot listen on the address that it was given."""

    code = "ADDRESS_IN_USE"

    def __init__(self, address: str, problem: str) -> None:
        super().__init__(
            f"The dashboard cannot listen on {address}: {problem}.",
            fix="stop the other program, or use another port.",
        )
