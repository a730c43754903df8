"""Records and errors as JSON documents, the same for the command line and the dashboard."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import structs

from everbeat.domain.inspection import TaskSummary
from everbeat.domain.workflow.states import WorkflowInfo
from everbeat.errors import ConfigurationError, EverbeatError, Problem, TaskError


def plain_value(value: object) -> object:
    """Return a value that JSON has no form for as one that it has. Use this function as `enc_hook`."""
    match value:
        case TaskError():
            return {
                "code": value.code,
                "message": value.message,
                "data": value.data,
                "type": value.type,
                "traceback": value.traceback,
            }
        case Mapping():
            return dict(value)
        case Path():
            return str(value)
        case _:
            return str(value)


def task_document(task: TaskSummary) -> dict[str, object]:
    """Return a task as a JSON document with its fields, `claimed` and `ended_at`."""
    return structs.asdict(task) | {"claimed": task.claimed, "ended_at": task.ended_at}


def workflow_document(info: WorkflowInfo) -> dict[str, object]:
    """Return a workflow as a JSON document with its fields and `node_count`."""
    return structs.asdict(info) | {"node_count": info.nodes}


_NOT_LISTED = ("output", "result")


def listed_workflow_document(info: WorkflowInfo) -> dict[str, object]:
    """Return a workflow of a list as a JSON document. The list does not read results, and a null would claim that there is none."""
    return {name: value for name, value in workflow_document(info).items() if name not in _NOT_LISTED}


def failure_document(error: EverbeatError) -> dict[str, Any]:
    """Return an error as a JSON document with `code`, `message` and `fix`."""
    document: dict[str, Any] = {"code": error.code, "message": error.message, "fix": error.fix}
    if isinstance(error, ConfigurationError):
        if len(error.problems) > 1:
            document["message"] = "\n".join(problem.finding() for problem in error.problems)
            document["fix"] = "\n".join(f"{problem.fix}." for problem in error.problems)
        document["problems"] = [problem_document(problem) for problem in error.problems]
    return document


def problem_document(problem: Problem) -> dict[str, Any]:
    """Return one problem as a JSON document."""
    return {
        "code": problem.code,
        "subject": problem.subject,
        "value": _unquoted(problem.value),
        "rule": problem.rule,
        "fix": problem.fix,
        "where": problem.where,
    }


def _unquoted(shown: str) -> str:
    """Return a displayed value as the user typed it, that is, a string without its quotes."""
    try:
        value = ast.literal_eval(shown)
    except (ValueError, SyntaxError):
        return shown
    return value if isinstance(value, str) else shown
