"""The page for operators names every reason of `explain` and every check of `doctor`, in the order of the code."""

from everbeat.domain.diagnosis import CheckCode
from everbeat.domain.explanation import ReasonCode
from everbeat.domain.states import TaskState
from tests.docs.tables import table


def test_every_reason_is_there() -> None:
    rows = table("operations.md", "Code", "Of", "Means")
    assert [row["Code"] for row in rows] == [code.value for code in ReasonCode]
    named = {each for row in rows for each in row["Of"].split(", ")}
    assert named == {state.value for state in TaskState} | {"second run", "workflow", "node"}


def test_every_check_is_there() -> None:
    rows = table("operations.md", "Check", "FAIL or WARN when")
    assert [row["Check"] for row in rows] == [code.value for code in CheckCode]
