"""Mutants of the SQL statements: each guard of the protocol is removed once, and the test of its promise must fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from everbeat.store import migrating, statement
from everbeat.store.target import Target
from tests.invariants import breaches, install_audit
from tests.migrated import MigratedSchemas, new_name
from tests.store import test_able_workers as able
from tests.store import test_begun_nodes as begun_nodes
from tests.store import test_failure_handlers as handlers
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
from tests.store import test_streams as streams
from tests.store.conftest import StoreHarness


@dataclass(frozen=True)
class Mutant:
    """A missing guard: the reason, the statement, the text to replace, its replacement, and the test that must fail."""

    why: str
    name: str
    old: str
    new: str
    check: Callable[[StoreHarness], None]


CLAIM_ID = "claim_id = encode(substr(sha256(uuid_send(%(claim_call)s) || uuid_send(t.id) || int8send(t.fence)), 17), 'hex')::uuid"
COMPLETED = "where t.id = a.id and t.claim_id = a.claim_id and t.state || '' = 'RUNNING'"
HANDLERS = "schema/0019_around_the_work/"
SEND_HANDLER = "schema/0021_traced/30_send_failure_handler"
LOST_TREES = "schema/0016_fleets/10_trees_without_session"

MUTANTS = [
    Mutant(
        "a completion by id and state alone", "task/complete_attempts", COMPLETED, "where t.id = a.id and t.state || '' = 'RUNNING'",
        life.test_a_completion_of_many_tasks_changes_only_those_that_are_still_held,
    ),
    Mutant(
        "a completion of what never started", "task/complete_attempts", COMPLETED, "where t.id = a.id and t.claim_id = a.claim_id",
        life.test_complete_attempts_ignores_a_task_that_has_not_started,
    ),
    Mutant(
        "a statement that returns all columns of a view", "task/list_leases_of_supervisor", "l.running_stale_ms\n",
        "l.running_stale_ms, l.*\n",
        grown.test_statements_return_the_same_columns_after_tables_and_views_grow,
    ),
    Mutant(
        "settle by id and state alone", "task/settle_attempts", "where t.claim_id = a.claim_id and t.state = 'RUNNING'", "where t.state = 'RUNNING'",
        recovery.test_every_statement_of_a_zombie_is_rejected,
    ),
    Mutant(
        "settle by worker name", "task/settle_attempts", "where t.claim_id = a.claim_id and t.state = 'RUNNING'",
        "where t.claimed_by_worker_id is not null and t.state = 'RUNNING'", life.test_a_settle_of_many_tasks_changes_only_those_that_are_still_held,
    ),
    Mutant(
        "a settle that cannot be repeated", "task/settle_attempts", "p.outcome = h.outcome or", "",
        life.test_a_repeated_settle_returns_already_and_a_different_outcome_returns_lost,
    ),
    Mutant(
        "a failure after a cancel request is retried", "task/settle_attempts", "t.cancel_requested_at is not null or", "",
        life.TestCancel().test_a_running_task_with_a_requested_cancel_ends_cancelled_at_its_next_failure,
    ),
    Mutant(
        "a retry beyond good_until", "task/settle_attempts", "(t.good_until is null or t.good_until >", "(true or t.good_until >",
        life.test_a_retry_that_could_not_start_before_good_until_is_not_scheduled,
    ),
    Mutant(
        "an unfenced start", "task/start_tasks", "where t.claim_id = a.claim_id", "where true",
        life.test_only_the_holder_can_start_a_task_and_a_repeated_start_returns_the_same,
    ),
    Mutant(
        "a start beyond good_until", "task/start_tasks", "when t.good_until <= statement_timestamp() then 'expired' else",
        "when false then 'expired' else",
        life.test_a_claimed_task_whose_good_until_passes_expires_at_its_start,
    ),
    Mutant(
        "a start that cannot be repeated", "task/start_tasks", "when h.state = 'RUNNING' then 'started'", "when false then 'started'",
        life.test_only_the_holder_can_start_a_task_and_a_repeated_start_returns_the_same,
    ),
    Mutant(
        "an unfenced release", "task/release_leases", "where t.claim_id = a.claim_id and t.state = 'CLAIMED'", "where t.state = 'CLAIMED'",
        recovery.test_a_release_by_a_zombie_changes_nothing,
    ),
    Mutant(
        "unfenced progress", "task/record_progress", "and t.claim_id = %(claim_id)s", "and %(claim_id)s::uuid is not null",
        recovery.test_every_statement_of_a_zombie_is_rejected,
    ),
    Mutant(
        "a recovery beyond good_until", "task/recover_leases", "and t.good_until <= a.retry_at", "and false",
        recovery.test_a_recovered_task_that_could_not_start_before_good_until_fails,
    ),
    Mutant(
        "a recovery without compare-and-swap on the claim", "task/recover_leases", "where t.claim_id = a.claim_id and t.state", "where t.state",
        recovery.test_a_recovery_decision_about_an_old_lease_does_not_affect_the_new_one,
    ),
    Mutant(
        "a recovery that ignores a beat", "task/recover_leases", "and s.beat_seq = %(holder_seq)s", "and %(holder_seq)s::bigint is not null",
        recovery.test_a_holder_that_beat_after_it_was_watched_keeps_its_tasks,
    ),
    Mutant(
        "a recovery that ignores a worker's own beat", "task/recover_leases", "(a.worker_seq is null or w.beat_seq = a.worker_seq)", "true",
        recovery.test_a_holder_that_beat_after_it_was_watched_keeps_its_tasks,
    ),
    Mutant(
        "a crash that drops a requested cancel", "task/recover_leases", "when t.cancel_requested_at is not null then 'cancel'", "",
        recovery.test_a_requested_cancel_overrides_every_other_recovery_decision,
    ),
    Mutant(
        "a claim that cannot be repeated", "task/claim_tasks", "and not exists (select from again)", "",
        life.test_a_repeated_claim_returns_the_same_tasks,
    ),
    Mutant(
        "a claim by a buried worker", "task/claim_tasks", "and ended_at is null for key share", "for key share",
        recovery.test_an_ended_worker_cannot_claim_or_beat,
    ),
    Mutant(
        "a burial that does not wait for a claim", "task/claim_tasks", "and ended_at is null for key share", "and ended_at is null",
        recovery.test_a_burial_waits_for_a_claim_in_flight_and_finds_its_lease,
    ),
    Mutant(
        "a claim without a new fence", "task/claim_tasks", "fence = t.fence + 1", "fence = t.fence",
        recovery.test_every_statement_of_a_zombie_is_rejected,
    ),
    Mutant(
        "a claim id without the random call id", "task/claim_tasks", CLAIM_ID, "claim_id = t.id",
        recovery.test_every_statement_of_a_zombie_is_rejected,
    ),
    Mutant(
        "a burial that can be undone", "worker/bury_workers", "and w.ended_at is null", "",
        recovery.test_an_ended_worker_cannot_claim_or_beat,
    ),
    Mutant(
        "a beat that revives an ended supervisor", "worker/record_beat", "and s.ended_at is null", "",
        recovery.test_the_beat_of_an_ended_supervisor_returns_no_sequence_number,
    ),
    Mutant(
        "a beat that returns no losses", "worker/record_beat", "select 'lost', h.id, h.claim_id, null from held h where not exists",
        "select 'lost', h.id, h.claim_id, null from held h where false and not exists",
        recovery.test_a_beat_returns_lost_leases_requested_cancels_and_unknown_leases,
    ),
    Mutant(
        "a beat that does not return quiet mode", "worker/record_beat", "where b.quiet_since is not null", "where b.quiet_since is null",
        quiet.test_a_beat_returns_whether_its_tree_is_quiet,
    ),
    Mutant(
        "a quiet tree that restarts and claims", "worker/register_supervisor", "case when %(quiet)s then statement_timestamp() end",
        "case when %(quiet)s then null::timestamptz end",
        quiet.test_a_beat_returns_whether_its_tree_is_quiet,
    ),
    Mutant(
        "an order to ended trees", "worker/set_quiet", "where s.ended_at is null and (", "where (",
        quiet.test_set_quiet_reaches_the_chosen_live_trees,
    ),
    Mutant(
        "an order that resets its start", "worker/set_quiet", "(s.quiet_since is null) = %(quiet)s", "true",
        quiet.test_set_quiet_reaches_the_chosen_live_trees,
    ),
    Mutant(
        "an observer that ends a supervisor that has beaten since", "worker/end_supervisor", "or s.beat_seq = %(beat_seq)s", "or true",
        recovery.test_the_beat_of_an_ended_supervisor_returns_no_sequence_number,
    ),
    Mutant(
        "a lock that counts as free after any silence", "worker/watch_sessions",
        "s.last_beat_at > statement_timestamp() - %(silence_kept_ms)s * interval '1 millisecond' as beat_lately",
        "%(silence_kept_ms)s::bigint > 0 as beat_lately",
        recovery.test_the_lock_of_a_session_is_trusted_as_free_only_after_a_recent_beat,
    ),
    Mutant(
        "a beats session that any session of the tree replaces", "worker/watch_sessions", "split_part(a.application_name, ' ', 3) = 'beats'", "true",
        recovery.test_a_tree_is_connected_only_if_the_session_of_its_beats_waits_for_its_client,
    ),
    Mutant(
        "a busy backend that counts as connected to its client", "worker/watch_sessions",
        "(a.state = 'active' and a.wait_event_type is distinct from 'Client') is not true", "true",
        recovery.test_a_tree_is_connected_only_if_the_session_of_its_beats_waits_for_its_client,
    ),
    Mutant(
        "a reset of one statistics view that counts as a crash", "worker/watch_sessions", "select least(b.stats_reset",
        "select greatest(b.stats_reset",
        recovery.test_a_session_was_lost_in_a_crash_only_if_all_statistics_were_reset_since,
    ),
    Mutant(
        "a surviving session that counts as lost in a crash", "worker/watch_sessions",
        "when tree.locked or tree.sessions > 0 then false", "when false then false",
        recovery.test_a_session_was_lost_in_a_crash_only_if_all_statistics_were_reset_since,
    ),
    Mutant(
        "a predecessor that is never lost in a crash", "worker/list_predecessors", "s.session_at < (select", "s.session_at > (select",
        recovery.test_a_session_was_lost_in_a_crash_only_if_all_statistics_were_reset_since,
    ),
    Mutant(
        "a lost host that counts as evidence against the code", "task/list_process_ends", "and r.noticed_by = 'child_exit'", "",
        recovery.test_only_ends_of_processes_count_as_evidence_against_the_code,
    ),
    Mutant(
        "a turn that every supervisor gets", "fragment/turn", "where t.taken_until <= statement_timestamp()", "where true",
        recovery.test_one_of_two_supervisors_that_ask_at_once_gets_a_turn,
    ),
    Mutant(
        "a turn to watch that every supervisor gets", "worker/take_watch_turn", "where t.taken_by = (select f.taken_by from free f)", "where true",
        recovery.test_one_of_two_supervisors_that_ask_at_once_gets_a_turn_to_watch,
    ),
    Mutant(
        "a retry that ignores a live task with its key", "task/retry_task", " and not exists (select from rival)", "",
        life.test_a_key_of_a_live_task_prevents_an_operator_retry_and_the_reply_names_that_task,
    ),
    Mutant(
        "a turn that a clock set back prolongs", "fragment/turn", "or t.taken_at > clock_timestamp()", "",
        recovery.test_a_turn_is_free_after_the_clock_was_set_back,
    ),
    Mutant(
        "a claim of a row whose attempt number is exhausted", "task/claim_tasks", " and t.attempt < 2147483647", "",
        hostile.test_a_claim_skips_a_row_whose_counter_has_no_next_value,
    ),
    Mutant(
        "a claim of a row whose fence is exhausted", "task/claim_tasks", "t.fence < 9223372036854775807 and ", "",
        hostile.test_a_claim_skips_a_row_whose_counter_has_no_next_value,
    ),
    Mutant(
        "a history that rejects an attempt without times", "task/settle_attempts", "coalesce(h.claimed_at, statement_timestamp())", "h.claimed_at",
        hostile.test_an_attempt_that_the_history_cannot_store_does_not_prevent_others_from_settling,
    ),
    Mutant(
        "a settle that counts beyond the largest number", "task/settle_attempts", "least(t.retry_count::bigint +", "least(t.retry_count +",
        hostile.test_an_attempt_that_the_history_cannot_store_does_not_prevent_others_from_settling,
    ),
    Mutant(
        "a cancel that keeps the claim", "task/cancel_task", "claim_id = null, claim_call = %(call)s, next_retry_at = null,",
        "next_retry_at = null,",
        life.TestCancel().test_a_cancel_ends_pending_and_claimed_tasks_at_once,
    ),
    Mutant(
        "a cancel that does not recognise its own call", "task/cancel_task", "(e.id is not null or h.claim_call = %(call)s) is true",
        "(e.id is not null)",
        life.test_a_repeated_cancel_returns_the_same_and_does_not_cancel_a_retried_task,
    ),
    Mutant(
        "a cancel that is applied twice", "task/cancel_task", " and h.claim_call is distinct from %(call)s", "",
        life.test_a_repeated_cancel_returns_the_same_and_does_not_cancel_a_retried_task,
    ),
    Mutant(
        "a retry that is applied twice", "task/retry_task", " and h.retry_call is distinct from %(call)s", "",
        life.test_a_repeated_operator_retry_does_not_run_the_task_twice,
    ),
    Mutant(
        "a pause that does not recognise its own call", "pause/pause_name", "p.call is distinct from %(call)s", "true",
        life.test_a_repeated_pause_is_not_reported_as_already_paused,
    ),
    Mutant(
        "a resume that ends any pause", "pause/resume_name", " and p.paused_at = %(paused_at)s", " and %(paused_at)s::timestamptz is not null",
        life.test_a_repeated_resume_keeps_a_later_pause,
    ),
    Mutant(
        "an unfenced step", "step/record_step", "and t.claim_id = %(claim_id)s", "and %(claim_id)s::uuid is not null",
        steps.TestRecord().test_a_zombie_cannot_record_or_load_steps,
    ),
    Mutant(
        "a step without its digest", "step/record_step", "h.attempt, %(digest)s::text from held h",
        "h.attempt, left(%(digest)s::text, 0) from held h",
        steps.TestRecord().test_the_digest_of_a_step_is_recorded_once_and_loaded,
    ),
    Mutant(
        "a digest that is not loaded", "step/load_steps", "as left_ms, s.digest, s.looked", "as left_ms, null, s.looked",
        steps.TestRecord().test_the_digest_of_a_step_is_recorded_once_and_loaded,
    ),
    Mutant(
        "a child without its digest", "step/send_child", "h.attempt, %(digest)s::text\n", "h.attempt, left(%(digest)s::text, 0)\n",
        steps.TestRecord().test_the_digest_of_a_step_is_recorded_once_and_loaded,
    ),
    Mutant(
        "a retried workflow that drops digests", "workflow/enqueue_nodes", "s.recorded_at, s.digest\n", "s.recorded_at, null\n",
        begun_nodes.test_a_retry_of_a_workflow_keeps_the_recorded_steps_of_its_tasks,
    ),
    Mutant(
        "a step of a task that has not started", "step/record_step", "and t.state = 'RUNNING'", "",
        steps.TestRecord().test_a_claimed_task_that_has_not_started_cannot_record_steps,
    ),
    Mutant(
        "unfenced loading of steps", "step/load_steps", "and t.claim_id = %(claim_id)s", "and %(claim_id)s::uuid is not null",
        steps.TestRecord().test_a_zombie_cannot_record_or_load_steps,
    ),
    Mutant(
        "an unfenced sleep", "step/begin_sleep", "and t.claim_id = %(claim_id)s", "and %(claim_id)s::uuid is not null",
        steps.TestRecord().test_a_zombie_cannot_record_or_load_steps,
    ),
    Mutant(
        "an unfenced wait", "step/wait_for_signal", "and t.claim_id = %(claim_id)s", "and %(claim_id)s::uuid is not null",
        steps.TestRecord().test_a_zombie_cannot_record_or_load_steps,
    ),
    Mutant(
        "unfenced items", "stream/insert_items", "select t.id, t.claim_id, t.attempt from {schema}.tasks t\n    where t.id = any(%(ids)s::uuid[]) and"
        " t.claim_id = any(%(claim_ids)s::uuid[]) and t.state || '' = 'RUNNING'",
        "select t.id, l.claim_id, t.attempt from {schema}.tasks t"
        " join unnest(%(ids)s::uuid[], %(claim_ids)s::uuid[]) as l (id, claim_id) on l.id = t.id",
        streams.test_a_portion_stores_the_items_of_the_attempts_that_hold_their_tasks,
    ),
    Mutant(
        "items of an attempt that has not started", "stream/insert_items", "and t.state || '' = 'RUNNING'", "",
        streams.test_a_claimed_or_ended_attempt_stores_no_items,
    ),
    Mutant(
        "items that do not wait for a change of the lease", "stream/insert_items", "for share\n", "for key share\n",
        streams.test_a_portion_waits_for_a_change_of_the_lease_and_then_stores_nothing,
    ),
    Mutant(
        "items that are stored twice", "stream/insert_items", "on conflict do nothing",
        "on conflict (task_id, name, number) do update set value = excluded.value",
        streams.test_a_repeated_portion_is_stored_once,
    ),
    Mutant(
        "items of a task that exists are pruned", "retention/prune_stray_items",
        "not exists (select from {schema}.tasks t where t.id = w.task_id)", "true",
        streams.test_pruning_walks_past_any_number_of_tasks_that_are_kept,
    ),
    Mutant(
        "an unfenced child", "step/send_child", "and t.claim_id = %(claim_id)s", "and %(claim_id)s::uuid is not null",
        steps.TestRecord().test_a_zombie_cannot_record_or_load_steps,
    ),
    Mutant(
        "a child sent after a requested cancel", "step/send_child", "where not h.is_cancelled and not exists (select from known)\n        -- [batch",
        "where not exists (select from known)\n        -- [batch", steps.TestChildren().test_a_task_with_a_requested_cancel_sends_no_further_children,
    ),
    Mutant(
        "a sleep whose end is moved by a repetition", "step/begin_sleep", "do update set recorded_at = s.recorded_at",
        "do update set due_at = excluded.due_at",
        steps.TestSleep().test_the_end_of_a_sleep_is_set_once,
    ),
    Mutant(
        "a failed try that is shown during later sleeps (task)", "inspect/read_task", "and s.due_at = t.wake_at and", "and",
        steps.TestSleep().test_a_failed_try_is_shown_only_during_the_wait_that_follows_it,
    ),
    Mutant(
        "a failed try that is shown during later sleeps (tasks)", "inspect/list_tasks", "and s.due_at = t.wake_at and", "and",
        steps.TestSleep().test_a_failed_try_is_shown_only_during_the_wait_that_follows_it,
    ),
    Mutant(
        "a failed try that is shown during later sleeps (latest_tasks)", "inspect/list_latest_tasks", "and s.due_at = t.wake_at and", "and",
        steps.TestSleep().test_a_failed_try_is_shown_only_during_the_wait_that_follows_it,
    ),
    Mutant(
        "a dead worker that is seen by its supervisor's beat", "inspect/read_waiting_task", "w.started_at), w.ended_at))", "w.started_at)))",
        able.test_waiting_reports_the_end_of_the_last_able_worker_while_its_supervisor_still_beats,
    ),
    Mutant(
        "any worker that counts as able to run the task", "inspect/read_waiting_task",
        "where (w.queues is null or mine.queue = any(w.queues)) and coalesce({schema}.object_of(w.metadata) -> 'tasks' ? mine.name, true)", "",
        able.test_waiting_ignores_workers_of_other_queues_or_tasks,
    ),
    *(
        Mutant(
            f"a supervisor that restarts nothing as one that does: {old}", "inspect/list_restarting_supervisors", old, "",
            able.test_restarting_lists_only_live_supervisors_that_miss_workers_and_have_no_problem,
        )
        for old in ("and not s.draining", "and s.start_problem is null", "(w.queues is null or mine.queue = any(w.queues)) and")
    ),
    Mutant(
        "a suspended task that expires", "task/settle_attempts",
        "good_until = case when h.next_state = 'PENDING' and h.has_begun then null else t.good_until end,", "",
        steps.TestSleep().test_a_suspended_task_is_due_at_the_end_of_its_sleep_and_does_not_expire,
    ),
    Mutant(
        "a stop that expires started tasks", "task/settle_attempts", "a.outcome in ('HANDED_BACK', 'SUSPENDED')", "a.outcome = 'SUSPENDED'",
        life.test_a_task_that_a_stopping_worker_returned_after_its_start_is_not_expired,
    ),
    Mutant(
        "a release that drops good_until of code that never ran", "task/settle_attempts", "a.outcome in ('HANDED_BACK', 'SUSPENDED')",
        "a.outcome in ('HANDED_BACK', 'RELEASED', 'SUSPENDED')",
        life.test_a_task_that_a_stopping_worker_returned_after_its_start_is_not_expired,
    ),
    Mutant(
        "a signal that makes a retry due early", "task/settle_attempts",
        "waits_for = case when h.next_state = 'PENDING' and h.outcome = 'SUSPENDED' and not h.is_postponed then t.waits_for end,", "",
        signals.test_a_signal_does_not_make_a_task_due_that_waits_for_its_retry,
    ),
    Mutant(
        "a suspension that ignores a stored signal", "task/settle_attempts", "coalesce(t.wake_at, statement_timestamp())",
        "coalesce((select old.wake_at from {schema}.tasks old where old.id = t.id), statement_timestamp())",
        signals.test_a_suspension_that_begins_while_a_signal_is_stored_receives_it,
    ),
    Mutant(
        "a second wait that clears the mark of a signal", "step/wait_for_signal", "when w.is_known and t.waits_for", "when false and t.waits_for",
        signals.test_a_second_wait_that_begins_while_a_signal_is_stored_receives_it,
    ),
    Mutant(
        "a wait that does not lock out a signal of its workflow", "step/wait_for_signal", "    for share\n", "",
        signals.test_a_wait_that_begins_while_a_signal_is_stored_receives_it,
    ),
    Mutant(
        "a signal that does not lock out the wait of its target", "schema/0017_history/20_send_signal",
        "where t.id = target_id for no key update", "where t.id = target_id",
        signals.test_a_wait_that_begins_while_a_signal_is_stored_receives_it,
    ),
    Mutant(
        "a signal that wakes only suspended tasks", "schema/0017_history/20_send_signal",
        "and t.waits_for = event and t.state in ('PENDING', 'CLAIMED', 'RUNNING')", "and t.waits_for = event and t.state = 'PENDING'",
        signals.test_a_suspension_that_begins_while_a_signal_is_stored_receives_it,
    ),
    Mutant(
        "a signal that is received twice", "step/wait_for_signal", "and taken.signal_id = s.id", "and taken.signal_id is null and s.id is not null",
        signals.test_a_signal_that_arrived_before_its_wait_is_received_at_once_and_once,
    ),
    Mutant(
        "a lock of any incarnation of the server", "worker/watch_sessions", "s.session_held and s.session_server = h.incarnation", "s.session_held",
        recovery.test_a_session_lock_proves_nothing_on_another_incarnation_of_the_server,
    ),
    Mutant(
        "a lock of any role", "worker/watch_sessions", "l.role::oid = coalesce(s.session_role, l.role::oid)", "true",
        recovery.test_sessions_and_locks_of_another_role_do_not_count_for_a_tree,
    ),
    Mutant(
        "sessions of any role", "worker/watch_sessions", "c.role = coalesce(s.session_role, c.role)", "true",
        recovery.test_sessions_and_locks_of_another_role_do_not_count_for_a_tree,
    ),
    Mutant(
        "a lock of any incarnation of the server", "worker/list_predecessors", "s.session_held and s.session_server = h.incarnation",
        "s.session_held",
        recovery.test_a_session_lock_proves_nothing_on_another_incarnation_of_the_server,
    ),
    Mutant(
        "a lock of any role", "worker/list_predecessors", "l.role = coalesce(s.session_role, l.role)", "true",
        recovery.test_sessions_and_locks_of_another_role_do_not_count_for_a_tree,
    ),
    Mutant(
        "sessions of any role", "worker/list_predecessors", "c.role = coalesce(s.session_role, c.role)", "true",
        recovery.test_sessions_and_locks_of_another_role_do_not_count_for_a_tree,
    ),
    Mutant(
        "a lock taken again without its server", "worker/lock_session", "session_server = {schema}.server_incarnation()",
        "session_server = coalesce(s.session_server, {schema}.server_incarnation())",
        recovery.test_a_session_lock_proves_nothing_on_another_incarnation_of_the_server,
    ),
    Mutant(
        "sessions of a tree that came back are ended", "worker/list_remaining_sessions", "bool_and(", "bool_or(",
        sessions.test_only_sessions_of_dead_trees_are_ended,
    ),
    Mutant(
        "sessions of a tree that left are ended", "worker/list_remaining_sessions", "and s.ended_how <> 'left'", "",
        sessions.test_only_sessions_of_dead_trees_are_ended,
    ),
    Mutant(
        "sessions of another tree are ended", "worker/list_remaining_sessions", "t.name = split_part(a.application_name, ' ', 1)",
        "starts_with(a.application_name, t.name)",
        sessions.test_only_sessions_of_dead_trees_are_ended,
    ),
    Mutant(
        "a session that executes a statement is ended", "worker/list_remaining_sessions", "m.wait_event_type = 'Client' or", "true or",
        sessions.test_a_session_of_a_dead_tree_that_executes_a_statement_is_not_ended,
    ),
    Mutant(
        "an idle session counts as one with an unread reply", "worker/list_remaining_sessions", "(m.wait_event = 'ClientWrite'",
        "(m.wait_event_type = 'Client'", sessions.test_a_session_is_ended_only_while_the_reply_that_was_seen_is_unread,
    ),
    Mutant(
        "a session in a transaction counts as one with a partial request", "worker/list_remaining_sessions",
        "a.state = 'active' and a.wait_event", "a.wait_event",
        sessions.test_a_session_is_ended_while_it_has_a_part_of_the_request_that_was_seen,
    ),
    Mutant(
        "a session that has its whole request by now is ended", "worker/end_sessions",
        "(a.state = 'active' and a.wait_event = 'ClientRead')", "a.wait_event = 'ClientRead'",
        sessions.test_a_session_is_ended_while_it_has_a_part_of_the_request_that_was_seen,
    ),
    Mutant(
        "a session that executes another statement by now is ended", "worker/end_sessions",
        "greatest(a.backend_start, a.xact_start, a.query_start) = found.since", "true",
        sessions.test_a_session_is_ended_only_while_the_reply_that_was_seen_is_unread,
    ),
    Mutant(
        "a session that has read its reply by now is ended", "worker/end_sessions", "else a.wait_event = 'ClientWrite' or", "else true or",
        sessions.test_a_session_that_read_its_reply_after_the_check_is_not_ended,
    ),
    Mutant(
        "a tree ends its own sessions", "worker/list_remaining_sessions",
        "and t.name <> split_part(current_setting('application_name'), ' ', 1)",
        "and a.pid <> pg_backend_pid()", sessions.test_a_tree_that_was_declared_dead_does_not_end_its_own_sessions,
    ),
    Mutant(
        "a session leaves more and more backends behind", "worker/check_earlier_sessions", "count(*) > 1", "false",
        sessions.test_a_session_waits_while_it_has_two_busy_backends_and_ends_idle_ones,
    ),
    Mutant(
        "a repeated recovery returns nothing", "task/recover_leases", "b.call = %(call)s", "false",
        recovery.test_a_repeated_recovery_returns_its_first_result_and_another_call_returns_nothing,
    ),
    Mutant(
        "a recovery of another call is returned as its own", "task/recover_leases", " and b.call = %(call)s", "",
        recovery.test_a_repeated_recovery_returns_its_first_result_and_another_call_returns_nothing,
    ),
    Mutant(
        "a session of any role counts as everbeat's", "inspect/count_connections", " and a.usesysid in (select own.role from own)", "",
        sessions.test_sessions_of_other_roles_with_a_name_of_everbeat_are_not_counted,
    ),
    Mutant(
        "a session of another role is ended", "worker/list_remaining_sessions", "and a.usesysid = coalesce(t.role, a.usesysid)", "",
        sessions.test_a_session_of_another_role_with_the_name_of_a_dead_tree_is_not_ended,
    ),
    Mutant(
        "lost trees: a lock of any incarnation of the server counts", LOST_TREES, "s.session_held and s.session_server = h.incarnation",
        "s.session_held",
        lost_trees.test_a_tree_is_lost_without_its_lock_and_without_a_session_of_its_role_on_this_server,
    ),
    Mutant(
        "lost trees: the session lock is ignored", LOST_TREES, "k.by_key -> s.lock_key::text", "null::jsonb",
        lost_trees.test_a_tree_is_lost_without_its_lock_and_without_a_session_of_its_role_on_this_server,
    ),
    Mutant(
        "lost trees: the sessions of a tree are ignored", LOST_TREES, "t.by_name -> s.session_name", "null::jsonb",
        lost_trees.test_a_tree_is_lost_without_its_lock_and_without_a_session_of_its_role_on_this_server,
    ),
    Mutant(
        "lost trees: a lock of any role revives a tree", LOST_TREES, "l.role::oid = coalesce(s.session_role, l.role::oid)", "true",
        lost_trees.test_sessions_of_another_role_do_not_revive_a_lost_tree_and_need_no_rights_to_see_it,
    ),
    Mutant(
        "lost trees: a session of any role revives a tree", LOST_TREES, "c.role::oid = coalesce(s.session_role, c.role::oid)", "true",
        lost_trees.test_sessions_of_another_role_do_not_revive_a_lost_tree_and_need_no_rights_to_see_it,
    ),
    *(
        Mutant(
            f"{look} counts a lost tree as live", f"inspect/{look}", "trees_without_session() x", "trees_without_session() x where false",
            lost_trees.test_no_reading_statement_counts_a_lost_tree_as_live,
        )
        for look in ("count_live_processes", "read_waiting_task", "read_lease_holder",
            "count_silent_trees", "list_unswept_leases", "list_unserved_tasks",
            "list_registered_parameters", "list_workers", "list_supervisors")
    ),
    Mutant(
        "explain counts workers that cannot run the task as fitting", "inspect/read_waiting_task",
        "l.id <> all(%(unfit)s::text[]) as fits", "%(unfit)s::text[] is not null as fits",
        needs.test_waiting_excludes_workers_that_cannot_run_the_task_from_slots_lag_and_quiet,
    ),
    Mutant(
        "explain counts the slots of workers that cannot run the task", "inspect/read_waiting_task", "and crew.fits and", "and",
        needs.test_waiting_excludes_workers_that_cannot_run_the_task_from_slots_lag_and_quiet,
    ),
    *(
        Mutant(
            f"{reader} believe a forged mark", statement, f"and {{schema}}.mark_of(few.name, few.needs) = {of}.needs_id",
            f"and {{schema}}.mark_of(few.name, few.needs) <> {of}.needs_id",  # of two rows, the forged one
            lambda db, line=line: forged.test_workers_and_the_doctor_read_the_needs_of_a_group_from_a_genuine_row(  # type: ignore[misc]
                db, forged.FORGED["other names"], line
            ),
        )
        for reader, statement, of, line in (
            ("workers", "task/list_marked_tasks", "m", None), ("workers of serial lines", "task/list_marked_tasks", "l", "key:a"),
            ("doctor", "inspect/count_marked_tasks", "g", None),
        )
    ),
    Mutant(
        "the doctor omits marked tasks of serial lines", "inspect/count_marked_tasks", "t.serial is not null and", "false and",
        needs.test_marked_counts_waiting_marked_tasks_by_their_needs_and_queue,
    ),
    Mutant(
        "the doctor counts marked tasks that do not wait", "inspect/count_marked_tasks", "t.state = 'PENDING' and t.serial is null",
        "t.serial is null",
        needs.test_marked_counts_waiting_marked_tasks_by_their_needs_and_queue,
    ),
    *(
        Mutant(
            f"{look} judges a tree by the asker's threshold alone", look, f"greatest(%(stale_ms)s, {column})", "%(stale_ms)s",
            stale_trees.test_every_reading_statement_judges_a_tree_by_the_longer_of_both_thresholds,
        )
        for look, column in (
            *(
                (f"inspect/{name}", "s.claimed_stale_ms")
                for name in ("count_live_processes", "read_waiting_task", "read_lease_holder",
            "list_unserved_tasks", "list_workers", "list_supervisors",
            "list_known_names", "read_workflow_movement", "list_failing_starts",
            "list_registered_parameters")
            ),
            ("inspect/count_silent_trees", "t.claimed_stale_ms"),
            ("message/read_tasks", "s.running_stale_ms"),
        )
    ),
    Mutant(
        "a tree with a long beat interval counts as silent", "inspect/count_silent_trees", "greatest(%(silent_ms)s, 2 * s.beat_ms)", "%(silent_ms)s",
        stale_trees.test_every_reading_statement_judges_a_tree_by_the_longer_of_both_thresholds,
    ),
    Mutant(
        "a lease of a tree with a long beat interval counts as overdue", "inspect/list_unswept_leases",
        "greatest(%(running_ms)s::bigint, l.running_stale_ms)",
        "%(running_ms)s::bigint", stale_trees.test_every_reading_statement_judges_a_tree_by_the_longer_of_both_thresholds,
    ),
    Mutant(
        "a sweep ends a tree with a long beat interval", "worker/list_silent_supervisors",
        "greatest(%(silent_ms)s, s.claimed_stale_ms, s.running_stale_ms)", "%(silent_ms)s",
        stale_trees.test_every_reading_statement_judges_a_tree_by_the_longer_of_both_thresholds,
    ),
    Mutant(
        "a tree does not write its thresholds", "worker/register_supervisor", "%(claimed_stale_ms)s, %(running_stale_ms)s",
        "null::integer, null::integer", stale_trees.test_every_reading_statement_judges_a_tree_by_the_longer_of_both_thresholds,
    ),
    Mutant(
        "a message that was never published counts as stored in the stream", "message/count_expected_messages", " and o.place > 0", "",
        lambda db: told.test_messages_lying_counts_unfinished_messages_by_queue(told.in_use(db)),
    ),
    Mutant(
        "the message of a running task counts as left behind", "message/count_expected_messages", "t.state in ('CLAIMED', 'RUNNING')",
        "t.state in ('CLAIMED')",
        lambda db: told.test_messages_lying_counts_unfinished_messages_by_queue(told.in_use(db)),
    ),
    *(
        Mutant(
            f"a queue counts as served by NATS: {what}", "message/find_unserved_queues", before, after,
            lambda db: told.test_queues_unserved_lists_queues_without_a_live_worker_connected_to_nats(told.in_use(db)),
        )
        for what, before, after in [
            ("an ended worker serves it", "w.ended_at is null and", ""),
            ("a worker of other queues serves it", "or q.name = any(w.queues)", "or true"),
            ("a worker without NATS serves it", "s.messages is not null and", ""),
            ("a worker that NATS does not reach serves it", " and s.messages ->> 'up' is distinct from 'false'", ""),
            ("a worker that has just started does not serve it", "s.is_known is null or", ""),
        ]
    ),
    Mutant(
        "a completed task sends its failure handler", HANDLERS + "32_tasks_failure_handled", "new.state in ('FAILED', 'EXPIRED') and ",
        "new.state in ('FAILED', 'EXPIRED', 'COMPLETED') and ", handlers.test_only_final_failures_send_a_handler,
    ),
    Mutant(
        "a cancelled task sends its failure handler", HANDLERS + "32_tasks_failure_handled", "new.state in ('FAILED', 'EXPIRED') and ",
        "new.state in ('FAILED', 'EXPIRED', 'CANCELLED') and ", handlers.test_only_final_failures_send_a_handler,
    ),
    Mutant(
        "an attempt that is retried sends a failure handler", HANDLERS + "32_tasks_failure_handled",
        "new.state in ('FAILED', 'EXPIRED') and ", "new.error is not null and ", handlers.test_only_final_failures_send_a_handler,
    ),
    Mutant(
        "an expired task sends no failure handler", HANDLERS + "32_tasks_failure_handled", "in ('FAILED', 'EXPIRED')", "in ('FAILED')",
        handlers.test_each_task_of_an_expired_batch_sends_its_handler,
    ),
    Mutant(
        "a failure that is written again sends a second handler", HANDLERS + "32_tasks_failure_handled",
        "old.state is distinct from new.state and ", "", handlers.test_a_failure_that_is_written_again_sends_no_second_handler,
    ),
    Mutant(
        "all failures of a task send the same handler", HANDLERS + "30_handler_id", "int8send(p_fence)",
        "int8send(p_fence * 0)", handlers.test_the_failures_of_one_millisecond_have_handlers_with_different_ids,
    ),
    Mutant(
        "a broken handler prevents a failure", SEND_HANDLER, "when data_exception or", "when",
        lambda db: handlers.test_a_broken_handler_prevents_no_failure_and_is_reported(db, {"priority": "high"}),
    ),
    Mutant(
        "a handler is left out because of a deadlock", SEND_HANDLER, "when data_exception or",
        "when transaction_rollback or data_exception or", handlers.test_an_error_that_a_repetition_can_avoid_aborts_the_failure,
    ),
    Mutant(
        "large arguments are copied to the handler", SEND_HANDLER, "<= 100000 then", "> 0 then",
        handlers.test_large_arguments_are_left_out,
    ),
    Mutant(
        "the data of a large error is copied to the handler", SEND_HANDLER, "octet_length(new.error::text) <= 100000",
        "octet_length(new.error::text) > 0", handlers.test_the_data_of_a_large_error_is_left_out,
    ),
    Mutant(
        "a handler in a serial line has no place in it", SEND_HANDLER,
        "(v_handler ->> 'flags')::json, v_handler ->> 'serial'",
        "(v_handler ->> 'flags')::json, null", handlers.test_a_handler_waits_in_its_serial_line_and_for_its_limits,
    ),
    Mutant(
        "no worker is notified of a handler", SEND_HANDLER, "found and", "false and",
        handlers.test_the_workers_are_notified_of_a_handler,
    ),
    Mutant(
        "a stalled task is reported as a worker that stopped responding", "message/list_due_messages", "in ('session', 'age')",
        "in ('session', 'age', 'progress')",
        lambda db: told.test_the_reason_of_a_recovery_message_states_its_cause(told.in_use(db)),
    ),
]  # fmt: skip


@pytest.fixture
def scenario(
    database_url: str, migrated_schemas: MigratedSchemas, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Mutant | None], StoreHarness]]:
    """Return a factory of empty schemas that contain a mutant, or the unchanged protocol."""
    made: list[StoreHarness] = []
    original = statement.source.__wrapped__

    def make(mutant: Mutant | None) -> StoreHarness:
        def source(name: str) -> str:
            text: str = original(name)
            return text if mutant is None or mutant.name != name else text.replace(mutant.old, mutant.new)

        if mutant is not None:
            # Not in `source`, whose errors would count as a failure of the test of the promise.
            assert mutant.old in original(mutant.name), (
                f"{mutant.name} no longer holds what the mutant takes out: {mutant.old}"
            )
        monkeypatch.setattr(statement, "source", source)
        statement.compose.cache_clear()
        is_migrated = mutant is None or not mutant.name.startswith("schema/")
        target = Target.parse(database_url, schema=migrated_schemas.take() if is_migrated else new_name())
        connection = target.connect("everbeat test")
        if not is_migrated:
            migrating.migrate(connection, target)
            install_audit(connection, target.schema)
        party = StoreHarness(target, connection)
        party.supervisor("s1", "w1", "w2")
        made.append(party)
        return party

    yield make
    statement.compose.cache_clear()
    for party in made:
        party.database.close()
        party.connection.close()
    for party in made:
        migrated_schemas.give_back(party.target.schema)


def notices(mutant: Mutant, db: StoreHarness) -> bool:
    """Whether the test of the promise fails, or leaves rows that breach an invariant."""
    try:
        mutant.check(db)
    except (Exception, pytest.fail.Exception):  # noqa: BLE001 - any failure counts
        return True
    return breaches(db.connection, db.target.schema) != []


@pytest.mark.long
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.why)
def test_a_mutant_of_an_sql_statement_fails_its_test(
    mutant: Mutant, scenario: Callable[[Mutant | None], StoreHarness]
) -> None:
    assert not notices(mutant, scenario(None)), "the unchanged protocol passes its own test"
    assert notices(mutant, scenario(mutant)), f"no test failed: {mutant.why}"
