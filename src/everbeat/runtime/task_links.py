"""Links to the pages of tasks in the dashboard. A process that runs an app's code knows the dashboard of the app."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit
from uuid import UUID

from everbeat.domain.settings.settings import refused

VARIABLE: Final = "EVERBEAT_DASHBOARD_URL"
LONGEST: Final = 500
_SCHEMES: Final = ("http", "https")
_dashboard: list[str] = []
"""The dashboard of the app whose tasks this process runs, at most one."""


def dashboard_url_of(given: str | None, *, environment: Mapping[str, str]) -> str | None:
    """Return the URL of the dashboard without a slash at its end, or None if neither the argument nor the environment contains it.

    Raises ConfigurationError if it is not a URL to which a path can be added.
    """
    value, subject = given, "App.dashboard_url"
    if value is None:
        value, subject = environment.get(VARIABLE) or None, VARIABLE
    if value is None:
        return None
    if (rule := _problem(value)) is not None:
        raise refused(
            value,
            subject=subject,
            code="WRONG_FORM",
            rule=rule,
            fix="use the address under which people open the dashboard, such as 'https://ops.example.com/everbeat'",
        )
    return value.rstrip("/")


def _problem(value: object) -> str | None:
    if not isinstance(value, str):
        return f"must be text, not of type {type(value).__name__}"
    if len(value) > LONGEST or not value.isascii() or not value.isprintable() or " " in value:
        return f"must be a URL of at most {LONGEST} ASCII characters without spaces"
    try:
        parts = urlsplit(value)
        has_host = bool(parts.hostname)
    except ValueError:
        return "must be a URL"
    if parts.scheme not in _SCHEMES or not has_host:
        return "must be a URL that begins with http:// or https:// and contains a host"
    if parts.username is not None or parts.password is not None:
        return "must not contain a user or a password, because log lines contain it"
    return "must not contain a query or a fragment" if parts.query or parts.fragment else None


def link_tasks(dashboard_url: str | None) -> None:
    """Link the log lines of tasks to this dashboard from now on. None changes nothing."""
    if dashboard_url is not None:
        _dashboard[:] = [dashboard_url]


def task_url(task_id: UUID | str) -> str | None:
    """Return the address of the task's page in the dashboard, or None if this process runs no app with a `dashboard_url`."""
    return f"{_dashboard[0]}/tasks/{task_id}" if _dashboard else None
