"""Logging for the processes of a tree: destination, minimum level and JSON format."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import traceback
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final
from uuid import UUID

from everbeat.errors.wording import storable, visible, visible_json
from everbeat.runtime import log_pump
from everbeat.runtime.events import Event, event_name
from everbeat.runtime.task_links import task_url
from everbeat.runtime.task_logging import TASK_FIELDS, TaskFilter, fields_of

_OWN: Final = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
    "everbeat_event",
    *TASK_FIELDS,
}
_EVERBEAT: Final = "everbeat."
_LONGEST_LINE: Final = 500_000
"""The size from which the texts of a JSON line are cut, in bytes. The log pump passes on lines of up to 1 MiB unchanged."""
_LONGEST_TEXT: Final = 50_000
_LONGEST_FIELD: Final = 1_000
_LONGEST_NAME: Final = 200
_MOST_FIELDS: Final = 50
_NAMED: Final = re.compile(r"(\w+)=%[^%\s]*?[a-zA-Z]")
_ID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PLACES: Final = re.compile(r"%[^%\s]*?[a-zA-Z]")

_log = logging.getLogger("everbeat.process")


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object with `time`, `level`, `logger`, `message`, `pid`, and optionally `event`, `fields`, `exception`.

    The `fields` come from the event, from `name=value` pairs in everbeat's messages, from `extra`, and from the running attempt.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a JSON object on one line, without a trailing newline."""
        document: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
        }
        name, fields = _structure(record)
        if name is not None:
            document["event"] = name
        fields = fields_of(record) | fields
        fields |= {key: value for key, value in vars(record).items() if key not in _OWN}
        if (url := _link_of(fields.get("task_id"))) is not None:
            fields["task_url"] = url
        if fields:
            document["fields"] = fields
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            document["stack"] = record.stack_info
        return line_of(document)


def _link_of(task_id: object) -> str | None:
    """Return the address of the task's page, unless a program has passed something else as `task_id` in `extra`."""
    is_id = isinstance(task_id, UUID) or (isinstance(task_id, str) and _ID.fullmatch(task_id))
    return task_url(str(task_id)) if is_id else None


def _is_own(record: logging.LogRecord) -> bool:
    """Return whether everbeat wrote the record. A record that a user's program has made or received can be without a name."""
    return (record.name or "").startswith(_EVERBEAT)


def _structure(record: logging.LogRecord) -> tuple[str | None, dict[str, Any]]:
    """Return the event name and fields of a record. Everbeat's own messages consist of a name and `name=value` pairs."""
    event = getattr(record, "everbeat_event", None)
    if isinstance(event, Event):
        return event_name(event), event.shown
    if not _is_own(record) or not isinstance(record.msg, str):
        return None, {}
    name, _, rest = record.msg.partition(" ")
    names, args = _NAMED.findall(rest), record.args
    if not re.fullmatch(r"[a-z]+(_[a-z]+)+", name) or not isinstance(args, tuple):
        return None, {}
    fits = len(names) == len(args) == len(_PLACES.findall(rest))
    return name, dict(zip(names, args, strict=True)) if fits else {}


def line_of(document: dict[str, Any]) -> str:
    """Return the object as one line of ASCII JSON. A value that JSON does not support is converted to a string."""
    try:
        text = json.dumps(document, default=_plain, allow_nan=False)
    except (
        TypeError,
        ValueError,
        RecursionError,
    ):  # keys that are not strings, NaN, or a value that contains itself
        fields = {_safe_text(name): _fitting(value) for name, value in document.get("fields", {}).items()}
        text = json.dumps(document | ({"fields": fields} if fields else {}), default=_plain)
    if len(text) > _LONGEST_LINE:
        text = json.dumps(_shortened(document), default=_plain)
    return visible_json(text)


def _shortened(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with its long texts cut: the log pump takes a line that is too long for other text."""
    fields = {
        _cut(name, _LONGEST_NAME): _cut(value, _LONGEST_FIELD)
        for name, value in [*document.get("fields", {}).items()][:_MOST_FIELDS]
    }
    cut = {name: _cut(value, _LONGEST_TEXT) for name, value in document.items()}
    return cut | ({"fields": fields} if fields else {})


def _cut(value: object, longest: int) -> object:
    """Return a value whose JSON is short, or its text up to this size in bytes."""
    fitting = _fitting(value)
    if len(json.dumps(fitting, default=_plain)) <= longest:
        return fitting
    return storable(_safe_text(fitting), limit=longest)


def _fitting(value: object) -> object:
    """Return the value, or its text if JSON does not support it, so that one value leaves the others as they are."""
    try:
        json.dumps(value, default=_plain, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return _safe_text(value)
    return value


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    return list(value) if isinstance(value, set | frozenset) else _safe_text(value)


def _safe_text(value: object) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - str() of a user's object runs the user's code
        return "(cannot be converted to text)"


def message_line(message: str, *, event: str, level: str, **fields: object) -> str:
    """Return the JSON line for a message that does not come from a logger."""
    given = {name: value for name, value in fields.items() if value is not None}
    return line_of(
        {
            "time": log_pump.moment(),
            "level": level,
            "logger": "everbeat.cli",
            "message": message,
            "pid": os.getpid(),
            "event": event,
            "fields": given,
        }
    )


def log_warnings_and_exceptions() -> None:
    """Log Python warnings and uncaught exceptions."""
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread


def _uncaught(kind: type[BaseException], problem: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    if logging.root.handlers:
        _log.critical("uncaught_exception", exc_info=(kind, problem, trace))
    else:
        text = "".join(traceback.format_exception(kind, problem, trace))
        name = "uncaught_exception"
        print(message_line(name, event=name, level="CRITICAL", traceback=text), file=sys.stderr)


def _uncaught_in_thread(uncaught: threading.ExceptHookArgs) -> None:
    if uncaught.exc_value is not None and not isinstance(uncaught.exc_value, SystemExit):
        thread = "" if uncaught.thread is None else uncaught.thread.name
        trace = (uncaught.exc_type, uncaught.exc_value, uncaught.exc_traceback)
        _log.error("uncaught_exception thread=%s", thread, exc_info=trace)


LOG_LEVEL_VARIABLE: Final = "EVERBEAT_LOG_LEVEL"
FORMAT_VARIABLE: Final = "EVERBEAT_LOG_FORMAT"
LOG_FORMAT: Final = "%(asctime)s %(process)d %(levelname)-7s %(name)s: %(message)s"


class VisibleFormatter(logging.Formatter):
    """Formats records with control characters escaped, because people read logs in terminals. Adds the task of running code."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the formatted record and its traceback, with control characters escaped."""
        return visible(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name in the base class
        """Return the line without its traceback. The task of the code that wrote it follows the message."""
        line = super().formatMessage(record)
        if _is_own(record):
            return line  # these messages name their task themselves
        return " ".join([line, *(f"{name}={value}" for name, value in fields_of(record).items())])


def is_json() -> bool:
    """Return whether EVERBEAT_LOG_FORMAT selects JSON."""
    return os.environ.get(FORMAT_VARIABLE, "").lower() == "json"


def log_to_stderr() -> None:
    """Write logs of EVERBEAT_LOG_LEVEL and above to stderr, unless the user's module has configured logging."""
    if not logging.root.handlers:
        level = os.environ.get(LOG_LEVEL_VARIABLE, "INFO").upper()
        known = logging.getLevelNamesMapping().get(level, logging.INFO)
        show_logs(known)


def show_logs(level: int) -> None:
    """Write logs of `level` and above to stderr, unless logging is already configured."""
    handler = logging.StreamHandler()
    handler.addFilter(TaskFilter())
    if is_json():
        log_warnings_and_exceptions()
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(VisibleFormatter(LOG_FORMAT))
    logging.basicConfig(level=level, handlers=[handler])
