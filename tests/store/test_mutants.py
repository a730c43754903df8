"""Tests that cannot fail prove nothing: each guard of the protocol is taken out once, and the test of its promise must go red."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from psycopg import sql

from everbeat.store import migrating, statement
from everbeat.store.target import Target
from tests.invariants import breaches, install_audit
from tests.store import test_forged_marks as forged
from tests.store import test_grown_tables as grown
from tests.store import test_hostile_rows as hostile
from tests.store import test_life_cycle as life
from tests.store import test_lost_trees as lost_trees
from tests.store import test_messages as told
from tests.store import test_needs_statements as needs
from tests.store import test_quiet_statements as quiet
from tests.store import test_recovery_statements as recovery
from tests.store import test_remaining_sessions as sessions
from tests.store import test_signals as signals
from tests.store import test_stale_trees as stale_trees
from tests.store import test_steps as steps
from tests.store.conftest import Hands


@dataclass(frozen=True)
class Mutant:
    """A guard that is missing: the statement, what stands there, what the mutant has instead, and the test that notices."""

    why: str
    name: str
    old: str
    new: str
    check: Callable[[Hands], None]


CLAIM_ID = "claim_id = encode(substr(sha256(uuid_send(%(claim_call)s) || uuid_send(t.id) || int8send(t.fence)), 17), 'hex')::uuid"
COMPLETED = "where t.id = a.id and t.claim_id = a.claim_id and t.state || '' = 'RUNNING'"
LOST_TREES = "schema/0009_liveness/70_trees_without_session"

MUTANTS = [
    Mutant(
        "a completion by id and state alone", "task/complete", COMPLETED, "where t.id = a.id and t.state || '' = 'RUNNING'",
        life.test_a_completion_of_many_changes_only_what_is_still_held,
    ),
    Mutant(
        "a completion of what never started", "task/complete", COMPLETED, "where t.id = a.id and t.claim_id = a.claim_id",
        life.test_only_what_has_started_is_completed,
    ),
    Mutant(
        "a statement that answers with whatever columns a view has", "task/leases_of_supervisor", "l.last_rss_bytes\n", "l.last_rss_bytes, l.*\n",
        grown.test_no_answer_gets_more_columns_when_tables_and_views_grow,
    ),
    Mutant(
        "settle by id and state alone", "task/settle", "where t.claim_id = a.claim_id and t.state = 'RUNNING'", "where t.state = 'RUNNING'",
        recovery.test_every_verb_of_a_zombie_is_refused,
    ),
    Mutant(
        "settle by worker name", "task/settle", "where t.claim_id = a.claim_id and t.state = 'RUNNING'",
        "where t.claimed_by_worker_id is not null and t.state = 'RUNNING'", life.test_a_settle_of_many_changes_only_what_is_still_held,
    ),
    Mutant(
        "a settle that is not repeatable", "task/settle", "p.outcome = a.outcome or", "",
        life.test_a_repeated_settle_answers_already_and_another_outcome_is_lost,
    ),
    Mutant(
        "a failure after a cancel request is retried", "task/settle", "t.cancel_requested_at is not null or", "",
        life.TestCancel().test_running_is_asked_and_a_failure_afterwards_ends_cancelled_without_a_retry,
    ),
    Mutant(
        "a retry beyond good_until", "task/settle", "(t.good_until is null or t.good_until >", "(true or t.good_until >",
        life.test_a_retry_that_could_not_start_in_time_is_not_scheduled,
    ),
    Mutant(
        "an unfenced start", "task/start", "where t.claim_id = a.claim_id", "where true",
        life.test_only_the_holder_can_start_and_a_repeated_start_answers_the_same,
    ),
    Mutant(
        "a start beyond good_until", "task/start", "when t.good_until <= statement_timestamp() then 'expired' else", "when false then 'expired' else",
        life.test_a_task_whose_deadline_passes_while_claimed_never_starts,
    ),
    Mutant(
        "a start that is not repeatable", "task/start", "when h.state = 'RUNNING' then 'started'", "when false then 'started'",
        life.test_only_the_holder_can_start_and_a_repeated_start_answers_the_same,
    ),
    Mutant(
        "an unfenced release", "task/release", "where t.claim_id = a.claim_id and t.state = 'CLAIMED'", "where t.state = 'CLAIMED'",
        recovery.test_a_zombie_gives_nothing_back,
    ),
    Mutant(
        "unfenced progress", "task/record_progress", "and t.claim_id = %(claim_id)s", "and %(claim_id)s::uuid is not null",
        recovery.test_every_verb_of_a_zombie_is_refused,
    ),
    Mutant(
        "a recovery without compare-and-swap on the claim", "task/recover", "where t.claim_id = a.claim_id and t.state", "where t.state",
        recovery.test_a_decision_on_an_old_lease_does_not_touch_the_new_one,
    ),
    Mutant(
        "a recovery that ignores a beat", "task/recover", "and s.beat_seq = %(holder_seq)s", "and %(holder_seq)s::bigint is not null",
        recovery.test_a_holder_that_beat_after_it_was_watched_keeps_its_tasks,
    ),
    Mutant(
        "a recovery that ignores a worker's own beat", "task/recover", "(a.worker_seq is null or w.beat_seq = a.worker_seq)", "true",
        recovery.test_a_holder_that_beat_after_it_was_watched_keeps_its_tasks,
    ),
    Mutant(
        "a cancel request that a crash forgets", "task/recover", "when t.cancel_requested_at is not null then 'cancel'", "",
        recovery.test_a_cancel_request_beats_every_other_decision,
    ),
    Mutant(
        "a claim that is not repeatable", "task/claim", "and not exists (select from again)", "",
        life.test_a_repeated_claim_answers_the_same,
    ),
    Mutant(
        "a claim by the buried", "task/claim", "and ended_at is null for key share", "for key share",
        recovery.test_an_ended_worker_claims_nothing,
    ),
    Mutant(
        "a claim that a burial does not wait for", "task/claim", "and ended_at is null for key share", "and ended_at is null",
        recovery.test_a_claim_in_flight_makes_the_burial_wait_and_is_found_by_it,
    ),
    Mutant(
        "a claim without a new fence", "task/claim", "fence = t.fence + 1", "fence = t.fence",
        recovery.test_every_verb_of_a_zombie_is_refused,
    ),
    Mutant(
        "a claim id without chance in it", "task/claim", CLAIM_ID, "claim_id = t.id",
        recovery.test_every_verb_of_a_zombie_is_refused,
    ),
    Mutant(
        "a burial that can be undone", "worker/bury_workers", "and w.ended_at is null", "",
        recovery.test_an_ended_worker_claims_nothing,
    ),
    Mutant(
        "a beat that revives the ended", "worker/beat", "and s.ended_at is null", "",
        recovery.test_an_ended_supervisor_is_told_by_its_own_beat,
    ),
    Mutant(
        "a beat that tells of no losses", "worker/beat", "select 'lost', h.id, h.claim_id, null from held h where not exists",
        "select 'lost', h.id, h.claim_id, null from held h where false and not exists",
        recovery.test_a_beat_tells_of_losses_cancels_and_phantoms,
    ),
    Mutant(
        "a beat that tells of no order", "worker/beat", "where b.quiet_since is not null", "where b.quiet_since is null",
        quiet.test_a_beat_tells_whether_its_tree_is_quiet,
    ),
    Mutant(
        "a tree that comes back and claims", "worker/register_supervisor", "case when %(quiet)s then statement_timestamp() end",
        "case when %(quiet)s then null::timestamptz end",
        quiet.test_a_beat_tells_whether_its_tree_is_quiet,
    ),
    Mutant(
        "an order to the dead", "worker/quiet", "where s.ended_at is null and (", "where (",
        quiet.test_an_order_reaches_the_chosen_trees_that_live,
    ),
    Mutant(
        "an order that begins anew", "worker/quiet", "(s.quiet_since is null) = %(quiet)s", "true",
        quiet.test_an_order_reaches_the_chosen_trees_that_live,
    ),
    Mutant(
        "an observer that ends whom it did not watch", "worker/end_supervisor", "or s.beat_seq = %(beat_seq)s", "or true",
        recovery.test_an_ended_supervisor_is_told_by_its_own_beat,
    ),
    Mutant(
        "a lock that any silence may have freed", "worker/watch_sessions",
        "s.last_beat_at > statement_timestamp() - %(silence_kept_ms)s * interval '1 millisecond' as beat_lately",
        "%(silence_kept_ms)s::bigint > 0 as beat_lately",
        recovery.test_a_session_is_surely_closed_only_if_its_supervisor_beat_lately,
    ),
    Mutant(
        "any session of a tree as that of its beats", "worker/watch_sessions", "split_part(a.application_name, ' ', 3) = 'beats'", "true",
        recovery.test_a_tree_is_connected_only_if_the_session_of_its_beats_waits_for_its_client,
    ),
    Mutant(
        "a busy backend as a connection of its client", "worker/watch_sessions",
        "(a.state = 'active' and a.wait_event_type is distinct from 'Client') is not true", "true",
        recovery.test_a_tree_is_connected_only_if_the_session_of_its_beats_waits_for_its_client,
    ),
    Mutant(
        "statistics of one view as a crash", "worker/watch_sessions", "select least(b.stats_reset", "select greatest(b.stats_reset",
        recovery.test_a_session_was_lost_in_a_crash_only_if_all_statistics_began_anew_since,
    ),
    Mutant(
        "a session that survived as lost in a crash", "worker/watch_sessions",
        "when tree.locked or tree.sessions > 0 then false", "when false then false",
        recovery.test_a_session_was_lost_in_a_crash_only_if_all_statistics_began_anew_since,
    ),
    Mutant(
        "a predecessor that no crash can have hit", "worker/predecessors", "s.session_at < (select", "s.session_at > (select",
        recovery.test_a_session_was_lost_in_a_crash_only_if_all_statistics_began_anew_since,
    ),
    Mutant(
        "a lost host as evidence against the code", "task/process_ends", "and r.noticed_by = 'child_exit'", "",
        recovery.test_only_ends_of_processes_are_evidence_against_the_code,
    ),
    Mutant(
        "a turn that everybody takes", "worker/take_turn", "where t.taken_until <= statement_timestamp()", "where true",
        recovery.test_a_turn_belongs_to_one_until_it_ends,
    ),
    Mutant(
        "a retry into a key that is taken", "task/retry", " and not exists (select from rival)", "",
        life.test_a_key_that_a_live_task_has_prevents_the_retry_and_the_answer_names_that_task,
    ),
    Mutant(
        "a turn that a clock set back prolongs", "worker/take_turn", "or t.taken_at > clock_timestamp()", "",
        recovery.test_a_turn_is_free_after_the_clock_was_set_back,
    ),
    Mutant(
        "a claim of a row whose attempt has no next number", "task/claim", " and t.attempt < 2147483647", "",
        hostile.test_a_row_whose_counter_has_no_next_value_is_passed_over_by_claims,
    ),
    Mutant(
        "a claim of a row whose fence has no next number", "task/claim", "t.fence < 9223372036854775807 and ", "",
        hostile.test_a_row_whose_counter_has_no_next_value_is_passed_over_by_claims,
    ),
    Mutant(
        "a history that refuses a torn attempt", "task/settle", "coalesce(h.claimed_at, statement_timestamp())", "h.claimed_at",
        hostile.test_an_attempt_that_its_history_cannot_hold_keeps_no_neighbour_from_settling,
    ),
    Mutant(
        "a settle that counts beyond the last number", "task/settle", "least(t.retry_count::bigint +", "least(t.retry_count +",
        hostile.test_an_attempt_that_its_history_cannot_hold_keeps_no_neighbour_from_settling,
    ),
    Mutant(
        "a cancel that leaves the claim", "task/cancel", "claim_id = null, claim_call = %(call)s, next_retry_at = null,", "next_retry_at = null,",
        life.TestCancel().test_pending_and_claimed_end_at_once,
    ),
    Mutant(
        "a cancel that does not know its own call", "task/cancel", "(e.id is not null or h.claim_call = %(call)s) is true", "(e.id is not null)",
        life.test_a_repeated_cancel_answers_the_same_and_another_one_does_not,
    ),
    Mutant(
        "a cancel that is done twice", "task/cancel", " and h.claim_call is distinct from %(call)s", "",
        life.test_a_repeated_cancel_answers_the_same_and_another_one_does_not,
    ),
    Mutant(
        "a retry that is done twice", "task/retry", " and h.retry_call is distinct from %(call)s", "",
        life.test_a_repeated_retry_does_not_run_again_what_it_has_run,
    ),
    Mutant(
        "a pause that does not know its own call", "pause/pause", "p.call is distinct from %(call)s", "true",
        life.test_a_repeated_pause_is_the_callers_own,
    ),
    Mutant(
        "a resume of whatever is paused", "pause/resume", " and p.paused_at = %(paused_at)s", " and %(paused_at)s::timestamptz is not null",
        life.test_a_repeated_resume_leaves_a_later_pause_alone,
    ),
    Mutant(
        "an unfenced step", "step/record", "and t.claim_id = %(claim_id)s", "and %(claim_id)s::uuid is not null",
        steps.TestRecord().test_a_zombie_records_and_reads_nothing,
    ),
    Mutant(
        "a step of what never started", "step/record", "and t.state = 'RUNNING'", "",
        steps.TestRecord().test_what_is_claimed_and_has_not_started_records_nothing,
    ),
    Mutant(
        "unfenced reading", "step/load", "and t.claim_id = %(claim_id)s", "and %(claim_id)s::uuid is not null",
        steps.TestRecord().test_a_zombie_records_and_reads_nothing,
    ),
    Mutant(
        "an unfenced sleep", "step/sleep", "and t.claim_id = %(claim_id)s", "and %(claim_id)s::uuid is not null",
        steps.TestRecord().test_a_zombie_records_and_reads_nothing,
    ),
    Mutant(
        "an unfenced wait", "step/wait", "and t.claim_id = %(claim_id)s", "and %(claim_id)s::uuid is not null",
        steps.TestRecord().test_a_zombie_records_and_reads_nothing,
    ),
    Mutant(
        "an unfenced child", "step/send_child", "and t.claim_id = %(claim_id)s", "and %(claim_id)s::uuid is not null",
        steps.TestRecord().test_a_zombie_records_and_reads_nothing,
    ),
    Mutant(
        "a child sent behind a cancel", "step/send_child", "where not h.is_cancelled and not exists (select from known)\n    on conflict",
        "where not exists (select from known)\n    on conflict", steps.TestChildren().test_who_is_asked_to_end_sends_no_more_children,
    ),
    Mutant(
        "a sleep that begins anew", "step/sleep", "do update set recorded_at = s.recorded_at", "do update set due_at = excluded.due_at",
        steps.TestSleep().test_its_moment_is_set_once,
    ),
    Mutant(
        "a suspended task that expires", "task/settle",
        "good_until = case when h.next_state = 'PENDING' and h.has_begun then null else t.good_until end,", "",
        steps.TestSleep().test_a_suspended_task_is_due_then_at_no_cost_and_begun_tasks_do_not_expire,
    ),
    Mutant(
        "a stop that expires begun work", "task/settle", "a.outcome in ('HANDED_BACK', 'SUSPENDED')", "a.outcome = 'SUSPENDED'",
        life.test_a_stop_that_hands_begun_code_back_does_not_cost_the_task_its_second_run,
    ),
    Mutant(
        "a release that forgets the deadline of code that never ran", "task/settle", "a.outcome in ('HANDED_BACK', 'SUSPENDED')",
        "a.outcome in ('HANDED_BACK', 'RELEASED', 'SUSPENDED')",
        life.test_a_stop_that_hands_begun_code_back_does_not_cost_the_task_its_second_run,
    ),
    Mutant(
        "a retry that a signal hurries", "task/settle",
        "waits_for = case when h.next_state = 'PENDING' and h.outcome = 'SUSPENDED' then t.waits_for end,", "",
        signals.test_a_signal_makes_nothing_due_that_does_not_wait,
    ),
    Mutant(
        "a suspension that overlooks a signal", "task/settle", "coalesce(t.wake_at, statement_timestamp())",
        "coalesce((select old.wake_at from {schema}.tasks old where old.id = t.id), statement_timestamp())",
        signals.test_a_suspension_that_begins_while_a_signal_is_stored,
    ),
    Mutant(
        "a second look that forgets the mark of a signal", "step/wait", "when w.is_known and t.waits_for", "when false and t.waits_for",
        signals.test_a_second_look_that_begins_while_a_signal_is_stored,
    ),
    Mutant(
        "a wait beside the signal of its workflow", "step/wait", "    for share\n", "",
        signals.test_a_wait_that_begins_while_a_signal_is_stored,
    ),
    Mutant(
        "a signal beside the wait of its target", "schema/0009_liveness/93_send_signal",
        "where t.id = target_id for no key update", "where t.id = target_id",
        signals.test_a_wait_that_begins_while_a_signal_is_stored,
    ),
    Mutant(
        "a signal that wakes only who sleeps already", "schema/0009_liveness/93_send_signal",
        "and t.waits_for = event and t.state in ('PENDING', 'CLAIMED', 'RUNNING')", "and t.waits_for = event and t.state = 'PENDING'",
        signals.test_a_suspension_that_begins_while_a_signal_is_stored,
    ),
    Mutant(
        "a signal that is had twice", "step/wait", "and taken.signal_id = s.id", "and taken.signal_id is null and s.id is not null",
        signals.test_a_signal_that_came_before_is_had_at_once_and_once,
    ),
    Mutant(
        "a lock of any incarnation of the server", "worker/watch_sessions", "s.session_held and s.session_server = h.incarnation", "s.session_held",
        recovery.test_a_session_lock_proves_nothing_on_another_incarnation_of_the_server,
    ),
    Mutant(
        "a lock of any role", "worker/watch_sessions", "l.role = coalesce(s.session_role, l.role)", "true",
        recovery.test_sessions_and_locks_of_another_role_are_not_the_trees,
    ),
    Mutant(
        "sessions of any role", "worker/watch_sessions", "c.role = coalesce(s.session_role, c.role)", "true",
        recovery.test_sessions_and_locks_of_another_role_are_not_the_trees,
    ),
    Mutant(
        "a lock of any incarnation of the server", "worker/predecessors", "s.session_held and s.session_server = h.incarnation", "s.session_held",
        recovery.test_a_session_lock_proves_nothing_on_another_incarnation_of_the_server,
    ),
    Mutant(
        "a lock of any role", "worker/predecessors", "l.role = coalesce(s.session_role, l.role)", "true",
        recovery.test_sessions_and_locks_of_another_role_are_not_the_trees,
    ),
    Mutant(
        "sessions of any role", "worker/predecessors", "c.role = coalesce(s.session_role, c.role)", "true",
        recovery.test_sessions_and_locks_of_another_role_are_not_the_trees,
    ),
    Mutant(
        "a lock taken again without its server", "worker/hold_session", "session_server = {schema}.server_incarnation()",
        "session_server = coalesce(s.session_server, {schema}.server_incarnation())",
        recovery.test_a_session_lock_proves_nothing_on_another_incarnation_of_the_server,
    ),
    Mutant(
        "sessions of a tree that came back are ended", "worker/remaining_sessions", "bool_and(", "bool_or(",
        sessions.test_only_sessions_of_dead_trees_are_ended,
    ),
    Mutant(
        "sessions of a tree that left are ended", "worker/remaining_sessions", "and s.ended_how <> 'left'", "",
        sessions.test_only_sessions_of_dead_trees_are_ended,
    ),
    Mutant(
        "sessions of another tree are ended", "worker/remaining_sessions", "t.name = split_part(a.application_name, ' ', 1)",
        "starts_with(a.application_name, t.name)",
        sessions.test_only_sessions_of_dead_trees_are_ended,
    ),
    Mutant(
        "a session that commits is ended", "worker/remaining_sessions", "m.wait_event_type = 'Client' or", "true or",
        sessions.test_a_session_of_a_dead_tree_that_works_on_a_statement_is_not_ended,
    ),
    Mutant(
        "an idle session counts as one whose answer is unread", "worker/remaining_sessions", "m.wait_event = 'ClientWrite'",
        "m.wait_event_type = 'Client'", sessions.test_a_session_is_ended_only_while_the_answer_that_was_seen_is_unread,
    ),
    Mutant(
        "a session is ended that works on another statement by now", "worker/end_sessions",
        "greatest(a.backend_start, a.xact_start, a.query_start) = found.since", "true",
        sessions.test_a_session_is_ended_only_while_the_answer_that_was_seen_is_unread,
    ),
    Mutant(
        "a session is ended that has read its answer by now", "worker/end_sessions", "else a.wait_event = 'ClientWrite' end", "else true end",
        sessions.test_a_session_that_read_its_answer_after_the_look_is_not_ended,
    ),
    Mutant(
        "a tree ends its own sessions", "worker/remaining_sessions",
        "and t.name <> split_part(current_setting('application_name'), ' ', 1)",
        "and a.pid <> pg_backend_pid()", sessions.test_a_tree_that_was_declared_dead_does_not_end_its_own_sessions,
    ),
    Mutant(
        "a session leaves backend after backend behind", "worker/left_behind", "count(*) > 1", "false",
        sessions.test_a_session_waits_while_two_of_its_backends_are_left_and_ends_those_that_wait_for_it,
    ),
    Mutant(
        "a repeated recovery answers nothing", "task/recover", "b.call = %(call)s", "false",
        recovery.test_a_repeated_recovery_answers_what_its_first_try_has_recovered_and_another_call_nothing,
    ),
    Mutant(
        "a recovery of another call is answered as one's own", "task/recover", " and b.call = %(call)s", "",
        recovery.test_a_repeated_recovery_answers_what_its_first_try_has_recovered_and_another_call_nothing,
    ),
    Mutant(
        "a session of any role counts as everbeat's", "inspect/connections", " and a.usesysid in (select own.role from own)", "",
        sessions.test_sessions_of_other_roles_that_bear_a_name_of_everbeat_are_not_counted_as_its_own,
    ),
    Mutant(
        "a session of another role is ended", "worker/remaining_sessions", "and a.usesysid = coalesce(t.role, a.usesysid)", "",
        sessions.test_a_session_of_another_role_that_bears_the_name_of_a_dead_tree_is_not_ended,
    ),
    Mutant(
        "a look trusts a lock of any incarnation of the server", LOST_TREES, "s.session_held and s.session_server = h.incarnation", "s.session_held",
        lost_trees.test_a_tree_is_lost_without_its_lock_and_without_any_session_of_its_role_on_this_server,
    ),
    Mutant(
        "a look ignores the session lock", LOST_TREES, "l.key = s.lock_key", "false",
        lost_trees.test_a_tree_is_lost_without_its_lock_and_without_any_session_of_its_role_on_this_server,
    ),
    Mutant(
        "a look ignores the sessions of a tree", LOST_TREES, "c.tree = s.session_name", "false",
        lost_trees.test_a_tree_is_lost_without_its_lock_and_without_any_session_of_its_role_on_this_server,
    ),
    Mutant(
        "a lock of any role revives a tree", LOST_TREES, "l.role = coalesce(s.session_role, l.role)", "true",
        lost_trees.test_another_role_neither_revives_a_lost_tree_nor_needs_rights_to_see_it,
    ),
    Mutant(
        "a session of any role revives a tree", LOST_TREES, "c.role = coalesce(s.session_role, c.role)", "true",
        lost_trees.test_another_role_neither_revives_a_lost_tree_nor_needs_rights_to_see_it,
    ),
    *(
        Mutant(
            f"{look} counts a lost tree as live", f"inspect/{look}", "trees_without_session() x", "trees_without_session() x where false",
            lost_trees.test_no_look_counts_a_lost_tree_as_live,
        )
        for look in ("crew", "waiting", "holding", "silent_trees", "unswept", "unserved", "knowing", "workers", "supervisors")
    ),
    Mutant(
        "explain counts workers that cannot run the task as fitting", "inspect/waiting",
        "l.id <> all(%(unfit)s::text[]) as fits", "%(unfit)s::text[] is not null as fits",
        needs.test_workers_that_cannot_run_a_task_count_neither_as_fitting_nor_for_slots_lag_and_quiet,
    ),
    Mutant(
        "explain counts the slots of workers that cannot run the task", "inspect/waiting", "and crew.fits and", "and",
        needs.test_workers_that_cannot_run_a_task_count_neither_as_fitting_nor_for_slots_lag_and_quiet,
    ),
    *(
        Mutant(
            f"{reader} believe a forged mark", statement, f"and {{schema}}.mark_of(few.name, few.needs) = {of}.needs_id", "",
            lambda hands, line=line: forged.test_workers_and_doctor_read_what_a_group_needs_from_a_row_whose_mark_is_its_own(  # type: ignore[misc]
                hands, forged.FORGED["other names"], line
            ),
        )
        for reader, statement, of, line in (
            ("workers", "task/marked", "m", None), ("workers of serial lines", "task/marked", "l", "key:a"), ("doctor", "inspect/marked", "g", None),
        )
    ),
    Mutant(
        "doctor leaves out marked tasks of serial lines", "inspect/marked", "t.serial is not null and", "false and",
        needs.test_marked_tasks_that_wait_are_counted_by_what_they_need_and_their_queue,
    ),
    Mutant(
        "doctor counts marked tasks that do not wait", "inspect/marked", "t.state = 'PENDING' and t.serial is null", "t.serial is null",
        needs.test_marked_tasks_that_wait_are_counted_by_what_they_need_and_their_queue,
    ),
    *(
        Mutant(
            f"{look} judges a tree by the asker's threshold alone", look, f"greatest(%(stale_ms)s, {column})", "%(stale_ms)s",
            stale_trees.test_every_look_judges_a_tree_by_the_longer_of_both_thresholds,
        )
        for look, column in (
            *(
                (f"inspect/{name}", "s.claimed_stale_ms")
                for name in ("crew", "waiting", "holding", "unserved", "workers", "supervisors", "known_names", "movement", "failing_starts",
                    "knowing")
            ),
            ("inspect/silent_trees", "t.claimed_stale_ms"),
            ("message/look", "s.running_stale_ms"),
        )
    ),
    Mutant(
        "a tree that beats rarely is called silent", "inspect/silent_trees", "greatest(%(silent_ms)s, 2 * s.beat_ms)", "%(silent_ms)s",
        stale_trees.test_every_look_judges_a_tree_by_the_longer_of_both_thresholds,
    ),
    Mutant(
        "a lease of a tree that beats rarely is called overdue", "inspect/unswept", "greatest(%(running_ms)s::bigint, l.running_stale_ms)",
        "%(running_ms)s::bigint", stale_trees.test_every_look_judges_a_tree_by_the_longer_of_both_thresholds,
    ),
    Mutant(
        "a sweep ends a tree that beats rarely", "worker/silent_supervisors",
        "greatest(%(silent_ms)s, s.claimed_stale_ms, s.running_stale_ms)", "%(silent_ms)s",
        stale_trees.test_every_look_judges_a_tree_by_the_longer_of_both_thresholds,
    ),
    Mutant(
        "a tree does not write its thresholds", "worker/register_supervisor", "%(claimed_stale_ms)s, %(running_stale_ms)s",
        "null::integer, null::integer", stale_trees.test_every_look_judges_a_tree_by_the_longer_of_both_thresholds,
    ),
    Mutant(
        "a message that was never published counts as one that lies in the stream", "message/lying", " and o.place > 0", "",
        lambda hands: told.test_what_lies_with_reason_is_counted_by_queue(told.in_use(hands)),
    ),
    Mutant(
        "the message of a running task counts as left behind", "message/lying", "t.state in ('CLAIMED', 'RUNNING')", "t.state in ('CLAIMED')",
        lambda hands: told.test_what_lies_with_reason_is_counted_by_queue(told.in_use(hands)),
    ),
    Mutant(
        "a stalled task is told as a worker that stopped responding", "message/due", "in ('session', 'age')", "in ('session', 'age', 'progress')",
        lambda hands: told.test_the_reason_of_a_recovery_says_what_happened(told.in_use(hands)),
    ),
]  # fmt: skip


@pytest.fixture
def stage(
    database_url: str, schema: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Mutant | None], Hands]]:
    """Makes a fresh schema in which a mutant lives, or the protocol as it is."""
    made: list[Hands] = []
    original = statement.source.__wrapped__

    def make(mutant: Mutant | None) -> Hands:
        def source(name: str) -> str:
            text: str = original(name)
            if mutant is None or mutant.name != name:
                return text
            assert mutant.old in text, f"{name} no longer holds what the mutant takes out: {mutant.old}"
            return text.replace(mutant.old, mutant.new)

        monkeypatch.setattr(statement, "source", source)
        statement.compose.cache_clear()
        target = Target.parse(database_url, schema=schema if mutant is None else f"{schema}_m")
        connection = target.connect("everbeat test")
        migrating.migrate(connection, target)
        install_audit(connection, target.schema)
        party = Hands(target, connection)
        party.supervisor("s1", "w1", "w2")
        made.append(party)
        return party

    yield make
    statement.compose.cache_clear()
    for party in made:
        party.database.close()
        party.connection.execute(
            sql.SQL("drop schema {} cascade").format(sql.Identifier(party.target.schema))
        )
        party.connection.close()


def notices(mutant: Mutant, hands: Hands) -> bool:
    """Whether the test of the promise goes red, or leaves what no invariant allows."""
    try:
        mutant.check(hands)
    except (Exception, pytest.fail.Exception):  # noqa: BLE001 - red is red
        return True
    return breaches(hands.connection, hands.target.schema) != []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.why)
def test_a_missing_guard_is_noticed(mutant: Mutant, stage: Callable[[Mutant | None], Hands]) -> None:
    assert not notices(mutant, stage(None)), "the protocol as it is passes its own test"
    assert notices(mutant, stage(mutant)), f"nobody noticed: {mutant.why}"
