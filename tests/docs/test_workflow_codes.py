"""The page of codes has a row for each code that nodes, workflows and the reconciler have, in the order of the code."""

import re
from importlib.resources import files
from pathlib import Path

from everbeat.domain.workflow.states import STUCK, WorkflowCode
from everbeat.errors.tasks import BUILT_IN_CODES
from tests.docs.tables import table

PARTS = {"SUBWORKFLOW_": ("FAILED", "CANCELLED"), "MEMBERS_": ("FAILED", "SKIPPED")}
"""Codes that statements put together of a word and a state."""


def statements() -> dict[str, str]:
    folder = files("everbeat") / "sql" / "workflow"
    assert isinstance(folder, Path)
    return {file.stem: file.read_text() for file in folder.glob("*.sql")}


def written() -> set[str]:
    """The codes of errors in the statements."""
    found: set[str] = set()
    for text in statements().values():
        for said in re.findall(r"'code',\s*(case .*? end|'[A-Z_]*)", text, flags=re.DOTALL):
            found |= {
                code for code in re.findall(r"'([A-Z_]+)", said) if code not in ("PAUSED", "CANCELLING")
            }
    whole = {f"{word}{state}" for word in PARTS.keys() & found for state in PARTS[word]}
    return (found - PARTS.keys()) | whole


def test_every_workflow_code_is_documented_in_order() -> None:
    rows = table("codes.md", "Code", "Cause", "What you do")
    assert [row["Code"] for row in rows] == [code.value for code in WorkflowCode]
    assert all(row["Cause"] and row["What you do"] for row in rows)


def test_every_error_code_that_sql_statements_write_is_known() -> None:
    own = {code.value for code in WorkflowCode} - {WorkflowCode.WORKFLOW_SUCCESS_CASE_NOT_MET.value}
    assert written() - BUILT_IN_CODES == own


def test_every_kind_of_stuck_workflow_is_documented() -> None:
    rows = table("codes.md", "Stuck", "Found", "What you do")
    assert [row["Stuck"] for row in rows] == [*STUCK]
    assert {*re.findall(r"'([A-Z]+_[A-Z_]+)'", statements()["find_stuck"])} == {*STUCK}
