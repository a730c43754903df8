"""The JSON of a task's outcome is the same whether a codec or a workflow writes it."""

from __future__ import annotations

from typing import Any

import pytest

from everbeat.domain.task.definition import CallCodec
from everbeat.domain.task.outcome import Completed, Failed, TaskResult
from everbeat.errors import RESULT_NOT_AVAILABLE, PayloadError, TaskError


def codec_of(annotation: Any) -> CallCodec:
    def task(value): ...

    task.__annotations__ = {"value": annotation, "return": annotation}
    return CallCodec.from_function(task, task_name="task")


@pytest.mark.parametrize(
    ("stored", "outcome"),
    [
        ('{"completed":5}', Completed(5)),
        ('{"failed":{"code":"X","message":"m","data":{"a":1}}}', Failed(TaskError("X", "m", {"a": 1}))),
        ('{"failed":{"code":"X","message":null,"data":null,"type":null}}', Failed(TaskError("X"))),
        ('{"failed":{"message":"m"}}', Failed(TaskError(RESULT_NOT_AVAILABLE, "m"))),
        ('{"failed":null}', Failed(TaskError(RESULT_NOT_AVAILABLE, "No error is stored."))),
    ],
)
def test_a_codec_reads_outcomes_written_by_a_workflow(stored: str, outcome: Any) -> None:
    codec = codec_of(TaskResult[int])
    assert codec.decode(f'{{"value":{stored}}}') == ((outcome,), {})
    assert codec_of(list[TaskResult[int]]).decode(f'{{"value":[{stored},{stored}]}}') == (
        ([outcome, outcome],),
        {},
    )


def test_a_codec_writes_outcomes_like_a_workflow() -> None:
    codec = codec_of(TaskResult[int])
    assert codec.encode((Completed(5),), {}) == b'{"value":{"completed":5}}'
    assert codec.encode_result(Completed(5)) == b'{"completed":5}'
    assert b'{"failed":{"code":"X"' in codec.encode((Failed(TaskError("X")),), {})


def test_a_codec_supports_variable_numbers_of_outcomes() -> None:
    def report(*paid: TaskResult[int], **named: TaskResult[int]) -> None: ...

    codec = CallCodec.from_function(report, task_name="report")
    data = codec.encode((Completed(1), Failed(TaskError("X"))), {"a": Completed(2)})
    assert codec.decode(data) == ((Completed(1), Failed(TaskError("X"))), {"a": Completed(2)})


@pytest.mark.parametrize(
    "stored", ["{}", '{"completed":1,"failed":{"code":"X"}}', '{"completed":"x"}', '{"done":1}', "5"]
)
def test_a_codec_rejects_json_that_is_not_an_outcome(stored: str) -> None:
    with pytest.raises(PayloadError, match="'task'") as caught:
        codec_of(TaskResult[int]).decode(f'{{"value":{stored}}}')
    assert caught.value.parameter == "value"


def test_a_codec_rejects_an_outcome_whose_value_has_the_wrong_type() -> None:
    with pytest.raises(PayloadError, match=r"'value' = \[Completed\(value='x'\)\].*at value\[0\].completed"):
        codec_of(list[TaskResult[int]]).encode(([Completed("x")],), {})


def test_a_codec_rejects_a_list_of_outcomes_that_contains_itself() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(PayloadError, match="contains itself"):
        codec_of(list[TaskResult[int]]).encode((endless,), {})
