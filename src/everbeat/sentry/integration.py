"""The integration that connects everbeat with Sentry's SDK, and its settings."""

from __future__ import annotations

from collections.abc import Sequence

import sentry_sdk
from sentry_sdk.integrations import Integration
from sentry_sdk.scope import add_global_event_processor
from sentry_sdk.types import Event, Hint

from everbeat.domain.hiding import hide_rules
from everbeat.domain.settings.checks import switch
from everbeat.runtime.failure_log import FailedAttempt, FailuresFolded
from everbeat.runtime.installed_tracers import install_tracer
from everbeat.sentry.events import ORIGIN, without_own_variables
from everbeat.sentry.tracer import SentryTracer


class EverbeatIntegration(Integration):
    """Reports final failures and deaths to Sentry, and traces sends and attempts. Pass it to `sentry_sdk.init` before you create the app.

    `capture_retries`: report also the failures after which a task runs again.
    `monitor_schedules`: send a check-in for each run of a schedule, to the monitor with the schedule's name.
    `propagate_traces`: store the trace of a send with the task, so that its attempts are in the same trace.
    `hide`: rules such as "charge" or "*:password", as for the dashboard. Events of matching tasks contain no variables and no texts of
    their code.

    Raises ConfigurationError if a setting is invalid.

        sentry_sdk.init(dsn, integrations=[EverbeatIntegration()])
    """

    identifier = "everbeat"
    origin = ORIGIN

    def __init__(
        self,
        *,
        capture_retries: bool = False,
        monitor_schedules: bool = False,
        propagate_traces: bool = True,
        hide: Sequence[str] = (),
    ) -> None:
        self.capture_retries = switch(capture_retries, subject="EverbeatIntegration.capture_retries")
        self.monitor_schedules = switch(monitor_schedules, subject="EverbeatIntegration.monitor_schedules")
        self.propagate_traces = switch(propagate_traces, subject="EverbeatIntegration.propagate_traces")
        self.hide = hide_rules([hide] if isinstance(hide, str) else hide)

    @staticmethod
    def setup_once() -> None:
        """Install the tracer. Sentry's SDK calls this method once in a process."""
        install_tracer(SentryTracer(_active))
        add_global_event_processor(_processed)


def _active() -> EverbeatIntegration | None:
    """Return the integration of the current client, or None if the client has none."""
    return sentry_sdk.get_client().get_integration(EverbeatIntegration)


def _processed(event: Event, hint: Hint) -> Event | None:
    """Process all events of a client with the integration, also those outside of attempts.

    The events that Sentry makes from log records of failed attempts are dropped, because the tracer reports these failures itself.
    """
    if _active() is None:
        return event
    reported = getattr(hint.get("log_record"), "everbeat_event", None)
    if isinstance(reported, FailedAttempt | FailuresFolded):
        return None
    return without_own_variables(event)
