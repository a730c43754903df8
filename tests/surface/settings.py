"""Record every setting with its default and its documented values, and every environment variable."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from typing import Any

from everbeat import NatsConfig, QueueConfig, RecoveryConfig, RetryPolicy, WorkerConfig
from everbeat.client.options import SendSettings
from everbeat.domain.task.policy import TaskOptions
from tests.docs.tables import marked_tables
from tests.surface.source import SOURCE, plain

SETTINGS = (TaskOptions, SendSettings, RetryPolicy, RecoveryConfig, WorkerConfig, QueueConfig, NatsConfig)
_VARIABLE = re.compile(r'"(EVERBEAT_[A-Z_]+|NO_COLOR)"')
_NO_VARIABLES = {"EVERBEAT_ERROR", "EVERBEAT_"}


def text() -> str:
    """Return the settings of each class, then the environment variables."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    allowed = {
        (name.rpartition(".")[2], row["Field"]): row["Allowed"]
        for name, rows in marked_tables("configuration.md").items()
        for row in rows
    }
    for kind in SETTINGS:
        yield f"{kind.__name__}:"
        for each in fields(kind):
            rule = allowed.get((kind.__name__, each.name), "not in the reference")
            yield f"  {each.name}: {plain(str(each.type))} = {_default(each)}  [{rule}]"
        yield ""
    code = "".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    yield "environment variables:"
    yield from (f"  {name}" for name in sorted(set(_VARIABLE.findall(code)) - _NO_VARIABLES))


def _default(each: Field[Any]) -> str:
    if each.default is not MISSING:
        return plain(repr(each.default))
    return "required" if each.default_factory is MISSING else "made anew"
