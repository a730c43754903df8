"""Questions of real tasks: they outlive their workers, hold no slot, and take exactly one answer, which must fit."""

from __future__ import annotations

import getpass
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any
from uuid import UUID

import pytest
from psycopg import sql

from everbeat.errors import AlreadyAnswered, EverbeatError, NoQuestion, PayloadError, TaskNotFound
from tests.stories.scenario import Scenario, program_of

pytestmark = [pytest.mark.story, pytest.mark.timeout(180)]

ALONE = {"processes": 1, "process_concurrency": 1, "async_concurrency": 1, "thread_concurrency": 1}


@pytest.fixture
def asking(scenario: Scenario) -> Iterator[ModuleType]:
    with program_of(scenario, "asking") as program:
        yield program


def command(scenario: Scenario, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "everbeat", *arguments, "--url", scenario.url, "--schema", scenario.schema],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def asked(scenario: Scenario, asking: ModuleType, task_id: UUID) -> Any:
    """Wait until the task has asked and released its slot, and return its question."""
    scenario.until(
        lambda: (
            any(each.task_id == task_id for each in asking.app.inbox())
            and scenario.task(task_id)["state"] == "PENDING"
        ),
        within=30,
        what="a question is open",
    )
    return next(each for each in asking.app.inbox() if each.task_id == task_id)


@pytest.mark.long
def test_a_question_outlives_its_worker_and_is_answered_by_a_command(
    scenario: Scenario, asking: ModuleType
) -> None:
    doomed = scenario.ready_tree(program="asking", worker=ALONE)
    task = asking.refund.with_options(labels={"tenant": "42"}).send(300)
    question = asked(scenario, asking, task.id)
    assert (question.question, question.type.kind, question.note) == (
        "Refund 300 EUR to Ann?",
        "bool",
        "order 17",
    )
    assert question.labels == {"tenant": "42"}
    assert (question.name, question.step, question.until) == ("refund", "ask", None)
    assert asking.quick.send(1).result(timeout=20) == 1, "its only slot is free"
    doomed.kill()
    listed = json.loads(command(scenario, "inbox", "--json").stdout)["questions"]
    assert [(each["task_id"], each["question"], each["answer"], each["labels"]) for each in listed] == [
        (str(task.id), "Refund 300 EUR to Ann?", "true or false", {"tenant": "42"})
    ]
    reasons = asking.app.explain(task.id).reasons
    (reason,) = [each for each in reasons if each.code == "WAITING_FOR_ANSWER"]
    assert reason.text.startswith("it is waiting for an answer to 'Refund 300 EUR to Ann?' since ")
    wrong = command(scenario, "inbox", "answer", str(task.id), "perhaps")
    assert wrong.returncode == 2
    assert 'The answer "perhaps" does not fit: the question asks for true or false.' in wrong.stderr
    answered = command(scenario, "inbox", "answer", str(task.id), "yes")
    assert (answered.returncode, answered.stdout) == (0, f"{task.id}  ask  answered true\n")
    assert asking.app.inbox() == []
    again = command(scenario, "inbox", "answer", str(task.id), "no")
    assert again.returncode == 1
    assert f"was already answered by {getpass.getuser()}@" in " ".join(again.stderr.split())
    scenario.ready_tree(program="asking", worker=ALONE)
    assert task.result(timeout=30) == "refunded"
    assert [line["step"] for line in scenario.effects(task_id=task.id)] == ["start", "start", "refunded"]
    assert [each["outcome"] for each in scenario.attempts(task.id)] == ["SUSPENDED", "COMPLETED"]
    with pytest.raises(AlreadyAnswered):
        task.answer(False)


def test_of_many_answers_at_the_same_time_one_counts(scenario: Scenario, asking: ModuleType) -> None:
    scenario.ready_tree(program="asking", worker=ALONE)
    task = asking.refund.send(300)
    asked(scenario, asking, task.id)
    start = threading.Barrier(8)
    verdicts: list[object] = []

    def answer(number: int) -> None:
        start.wait()
        try:
            asking.app.answer(task.id, number == 0, by=f"person {number}")
            verdicts.append(number)
        except EverbeatError as problem:
            verdicts.append(problem)

    people = [threading.Thread(target=answer, args=(number,)) for number in range(8)]
    for each in people:
        each.start()
    for each in people:
        each.join()
    (winner,) = [each for each in verdicts if isinstance(each, int)]
    refused = [each for each in verdicts if not isinstance(each, int)]
    assert [(type(each), each.by) for each in refused] == [(AlreadyAnswered, f"person {winner}")] * 7
    assert task.result(timeout=30) == ("refunded" if winner == 0 else "kept")


def test_an_answer_waits_for_one_that_is_being_stored_and_is_then_refused(
    scenario: Scenario, asking: ModuleType
) -> None:
    scenario.ready_tree(program="asking", worker=ALONE)
    task = asking.refund.send(300)
    asked(scenario, asking, task.id)
    with scenario.target.connect("the first") as first, ThreadPoolExecutor(1) as pool:
        first.execute("begin")
        stored = """select verdict from {}.send_signal(gen_random_uuid(), %s, 'answer/ask', '{{"answer": true, "by": "ann"}}', 'c')"""
        first.execute(sql.SQL(stored).format(sql.Identifier(scenario.schema)), [task.id])
        second = pool.submit(task.answer, False, by="bob")
        blocked = "select from pg_stat_activity where application_name = 'everbeat client' and wait_event_type = 'Lock'"
        scenario.until(lambda: scenario.query(blocked), within=20, what="the second answer waits")
        first.execute("commit")
        with pytest.raises(AlreadyAnswered, match="already answered by ann"):
            second.result(timeout=20)
    assert task.result(timeout=30) == "refunded"


def test_a_sync_task_asks_one_question_after_the_other(scenario: Scenario, asking: ModuleType) -> None:
    scenario.ready_tree(program="asking", worker=ALONE)
    task = asking.choose_in_process.with_options(labels={"tenant": "42"}).send()
    first = asked(scenario, asking, task.id)
    assert (first.step, first.type.choices) == ("ask", ("mail", "parcel"))
    with pytest.raises(PayloadError, match='"ship" does not fit: the question asks for "mail" or "parcel"'):
        task.answer("ship")
    with pytest.raises(NoQuestion):
        task.answer(2, step="ask#2")
    assert task.answer("parcel", step="ask", by="ann") == "ask"
    scenario.until(
        lambda: [each.step for each in asking.app.inbox()] == ["ask#2"],
        within=30,
        what="the second question",
    )
    with pytest.raises(PayloadError, match="4 does not fit: the question asks for 1 or 2 or 3"):
        task.answer(4)
    task.answer(3)
    assert task.result(timeout=30) == "3 by parcel for 42", "a task process has the labels of its task"


def test_one_of_two_open_questions_is_answered_by_its_step(scenario: Scenario, asking: ModuleType) -> None:
    scenario.ready_tree(program="asking", worker=ALONE)
    task = asking.ask_two.send()
    scenario.until(lambda: len(asking.app.inbox()) == 2, within=30, what="both questions are open")
    assert [(each.step, each.question) for each in asking.app.inbox()] == [
        ("ask", "Which size?"),
        ("ask#2", "Which colour?"),
    ]
    with pytest.raises(PayloadError, match="2 questions, in the steps ask, ask#2") as unclear:
        task.answer("red")
    assert (unclear.value.parameter, unclear.value.fix) == (
        "step",
        "name the step of the question, such as 'ask'.",
    )
    answered = command(
        scenario, "inbox", "answer", str(task.id), "red", "--step", "ask#2", "--by", "ann", "--json"
    )
    assert json.loads(answered.stdout) == {"id": str(task.id), "step": "ask#2", "value": "red", "by": "ann"}
    with pytest.raises(
        AlreadyAnswered, match=r"The question of step 'ask#2' of task .* was already answered by ann"
    ) as late:
        task.answer("blue", step="ask#2")
    assert late.value.step == "ask#2"
    with pytest.raises(NoQuestion, match="does not wait for an answer in step 'ask#3'") as missing:
        task.answer("blue", step="ask#3")
    assert missing.value.step == "ask#3"
    assert task.answer("large") == "ask"
    assert task.result(timeout=30) == ["large", "red"]


def test_a_question_without_an_answer_times_out(scenario: Scenario, asking: ModuleType) -> None:
    scenario.ready_tree(program="asking", worker=ALONE)
    task = asking.ask_briefly.send()
    assert task.result(timeout=30) == "Question 'Still there?' was not answered within 1 s."
    with pytest.raises(NoQuestion, match="the question has timed out"):
        task.answer("yes")
    with pytest.raises(NoQuestion):
        asking.quick.send(1).answer("yes")
    with pytest.raises(TaskNotFound):
        asking.app.answer("00000000-0000-0000-0000-000000000001", 1)
