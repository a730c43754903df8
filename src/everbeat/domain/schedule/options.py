"""The checks of a schedule's options."""

from __future__ import annotations

from collections.abc import Mapping

from everbeat.domain.schedule.model import Rule


def rule_of(given: Mapping[str, object], subject: str) -> Rule:
    """Return the rule that the options of a schedule describe. None means that an option was not given.

    The options are `cron`, `every`, `offset`, `at`, `timezone`, `missed`, `most`, `catchup_window`, `overlap`, `jitter`, `starts`, `ends`,
    `most_runs`, `pause_after_failures` and `expires`. Raises ConfigurationError, which lists all problems.
    """
    raise NotImplementedError
