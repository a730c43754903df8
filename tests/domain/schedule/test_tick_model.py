"""A model of the database and two schedulers: each tick becomes exactly one task or one recorded miss.

The schedulers read and write in any order, die between both, and repeat writes whose reply was lost. The clock jumps, schedulers are
down for a while, operators pause and resume the schedule, and runs start, end and fail.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import takewhile
from uuid import UUID

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec import Struct
from msgspec.structs import replace

from everbeat.domain.schedule.model import DecidedTick, DueSchedule, Rule, TickDecision, Timing
from everbeat.domain.schedule.ticks import decide, due_at, rule_ticks, tick_task_id

NAME, INSTALLATION = "digest", "here"
SECOND = timedelta(seconds=1)
CREATED = datetime(2026, 3, 29, 0, 17, 3, tzinfo=UTC)  # 43 minutes before the clocks of Berlin go forward
SCHEDULERS = st.sampled_from(["first", "second"])
RULES = st.builds(
    Rule,
    timing=st.sampled_from(
        [
            Timing(every_ms=60_000),
            Timing(every_ms=5_000, offset_ms=1_000),
            Timing(cron=("*/7 * * * *", "30 2 * * *"), timezone="Europe/Berlin"),
            Timing(at=tuple(CREATED + number * 613 * SECOND for number in range(-3, 40))),
        ]
    ),
    missed=st.sampled_from(["latest", "all", "skip"]),
    most=st.integers(1, 8),
    catchup_ms=st.sampled_from([90_000, 3_600_000, 86_400_000]),
    overlap=st.sampled_from(["allow", "skip", "buffer_one", "buffer_all", "cancel_other"]),
    jitter_ms=st.sampled_from([0, 0, 4_000, 45_000]),
    starts_at=st.none() | st.just(CREATED + 600 * SECOND),
    ends_at=st.none() | st.just(CREATED + 7_200 * SECOND),
    most_runs=st.none() | st.integers(1, 30),
    pause_after_failures=st.none() | st.integers(1, 3),
)


class Row(Struct, frozen=True, kw_only=True):
    """The row of the schedule. `changed_at` is another moment after each change that is not a decision about ticks."""

    decided_to: datetime = CREATED
    next_at: datetime | None = CREATED
    runs: int = 0
    paused: bool = False
    resume_at: datetime | None = None
    held_until: datetime | None = None
    has_ended: bool = False
    changed_at: datetime = CREATED


class TickModel(RuleBasedStateMachine):
    """The statements that schedulers and operators run, on a database in memory."""

    compares = True

    def __init__(self) -> None:
        super().__init__()
        self.rule = Rule(timing=Timing(every_ms=60_000))
        self.row = Row()
        self.now = self.latest = CREATED
        self.plans: dict[str, TickDecision] = {}
        self.ticks: dict[datetime, DecidedTick] = {}
        self.tasks: dict[UUID, datetime] = {}
        self.waiting: list[UUID] = []
        self.running: list[UUID] = []
        self.failures = 0
        self.never_sent: list[tuple[datetime, datetime]] = []
        """The ranges of ticks that were undecided during a pause."""
        self.undecided_at_pause = CREATED

    @initialize(chosen=RULES)
    def choose_rule(self, chosen: Rule) -> None:
        self.rule = chosen

    @rule(seconds=st.integers(1, 90))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds * SECOND

    @rule(minutes=st.integers(2, 150))
    def all_schedulers_are_down(self, minutes: int) -> None:
        self.plans.clear()
        self.now += minutes * 60 * SECOND

    @rule(seconds=st.integers(1, 3_700))
    def the_clock_is_set_back(self, seconds: int) -> None:
        self.latest = max(self.latest, self.now)
        self.now -= seconds * SECOND

    @precondition(lambda self: self.is_due())
    @rule(scheduler=SCHEDULERS)
    def a_scheduler_reads(self, scheduler: str) -> None:
        self.plans[scheduler] = decide(self.due_schedule(), installation=INSTALLATION)

    @rule(scheduler=SCHEDULERS, is_repeated=st.booleans())
    def a_scheduler_writes(self, scheduler: str, is_repeated: bool) -> None:
        if (decision := self.plans.pop(scheduler, None)) is not None:
            for _ in range(1 + is_repeated):
                self.write(decision)

    @rule(scheduler=SCHEDULERS)
    def a_scheduler_dies(self, scheduler: str) -> None:
        self.plans.pop(scheduler, None)

    @precondition(lambda self: not self.row.paused and not self.row.has_ended)
    @rule(resume_in=st.none() | st.integers(1, 4_000))
    def an_operator_pauses(self, resume_in: int | None) -> None:
        self.pause(None if resume_in is None else self.now + resume_in * SECOND)

    @precondition(lambda self: self.row.paused)
    @rule()
    def an_operator_resumes(self) -> None:
        self.resume(self.now)

    @precondition(lambda self: self.waiting)
    @rule()
    def a_run_starts(self) -> None:
        self.running.append(self.waiting.pop(0))

    @precondition(lambda self: self.running)
    @rule(fails=st.booleans())
    def a_run_ends(self, fails: bool) -> None:
        self.running.pop(0)
        self.failures = self.failures + 1 if fails else 0

    def is_due(self) -> bool:
        return self.row.next_at is not None and self.row.next_at <= self.now

    def due_schedule(self) -> DueSchedule:
        row = self.row
        return DueSchedule(
            name=NAME,
            rule=self.rule,
            decided_to=row.decided_to,
            now=self.now,
            runs=row.runs,
            live=len(self.waiting) + len(self.running),
            waiting=len(self.waiting),
            failures=self.failures,
            is_paused=row.paused,
            resume_at=row.resume_at,
            held_until=row.held_until,
            held_because=None if row.held_until is None else "PAUSED",
            changed_at=row.changed_at,
        )

    def write(self, decision: TickDecision) -> None:
        """Do what the statement does: compare, then change the row, the ticks and the tasks at once."""
        row = self.row
        is_same = (decision.seen_decided_to, decision.seen_changed_at) == (row.decided_to, row.changed_at)
        if self.compares and (row.has_ended or not is_same):
            return
        if decision.resumes:
            assert row.paused
            self.resume(min(self.now, row.resume_at or self.now))
            return
        assert not row.paused
        self.check_decided(row.decided_to, decision)
        for tick in decision.ticks:
            assert tick.at not in self.ticks, f"{tick.at} is decided twice"
            self.ticks[tick.at] = tick
            if tick.outcome == "SENT":
                self.send(tick)
        sent = sum(tick.outcome == "SENT" for tick in decision.ticks)
        self.row = replace(
            row,
            decided_to=decision.decided_to,
            next_at=decision.next_at,
            has_ended=decision.has_ended,
            runs=row.runs + sent,
        )
        if decision.pauses is not None:
            self.pause(None)

    def send(self, tick: DecidedTick) -> None:
        assert tick.task_id == tick_task_id(INSTALLATION, NAME, tick.at)
        assert tick.task_id not in self.tasks, f"{tick.at} has two tasks"
        self.tasks[tick.task_id] = tick.at
        self.waiting.append(tick.task_id)

    def check_decided(self, before: datetime, decision: TickDecision) -> None:
        """Check that a decision accounts for each tick of its range once."""
        existing = [*takewhile(lambda tick: tick <= decision.decided_to, rule_ticks(self.rule, after=before))]
        remaining = list(existing)
        for tick in decision.ticks:
            last = tick.last_at or tick.at
            covered = [*takewhile(lambda each, last=last: each <= last, remaining)]  # type: ignore[misc]
            assert covered, f"{tick.at} is no tick"
            assert (covered[0], covered[-1]) == (tick.at, last)
            assert len(covered) == 1 or tick.missed in (None, len(covered))
            remaining = remaining[len(covered) :]
        assert not remaining, f"{remaining[0]} is lost"

    def pause(self, resume_at: datetime | None) -> None:
        self.undecided_at_pause = self.row.decided_to
        self.row = replace(
            self.row,
            paused=True,
            next_at=resume_at,
            resume_at=resume_at,
            changed_at=self.row.changed_at + SECOND,
        )

    def resume(self, held_until: datetime) -> None:
        self.never_sent.append((self.undecided_at_pause, held_until))
        held_until = max(held_until, self.row.held_until or held_until)
        self.failures = 0  # the statement counts only the runs since then
        self.row = replace(
            self.row,
            paused=False,
            resume_at=None,
            next_at=self.now,
            held_until=held_until,
            changed_at=self.row.changed_at + SECOND,
        )

    def teardown(self) -> None:
        """Let the clock catch up and one scheduler finish the work, then check the whole history."""
        self.now = max(self.now, self.latest)
        passes = 0
        while self.is_due():
            passes += 1
            assert passes < 10, "the schedule stays due"
            self.write(decide(self.due_schedule(), installation=INSTALLATION))
        row = self.row
        following = next(rule_ticks(self.rule, after=row.decided_to), None)
        if row.has_ended:
            assert following is None or row.runs == self.rule.most_runs
        elif not row.paused:
            assert following is not None
            assert row.next_at is not None
            assert row.next_at <= due_at(self.rule, NAME, following)
        assert all(last.at <= row.decided_to for last in self.ticks.values())
        assert len(self.tasks) == row.runs == sum(tick.outcome == "SENT" for tick in self.ticks.values())
        assert self.rule.most_runs is None or row.runs <= self.rule.most_runs
        for start, end in self.never_sent:
            assert not [tick for tick in self.tasks.values() if start < tick <= end], (
                "a tick of a pause was sent"
            )


class ModelWithoutComparison(TickModel):
    """The model with a statement that does not compare the row with the one that was read."""

    compares = False


def test_each_tick_becomes_one_task_or_one_recorded_miss() -> None:
    run_state_machine_as_test(
        TickModel, settings=settings(max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[*HealthCheck])
    )  # fmt: skip
    assert TickModel.compares


@pytest.mark.long
@pytest.mark.timeout(1_800)
def test_each_tick_becomes_one_task_or_one_recorded_miss_in_long_histories() -> None:
    run_state_machine_as_test(
        TickModel, settings=settings(max_examples=3_000, stateful_step_count=120, deadline=None, suppress_health_check=[*HealthCheck])
    )  # fmt: skip
    assert TickModel.compares


def test_the_model_notices_a_write_that_does_not_compare() -> None:
    quick = settings(
        max_examples=500, stateful_step_count=40, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],
    )  # fmt: skip
    with pytest.raises(AssertionError, match=r"decided twice|is lost|is no tick|two tasks"):
        run_state_machine_as_test(ModelWithoutComparison, settings=quick)
