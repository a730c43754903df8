"""The argument and return types of recovery hooks."""

from everbeat.domain.recovery.hooks import Default as Default
from everbeat.domain.recovery.hooks import FailWithBackoff as FailWithBackoff
from everbeat.domain.recovery.hooks import RecoveryContext as RecoveryContext
from everbeat.domain.recovery.hooks import Reschedule as Reschedule
from everbeat.domain.recovery.hooks import Skip as Skip
from everbeat.domain.recovery.hooks import SweepSummary as SweepSummary
