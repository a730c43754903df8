"""Mutants of lines and gates: each rule of the functions is broken once, and a constructed case must fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

from everbeat.store import claims, tasks
from tests.invariants import line_breaches, settled_line_breaches
from tests.store import test_changed_limits as changes
from tests.store import test_frozen_claims as frozen_claims
from tests.store import test_line_corners as corners
from tests.store import test_line_fairness as fairness
from tests.store.conftest import StoreHarness
from tests.store.lining import apply, gate, put_limit, send, take
from tests.store.test_mutants import Mutant, notices, scenario

__all__ = ["scenario"]

FOLDER = "schema/0015_changed_limits"
OFFER, APPLY = f"{FOLDER}/24_offer_lines", "schema/0016_fleets/22_apply_line_changes"
UNPARK, CHANGED = f"{FOLDER}/21_unpark_lines", f"{FOLDER}/20_note_line_change"
RETURN = "schema/0014_limits/33_return_permits"
GATE_LOCK = "order by a.gate for no key update skip locked"


def ids(taken: list[Any]) -> list[Any]:
    return [one.id for one in taken]


def no_breach(db: StoreHarness) -> None:
    assert line_breaches(db.connection, db.target.schema) == []
    assert settled_line_breaches(db.connection, db.target.schema) == []


def check_two_claims_at_once(db: StoreHarness) -> None:
    """The second claim begins while the first has not committed. It must wait for the gate or leave it alone."""
    put_limit(db, "a", concurrency=1)
    send(db, "a")
    send(db, "a", priority=1)
    apply(db)
    with frozen_claims.frozen(db, frozen_claims.claim("work")):
        db.connection.execute("set statement_timeout = '2s'")
        statement = frozen_claims.claim("work", limit=2)
        assert db.connection.execute(db.text(statement.name), statement.parameters).fetchall() == []
        db.connection.execute("set statement_timeout = 0")
    assert take(db) == []
    assert gate(db, "a") == 1
    no_breach(db)


def check_gate_after_wait(db: StoreHarness) -> None:
    """A claim whose snapshot is older than the grant of another claim counts that grant."""
    put_limit(db, "a", concurrency=1)
    send(db, "a")
    send(db, "a", priority=1)
    apply(db)
    with corners.delayed_claim(db) as proceed:
        assert len(take(db, limit=1)) == 1
        assert proceed() == []
    no_breach(db)


def check_released(db: StoreHarness) -> None:
    """Each way to end a lease frees the permit."""
    put_limit(db, "a", concurrency=1)
    send(db, "a")
    (held,) = take(db)
    assert db.settle(held, "FAILED", error=b"{}", retry_in_ms=0) == "PENDING"
    (held,) = corners.until_taken(db, 1)
    assert db.settle(held, "RELEASED") == "PENDING"
    (held,) = corners.until_taken(db, 1)
    no_breach(db)
    db.connection.execute(db.plain("delete from {schema}.tasks where id = %s"), [held.id])
    no_breach(db)
    (other,) = send(db, "a")
    assert ids(corners.until_taken(db, 1)) == [other]
    no_breach(db)


def check_unused_offers(db: StoreHarness) -> None:
    """A claim that is offered a task and cannot lock it returns the permit. Only the head of a strict line is offered without its lock."""
    put_limit(db, "a", concurrency=1)
    (mine,) = send(db, "a", serial="key:s")
    apply(db)
    with corners.other_connection(db) as other:
        other.execute(db.plain("select from {schema}.tasks where id = %s for update"), [mine])
        assert take(db) == []
    no_breach(db)
    assert ids(corners.until_taken(db, 1)) == [mine]


def check_unused_beside_ended(db: StoreHarness) -> None:
    """A claim that returns an unused permit does not free the permit of an ended lease, whose change has not been applied yet."""
    put_limit(db, "a", concurrency=2)
    send(db, "a")
    (held,) = take(db)
    (mine,) = send(db, "a", serial="key:s")
    apply(db)
    db.complete(held)
    with corners.other_connection(db) as other:
        other.execute(db.plain("select from {schema}.tasks where id = %s for update"), [mine])
        statement = claims.claim(
            worker_id="w1",
            claim_call=uuid4(),
            names=["work"],
            limit=10,
            queues=None,
            queue_priorities={},
            starts=10,
            channel="c",
        )
        assert db.run(statement) == []
    no_breach(db)


def check_head_changed(db: StoreHarness) -> None:
    """The head of a serial line is cancelled, and the next one has a gate that is full."""
    put_limit(db, "a", concurrency=1)
    send(db, "a")
    (holder,) = take(db)
    (first,) = send(db, serial="key:a")
    (second,) = send(db, "a", serial="key:a")
    apply(db)
    db.cancel(first)
    statement = claims.claim(
        worker_id="w1",
        claim_call=uuid4(),
        names=["work"],
        limit=10,
        queues=None,
        queue_priorities={},
        starts=10,
        channel="c",
    )
    assert db.run(statement) == []
    assert take(db) == []
    db.complete(holder)
    assert ids(corners.until_taken(db, 1)) == [second]
    no_breach(db)


def check_locked_head(db: StoreHarness) -> None:
    """Another transaction has locked the head of a serial line: no later task overtakes it."""
    (first,) = send(db, serial="key:a")
    (second,) = send(db, serial="key:a")
    apply(db)
    with corners.other_connection(db) as other:
        other.execute(db.plain("select from {schema}.tasks where id = %s for update"), [first])
        assert take(db) == []
    (held,) = corners.until_taken(db, 1)
    assert held.id == first
    db.complete(held)
    assert ids(corners.until_taken(db, 1)) == [second]


def check_turn_passed_on(db: StoreHarness) -> None:
    """A line that continues at one gate and stops at another one passes its turn on at once."""
    put_limit(db, "a", concurrency=1)
    put_limit(db, "b", concurrency=1)
    send(db, "b")
    take(db)
    send(db, "a")
    ((holder),) = take(db)
    send(db, "a", "b")
    assert take(db) == []
    (later,) = send(db, "a", priority=1)
    assert take(db) == []
    db.complete(holder)
    assert take(db) == [], "the first waiting line now waits at the other gate"
    assert gate(db, "a", "opens_at") is None or db.table("lines", "state").count(("R",)) == 1
    assert ids(take(db)) == [later], "the next call finds the turn, without waiting for a gate to open"


def check_floor(db: StoreHarness) -> None:
    """A call that is rolled back loses no change, although it moved the floor of the changes."""
    sent = send(db, serial="key:a")
    with db.target.connect("everbeat lost") as connection:
        connection.execute("begin")
        connection.execute(db.plain("select {schema}.apply_line_changes(10, array['work'], null, null)"))
        connection.execute(db.plain("select {schema}.apply_line_changes(10, array['work'], null, null)"))
        connection.execute("rollback")
    assert ids(take(db)) == sent


def check_locked_gate(db: StoreHarness) -> None:
    """The release of a permit is kept while another transaction has locked the gate."""
    put_limit(db, "a", concurrency=2)
    send(db, "a", count=2)
    held = take(db)
    with corners.other_connection(db) as other:
        other.execute(db.plain("select from {schema}.gates where gate = 'a' for update"))
        db.complete(*held)
        for _ in range(3):
            apply(db)
    no_breach(db)
    send(db, "a", count=2)
    assert len(corners.until_taken(db, 2)) == 2


def check_locked_line(db: StoreHarness) -> None:
    """The arrival of a task is kept while another transaction has locked its line."""
    (first,) = send(db, serial="key:a")
    (held,) = take(db)
    with corners.other_connection(db) as other:
        other.execute(db.plain("select from {schema}.lines for update"))
        db.complete(held)
        (second,) = send(db, serial="key:a")
        for _ in range(3):
            apply(db)
    assert held.id == first
    assert ids(corners.until_taken(db, 1)) == [second]
    no_breach(db)


def check_rate(db: StoreHarness) -> None:
    """A smooth rate gives its burst, and then nothing until its time has passed."""
    put_limit(db, "a", starts=10, period_s=100.0, burst=2)
    send(db, "a", count=3)
    assert len(take(db)) == 2
    assert take(db) == []
    no_breach(db)


def check_window(db: StoreHarness) -> None:
    """A sliding limit gives its number, and then nothing until its window has passed."""
    put_limit(db, "a", starts=2, period_s=100.0, sliding=True)
    send(db, "a", count=3)
    assert len(take(db)) == 2
    send(db, "a", priority=1)
    assert take(db) == []
    no_breach(db)


def check_retried_place(db: StoreHarness) -> None:
    """A task that returns to its line before the place that claims have reached is found."""
    put_limit(db, "a", concurrency=3)
    send(db, "a", count=3)
    first, second, third = take(db)
    db.complete(second, third)
    later = send(db, "a", delay_ms=3_600_000)
    assert take(db) == []
    assert db.settle(first, "RELEASED") == "PENDING"
    assert ids(corners.until_taken(db, 1)) == [first.id]
    assert later
    no_breach(db)


def check_limit_raised(db: StoreHarness) -> None:
    """Lines that wait at a closed limit continue when its number is raised."""
    put_limit(db, "a", concurrency=0)
    sent = send(db, "a")
    assert take(db) == []
    time.sleep(0.06)  # a gate with unused room opens after 50 ms; this one has none
    apply(db)
    put_limit(db, "a", concurrency=1)
    assert ids(corners.until_taken(db, 1)) == sent
    no_breach(db)


def check_costs(db: StoreHarness) -> None:
    """Two tasks with a cost of two do not fit a limit of three."""
    put_limit(db, "a", concurrency=3)
    send(db, "a", count=2, costs=[2])
    (held,) = take(db)
    assert take(db) == []
    assert gate(db, "a") == 2
    db.complete(held)
    assert len(corners.until_taken(db, 1)) == 1
    no_breach(db)


def check_due_while_full(db: StoreHarness) -> None:
    """A full gate does not wake workers."""
    corners.test_a_worker_does_not_poll_while_a_gate_is_full(db)
    assert db.run(tasks.next_due(names=["work"], queues=None)).due_in_ms is None


def check_change(db: StoreHarness) -> None:
    changes.test_a_line_that_began_to_wait_during_a_change_is_judged_by_the_new_numbers(db, changes.raised, 1)
    changes.test_all_gates_of_a_changed_limit_are_judged_once(db)


def check_shared_turns(db: StoreHarness) -> None:
    fairness.test_keys_take_turns_for_the_permits_of_a_shared_limit(db, 1)


MUTANTS = [
    Mutant("gates that are not locked", OFFER, GATE_LOCK, "order by a.gate", check_two_claims_at_once),
    Mutant(
        "permits counted by the snapshot of the claim", OFFER,
        "cross join lateral (select * from {schema}.gates o where o.ctid = g.place) y",
        "join (select * from {schema}.gates) y0 on y0.gate = g.gate cross join lateral (select (jsonb_populate_record(y0, jsonb_build_object("
        "'held', (select count(*) from {schema}.tasks k where k.gates @> array[y0.gate] and k.state in ('CLAIMED', 'RUNNING') and"
        " k.claimed_at < statement_timestamp())))).*) y",
        check_gate_after_wait,
    ),
    Mutant(
        "a permit counts as free when the lease of its holder is gone in an older snapshot", RETURN,
        "set held = greatest(0, g.held::bigint - u.units)::integer,",
        "set held = (select count(*) from {schema}.tasks k where k.gates @> array[g.gate] and k.state in ('CLAIMED', 'RUNNING')),",
        check_unused_beside_ended,
    ),
    Mutant(
        "a claim that keeps the permits of unused offers", "task/claim_tasks",
        "from (select o.id from offered o except select t.id from taken t) left_over",
        "from (select o.id from offered o where false) left_over", check_unused_offers,
    ),
    Mutant(
        "a locked head is skipped", OFFER, "order by s.serial_at, s.id limit greatest(0, h.room)\n",
        "order by s.serial_at, s.id limit greatest(0, h.room) for update skip locked\n",
        check_locked_head,
    ),
    Mutant(
        "a turn that is not passed on", OFFER, "perform {schema}.unpark_lines(v_loose, p_readers, p_queues, p_channel);", "null;",
        check_turn_passed_on,
    ),
    Mutant(
        "a floor that runs ahead", APPLY, "if least(first, low) > floor then\n        floor := least(first, low);",
        "if low > floor then\n        floor := least(first, low); perform setval('{schema}.line_changes_floor', low::text::bigint);\n    end if;\n"
        "    if false then", check_floor,
    ),
    Mutant(
        "changes of locked gates are lost", APPLY,
        "from unnest(gs, gf, gx) as d (gate, freed, closed_until) where d.gate in (select unnest(gs) except select unnest(locked));",
        "from unnest(gs, gf, gx) as d (gate, freed, closed_until) where false;", check_locked_gate,
    ),
    Mutant(
        "changes of locked lines are lost", APPLY, "where d.line in (select unnest(ls) except select unnest(locked));",
        "where false;", check_locked_line,
    ),
    Mutant("a release that frees nothing", CHANGED, "if was_held and old.gates is not null then", "if false then", check_released),
    Mutant(
        "a deletion that frees nothing", CHANGED, "values (old.serial, old.gates, old.costs, old.gates is not null and was_held);",
        "values (old.serial, old.gates, old.costs, false);", check_released,
    ),
    Mutant(
        "a rate that does not move", OFFER, "else greatest(g.next_at, v_now) + u.units * (m.period_s / m.starts) end,",
        "else g.next_at end,", check_rate,
    ),
    Mutant(
        "a window that forgets its starts", OFFER,
        "from unnest(g.recent || array_fill(v_now, array[u.units])) w (at)", "from unnest(g.recent) w (at)",
        check_window,
    ),
    Mutant(
        "a floor of a line that stays behind a return", APPLY, "else least(o.floor, d.at) end", "else o.floor end", check_retried_place,
    ),
    Mutant(
        "a full gate that opens every 50 ms", UNPARK, "b.cost is not null and (m.concurrency is null or o.held::bigint + b.cost <= m.concurrency)",
        "b.cost is not null", check_due_while_full,
    ),
    Mutant(
        "costs that are ignored", OFFER, "v_cost := greatest(1, v_one.costs[g]);", "v_cost := 1;", check_costs,
    ),
    Mutant(
        "a reservation that new tasks ignore", OFFER, "or (v_reserved[v_gate] and v_one.passed is distinct from v_one.gates[g])", "",
        corners.test_tasks_with_small_costs_do_not_starve_a_task_with_a_large_cost,
    ),
    Mutant(
        "an offered task that is not compared again", "task/claim_tasks",
        "and t.gates is not distinct from o.gates and t.costs is not distinct from o.costs", "",
        lambda db: corners.test_a_change_between_the_choice_of_a_task_and_its_lock_keeps_the_gates_right(db, "costs = array[3]", "key:a"),
    ),
    Mutant(
        "an insert that waits for an open claim", APPLY,
        "where not exists (select from {schema}.lines l where l.line = d.line) on conflict", "on conflict",
        frozen_claims.test_a_frozen_claim_delays_only_its_own_lines_and_gates,
    ),
    Mutant(
        "starts of unused offers are lost", RETURN,
        "else g.next_at - u.units * (m.period_s / m.starts) end", "else g.next_at end",
        corners.test_offers_that_a_claim_does_not_use_do_not_use_up_a_rate,
    ),
    Mutant(
        "a line that keeps the room it cannot use", OFFER, "v_more := least(v_more, v_waiting[i] - v_one.room);", "",
        fairness.test_ready_lines_with_one_task_each_fill_a_claim,
    ),
    Mutant(
        "a turn that lasts as long as the claim", OFFER, "v_one.credit := greatest(0, v_quota - v_more);",
        "v_one.credit := greatest(0, p_most - v_more);", check_shared_turns,
    ),
    Mutant(
        "a line that fills its gate and stays ready", OFFER, "v_offers[i].full_gate := v_one.gates[g];", "null;", check_shared_turns,
    ),
    Mutant(
        "a line that waits behind others although its turn was cut short", UNPARK,
        "order by o.priority, o.credit = 0, o.turn", "order by o.priority, o.turn", check_shared_turns,
    ),
    *(
        Mutant(
            f"a changed limit: {what}", name, before, after, check_change,
        )
        for what, name, before, after in [
            ("its gates keep their version", UNPARK, "set version = m.version,", "set version = g.version,"),
            ("its gates are not judged again", APPLY, "where m.has_old_gates\n        limit", "where false\n        limit"),
            ("its version does not grow", "schema/0016_fleets/21_number_limit", "new.version := 1 + greatest(", "new.version := 0 * greatest("),
        ]
    ),
    Mutant(
        "a rate whose next start stays where the old rate put it", UNPARK, "else least(g.next_at, now + m.burst * (m.period_s / m.starts)) end",
        "else g.next_at end", changes.test_a_faster_rate_applies_to_a_gate_that_the_slower_rate_closed,
    ),
    Mutant(
        "permits are kept for a cancelled task", CHANGED, "if not was_held and new.state <> 'PENDING' then", "if false then",
        lambda db: changes.test_permits_are_not_kept_for_a_task_that_has_ended(db, "cancelled"),
    ),
    Mutant(
        "permits are kept for a serial line that needs none", APPLY, "f.was = 'B' and (f.is_strict or ", "f.was = 'B' and (",
        changes.test_permits_are_not_kept_for_a_serial_line_that_no_longer_needs_them,
    ),
    Mutant(
        "a closure waits behind other changes", APPLY, "and closed_until is not null order by", "and false order by",
        changes.test_a_closure_is_applied_with_the_permit_of_its_task_behind_many_changes,
    ),
    Mutant(
        "a task that a sender has locked stops its limit", OFFER,
        "limit greatest(0, h.room) for no key update skip locked", "limit greatest(0, h.room)",
        lambda db: changes.test_an_open_transaction_of_a_sender_delays_only_its_own_task(db, 0),
    ),
    Mutant(
        "a line does not come back to a task that was locked", OFFER, "select count(*) > p.taken as any", "select false as any",
        lambda db: changes.test_an_open_transaction_of_a_sender_delays_only_its_own_task(db, 0),
    ),
    Mutant(
        "a line that is not judged again when its limit has become full", OFFER,
        "select o.line from unnest(v_offers) o where o.prunes and (o.room > 0 or o.full_gate is not null);",
        "select o.line from unnest(v_offers) o where false;",
        corners.test_older_tasks_are_cancelled_when_another_line_takes_the_permit_they_could_have_had,
    ),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.why)
def test_a_mutant_of_lines_and_gates_fails_its_test(
    mutant: Mutant, scenario: Callable[[Mutant | None], StoreHarness]
) -> None:
    assert not notices(mutant, scenario(None)), "the unchanged protocol passes its own test"
    assert notices(mutant, scenario(mutant)), f"no test failed: {mutant.why}"
