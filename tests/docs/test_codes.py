"""The page of codes has every reason of `explain` and every check of `doctor`, in the order of the code."""

from everbeat.domain.doctor.findings import CheckCode
from everbeat.domain.explain.reasons import ReasonCode
from everbeat.domain.task.states import TaskState
from tests.docs.tables import table


def test_every_explain_reason_is_documented_in_order() -> None:
    rows = table("codes.md", "Code", "Of", "Means")
    assert [row["Code"] for row in rows] == [code.value for code in ReasonCode]
    named = {each for row in rows for each in row["Of"].split(", ")}
    assert named == {state.value for state in TaskState} | {"second run", "workflow", "node", "schedule"}


def test_every_doctor_check_is_documented_in_order() -> None:
    rows = table("codes.md", "Check", "FAIL or WARN when")
    assert [row["Check"] for row in rows] == [code.value for code in CheckCode]
