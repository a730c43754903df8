"""Partly known arguments become templates; a template filled with the results of nodes gives the arguments of the task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pytest

from everbeat.domain.task.definition import CallCodec
from everbeat.domain.task.outcome import Completed, Failed, TaskResult
from everbeat.domain.workflow.graph import Known, decode_template, encode, fill
from everbeat.domain.workflow.placeholders import Composed, Placeholder, Promise, compose
from everbeat.domain.workflow.shapes import shape_of
from everbeat.errors import PayloadError, TaskError
from tests.domain.workflow_types import Keyed, Line, Payment


@dataclass
class Giver:
    source: int
    owner: object = None

    @property
    def title(self) -> str:
        return f"node {self.source}"


def result(source: int, annotation: Any = Any, **facts: Any) -> Any:
    return Placeholder(Promise(origin=Giver(source), shape=shape_of(annotation), **facts))


def codec_of(function: Callable[..., Any]) -> CallCodec:
    return CallCodec.from_function(function, task_name=function.__name__)


def composed(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Composed:
    codec = codec_of(function)
    return compose(codec, codec.bind(args, kwargs))


def arrives(function: Callable[..., Any], known: dict[int, Known], /, *args: Any, **kwargs: Any) -> Any:
    """Return the arguments that the function receives when its parents ended as in `known`."""
    template = composed(function, *args, **kwargs).template
    assert template is not None
    kept = decode_template(encode(template))
    return codec_of(function).decode(fill(kept, known))


LINE = Known("COMPLETED", result='{"amount":7,"note":"n"}')
NUMBER = Known("COMPLETED", result="5")
FAILURE = Known("FAILED", error='{"code":"DECLINED","message":"no","type":"x","traceback":"t"}')


def measure(line: Line, factor: int = 2, *, unit: str = "kg") -> int: ...


def gather(lines: list[Line], by_name: dict[str, int], pair: tuple[int, str] | None = None) -> int: ...


def judge(paid: TaskResult[int], others: list[TaskResult[int]] | None = None) -> int: ...


def rest(*numbers: int, **named: int) -> int: ...


def anything(value: Any, keyed: Keyed | None = None, by_id: dict[UUID, int] | None = None) -> int: ...


def test_compose_encodes_known_arguments_like_a_send() -> None:
    found = composed(measure, Line(1), unit="g")
    assert found == Composed(args='{"line":{"amount":1,"note":""},"unit":"g"}')


def test_a_filled_template_contains_the_stored_result_of_a_node() -> None:
    assert composed(measure, result(0, Line), 3).template == ('{"line":', *_holes(0), ',"factor":3}')
    assert arrives(measure, {0: LINE}, result(0, Line), 3) == ((Line(7, "n"), 3), {})
    assert arrives(measure, {0: LINE, 1: NUMBER}, line=result(0), factor=result(1)) == ((Line(7, "n"), 5), {})
    assert arrives(measure, {0: LINE}, Line(1), result(0, Line).amount, unit="g") == (
        (Line(1), 7),
        {"unit": "g"},
    )


def test_placeholders_can_be_inside_lists_tuples_and_dicts() -> None:
    known = {0: LINE, 1: NUMBER}
    assert arrives(gather, known, [result(0, Line), Line(2)], {"a": 1, 'b"': result(1, int)}) == (
        ([Line(7, "n"), Line(2)], {"a": 1, 'b"': 5}),
        {},
    )
    assert arrives(gather, known, [], {}, (result(1, int), "x")) == (([], {}, (5, "x")), {})
    assert arrives(anything, known, [1, {"a": [result(1), None]}]) == (([1, {"a": [5, None]}],), {})
    assert arrives(anything, known, 1, {"name": "n", "size": result(1)}) == (
        (1, {"name": "n", "size": 5}),
        {},
    )
    assert arrives(anything, known, 1, by_id={UUID(int=3): result(1)}) == ((1,), {"by_id": {UUID(int=3): 5}})


def test_placeholders_of_outcomes_arrive_as_task_results() -> None:
    known = {0: NUMBER, 1: FAILURE, 2: Known("COMPLETED", parts=[NUMBER, FAILURE])}
    outcomes = [Completed(5), Failed(TaskError("DECLINED", "no"))]
    (paid, others), _ = arrives(
        judge,
        known,
        result(0, TaskResult[int], wants="outcome"),
        [result(1, TaskResult[int], wants="outcome"), Completed(3), Failed(TaskError("X"))],
    )
    assert (paid, others) == (outcomes[0], [outcomes[1], Completed(3), Failed(TaskError("X"))])
    (_, all_of_them), _ = arrives(judge, known, Completed(1), result(2, wants="outcome"))
    assert all_of_them == outcomes


def test_placeholders_fill_variable_positional_and_keyword_arguments() -> None:
    assert arrives(rest, {1: NUMBER}, 1, result(1, int), a=result(1, int), b=2) == ((1, 5), {"a": 5, "b": 2})


def test_compose_reports_the_place_and_expected_type_of_each_placeholder() -> None:
    line, number = result(0, Line), result(1, int)
    placed = composed(gather, [Line(1), line], {"a": number}).placed
    assert [(each.parameter, each.place, each.expected) for each in placed] == [
        ("lines", "lines[1]", shape_of(Line)),
        ("by_name", "by_name['a']", shape_of(int)),
    ]
    assert [each.promise.origin.source for each in placed] == [0, 1]


def test_compose_with_only_open_returns_only_the_arguments_that_wait_for_nodes() -> None:
    codec = codec_of(measure)
    found = compose(codec, codec.bind((Line(1),), {"factor": result(1)}), only_open=True)
    assert found.template == ('{"factor":', *_holes(1), "}")
    assert found.open_names == {"factor"}
    with pytest.raises(PayloadError, match="'line'"):
        compose(codec, codec.bind((Payment,), {"factor": result(1)}), only_open=True)


@pytest.mark.parametrize(
    ("function", "args", "parameter", "says"),
    [
        (measure, (result(0), "x"), "factor", "'factor' = 'x'.*expected `int`"),
        (gather, ([result(0), 5], {}), "lines", r"= 5 .*expected `object`.*at lines\[1\]"),
        (gather, ([], {"a": result(1), "b": "x"}), "by_name", r"= 'x'.*at by_name\['b'\]"),
        (gather, ([result(0), [Line(1)]], {}), "lines", r"at lines\[1\]"),
        (gather, ({"a": result(0)}, {}), "lines", r"is a dict where list\[Line\] is expected"),
        (gather, ([], [result(0)]), "by_name", r"is a list where dict\[str, int\] is expected"),
        (gather, ([[result(0)]], {}), "lines", r"is a list where Line is expected \(at lines\[0\]\)"),
        (anything, ({result(0): result(1)},), "value", "cannot be a JSON key"),
        (anything, ({Line: result(1)},), "value", "cannot be a JSON key"),
        (measure, (result(0), 1, 2), None, "too many positional"),
        (measure, (), "line", "missing a required argument: 'line'"),
    ],
)
def test_compose_rejects_arguments_that_do_not_fit_the_parameters(
    function: Callable[..., Any], args: Sequence[Any], parameter: str | None, says: str
) -> None:
    with pytest.raises(PayloadError, match=says) as caught:
        composed(function, *args)
    assert caught.value.parameter == parameter
    assert function.__name__ in str(caught.value)


def test_compose_rejects_a_list_that_contains_itself() -> None:
    endless: list[Any] = [result(0)]
    endless.insert(0, endless)
    with pytest.raises(PayloadError, match="contains itself"):
        composed(anything, endless)


def test_compose_rejects_arguments_above_the_payload_limit() -> None:
    codec = codec_of(anything)
    bound = codec.bind((["é" * 400, result(0), "é" * 400],), {})
    assert compose(codec, bound, largest=1_700).template
    with pytest.raises(
        PayloadError, match=r"'anything' would take 1,6\d\d bytes of JSON; App.payload_limit allows 1,600"
    ):
        compose(codec, bound, largest=1_600)


def _holes(source: int) -> tuple[Any, ...]:
    template = composed(anything, result(source)).template
    assert template is not None
    return template[1:2]
