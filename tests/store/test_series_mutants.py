"""Mutants of the statements of rates and depths: each guard is left out once, and the test of its promise must fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.store import test_depth_peaks as peaks
from tests.store import test_rate_sums as sums
from tests.store import test_series as counts
from tests.store.conftest import StoreHarness
from tests.store.test_mutants import Mutant, notices, scenario

__all__ = ["scenario"]

WRITE, ROLL_UP, SUM, MINUTES, SAMPLE, PEAKS, EARLY = (
    "series/write_rates",
    "series/roll_up_rates",
    "series/sum_rates",
    "series/sum_minutes",
    "series/sample_depths",
    "series/add_peaks",
    "series/delete_early",
)

MUTANTS = [
    Mutant(
        "a write into a minute that might be added up", WRITE, "- interval '5 minutes'", "- interval '5 hours'",
        counts.test_a_minute_that_began_more_than_five_minutes_ago_is_refused,
    ),
    Mutant(
        "a write into the future", WRITE, "+ interval '1 minute'", "+ interval '1 day'",
        counts.test_a_minute_in_the_future_is_refused,
    ),
    Mutant(
        "a write that adds", WRITE, "started = excluded.started", "started = r.started + excluded.started",
        counts.test_a_write_is_absolute_so_a_repeated_one_changes_nothing,
    ),
    Mutant(
        "an old write that replaces a later one", WRITE, "where excluded.started", "where true or excluded.started",
        counts.test_a_write_that_arrives_after_a_later_one_does_not_replace_it,
    ),
    Mutant(
        "a roll-up that keeps the rows", ROLL_UP, "delete from {schema}.rates r\n", "update {schema}.rates r set started = r.started\n",
        counts.test_a_roll_up_makes_one_row_of_the_supervisors_of_a_minute,
    ),
    Mutant(
        "a roll-up of minutes that are still written", ROLL_UP, "statement_timestamp() - interval '10 minutes'",
        "statement_timestamp() + interval '2 minutes'", counts.test_a_roll_up_makes_one_row_of_the_supervisors_of_a_minute,
    ),
    Mutant(
        "a roll-up that replaces a sum", ROLL_UP, "started = r.started + excluded.started", "started = excluded.started",
        counts.test_a_roll_up_adds_to_a_sum_that_exists,
    ),
    Mutant(
        "a roll-up that loses a histogram", ROLL_UP, "waits = array(select a + b", "waits = array(select b",
        counts.test_a_roll_up_adds_to_a_sum_that_exists,
    ),
    Mutant(
        "a roll-up that replaces a sum while others roll up", ROLL_UP, "started = r.started + excluded.started", "started = excluded.started",
        counts.test_nothing_is_counted_twice_or_lost_while_several_sessions_roll_up,
    ),
    Mutant(
        "a sum of a span that is still written", SUM, "x.at + x.length + x.settled <=", "x.at + x.length <=",
        sums.test_a_span_that_is_still_written_is_not_summed,
    ),
    Mutant(
        "a sum that leaves out a minute in which nothing happened", MINUTES, "where not exists (select from summed",
        "where exists (select from summed", sums.test_a_span_in_which_nothing_happened_has_a_total_of_zero,
    ),
    Mutant(
        "a sum of a minute that is not summed again", MINUTES, "s.at - %(settle_s)s * interval '1 second'",
        "s.at + 0 * %(settle_s)s * interval '1 second'", sums.test_a_minute_that_is_written_after_its_end_is_summed_again,
    ),
    Mutant(
        "an older look at a minute that replaces a later one", MINUTES, "    > s.started + s.completed", "    <> s.started + s.completed",
        sums.test_an_older_look_does_not_replace_a_later_sum,
    ),
    Mutant(
        "a peak of a span that is not over", PEAKS, "%(settle_s)s::integer * interval '1 second' <=",
        "%(settle_s)s::integer * interval '0 second' <=", peaks.test_a_span_that_ended_a_moment_ago_is_not_added,
    ),
    Mutant(
        "a total of queues that were full at different times", PEAKS, "group by s.at\n", "group by ()\n",
        peaks.test_two_queues_that_were_full_at_different_times_do_not_add_up,
    ),
    Mutant(
        "a span without a sample that is left out", PEAKS, "left join (", "join (",
        peaks.test_a_span_without_a_sample_is_not_drawn_and_an_empty_one_is_zero,
    ),
    Mutant(
        "a chart that ignores the samples after the peaks", "series/list_total_depths", "d.at < %(until)s", "d.at < %(since)s",
        peaks.test_samples_that_are_younger_than_the_peaks_are_drawn,
    ),
    Mutant(
        "lines that ignore the samples after the peaks", "series/list_queue_depths", "d.at < %(until)s", "d.at < %(since)s",
        peaks.test_charts_of_peaks_equal_those_of_samples_now_and_in_the_past,
    ),
    Mutant(
        "a chart that counts summed minutes again", "series/list_total_rates", "x.at >= (select max(c.until) from covered c)", "x.at >= %(since)s",
        sums.test_charts_of_sums_equal_those_of_rates_now_and_in_the_past,
    ),
    Mutant(
        "a chart that ignores the rates after the sums", "series/list_total_rates", "x.at < %(until)s", "x.at < %(since)s",
        sums.test_rates_that_other_code_has_not_summed_are_counted,
    ),
    Mutant(
        "sums that stay although the clock was set back", EARLY, "x.at > statement_timestamp() - l.rates_after", "false",
        sums.test_charts_show_counts_after_the_clock_was_set_back,
    ),
    Mutant(
        "sums that are deleted although their span is over", EARLY, "x.at > statement_timestamp() - l.rates_after", "true",
        sums.test_only_sums_of_spans_that_are_not_over_are_early,
    ),
    Mutant(
        "peaks that stay although the clock was set back", EARLY, "x.at > statement_timestamp() - l.peaks_after", "false",
        peaks.test_peaks_are_found_again_after_the_clock_was_set_back,
    ),
    Mutant(
        "samples that stay although the clock was set back", EARLY, "x.at > statement_timestamp() for update", "false for update",
        counts.test_samples_continue_after_the_clock_was_set_back,
    ),
    Mutant(
        "a sample of the future that counts as the first of this minute", SAMPLE, "00:00+00')\n              and d.at <= statement_timestamp()",
        "00:00+00')\n", counts.test_samples_continue_after_the_clock_was_set_back,
    ),
    Mutant(
        "a sample by each supervisor", SAMPLE, "from turn\n), kept", "from (select 1) x\n), kept",
        counts.test_one_supervisor_at_a_time_samples,
    ),
    Mutant(
        "a sample that counts suspended tasks twice", SAMPLE, "greatest(c.later - c.suspended, 0)", "c.later",
        counts.test_a_sample_counts_each_live_task_once,
    ),
    Mutant(
        "a first sample of a minute that is deleted after two hours", "retention/prune_depths", "when 60 then interval '48 hours'",
        "when 60 then interval '2 hours'", counts.test_samples_become_sparser_with_age,
    ),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.why)
def test_a_mutant_of_the_series_fails_its_test(
    mutant: Mutant, scenario: Callable[[Mutant | None], StoreHarness]
) -> None:
    assert not notices(mutant, scenario(None)), "the unchanged statements pass their own test"
    assert notices(mutant, scenario(mutant)), f"no test failed: {mutant.why}"
