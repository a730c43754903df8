"""The error that ends a request with a status, and the status of everbeat's own errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from everbeat.errors import (
    AmbiguousId,
    BatchNotFound,
    BulkActionNotFound,
    ConfigurationError,
    DatabaseError,
    EverbeatError,
    PayloadError,
    RecoveryNotFound,
    TaskNotFound,
    UnknownName,
    WorkflowNotFound,
)


class RequestRefused(Exception):
    """An answer that is not a page: a status, a code, a sentence, and a fix if there is one."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        fix: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.fix = fix
        self.headers = dict(headers or {})


_STATUS: Final[Mapping[type[EverbeatError], int]] = {
    TaskNotFound: 404,
    WorkflowNotFound: 404,
    BatchNotFound: 404,
    BulkActionNotFound: 404,
    RecoveryNotFound: 404,
    UnknownName: 404,
    AmbiguousId: 400,
    ConfigurationError: 400,
    PayloadError: 400,
    DatabaseError: 503,
    EverbeatError: 409,
}


def status_of(error: EverbeatError) -> int:
    """Return the HTTP status of an error. An action that was refused because of the state of its target has the status 409."""
    return next(_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS)
