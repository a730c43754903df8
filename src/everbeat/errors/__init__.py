"""The exceptions that everbeat raises, and the error codes that it stores with tasks.

Each everbeat error has a `code` for programs, a `message` for people, and usually a `fix`. This package imports no other part of
everbeat.
"""

from everbeat.errors.exchange import AlreadyAnswered as AlreadyAnswered
from everbeat.errors.exchange import NoQuestion as NoQuestion
from everbeat.errors.exchange import StreamFull as StreamFull
from everbeat.errors.resources import ResourceFailed as ResourceFailed
from everbeat.errors.resources import ResourceNotOpen as ResourceNotOpen
from everbeat.errors.tasks import ARGUMENTS_INVALID as ARGUMENTS_INVALID
from everbeat.errors.tasks import EVENT_TIMEOUT as EVENT_TIMEOUT
from everbeat.errors.tasks import MIDDLEWARE_FAILED as MIDDLEWARE_FAILED
from everbeat.errors.tasks import NON_DETERMINISTIC as NON_DETERMINISTIC
from everbeat.errors.tasks import RATE_LIMITED as RATE_LIMITED
from everbeat.errors.tasks import RESULT_NOT_AVAILABLE as RESULT_NOT_AVAILABLE
from everbeat.errors.tasks import RESULT_UNSERIALISABLE as RESULT_UNSERIALISABLE
from everbeat.errors.tasks import RETRY_LATER as RETRY_LATER
from everbeat.errors.tasks import RETRY_LATER_EXHAUSTED as RETRY_LATER_EXHAUSTED
from everbeat.errors.tasks import TASK_CANCELLED as TASK_CANCELLED
from everbeat.errors.tasks import TASK_EXPIRED as TASK_EXPIRED
from everbeat.errors.tasks import TASK_STALLED as TASK_STALLED
from everbeat.errors.tasks import TASK_TIMEOUT as TASK_TIMEOUT
from everbeat.errors.tasks import UNHANDLED_EXCEPTION as UNHANDLED_EXCEPTION
from everbeat.errors.tasks import UNKNOWN_LIMIT as UNKNOWN_LIMIT
from everbeat.errors.tasks import WORKER_CRASHED as WORKER_CRASHED
from everbeat.errors.tasks import WORKER_STOPPED as WORKER_STOPPED
from everbeat.errors.tasks import ActionRefused as ActionRefused
from everbeat.errors.tasks import BatchNotFound as BatchNotFound
from everbeat.errors.tasks import BatchSealed as BatchSealed
from everbeat.errors.tasks import BulkActionNotFound as BulkActionNotFound
from everbeat.errors.tasks import CommitRefused as CommitRefused
from everbeat.errors.tasks import EventTimeout as EventTimeout
from everbeat.errors.tasks import NonDeterministic as NonDeterministic
from everbeat.errors.tasks import OutsideTask as OutsideTask
from everbeat.errors.tasks import OutsideWorker as OutsideWorker
from everbeat.errors.tasks import RecoveryNotFound as RecoveryNotFound
from everbeat.errors.tasks import ResultNotStored as ResultNotStored
from everbeat.errors.tasks import SignalRefused as SignalRefused
from everbeat.errors.tasks import StopReason as StopReason
from everbeat.errors.tasks import TaskError as TaskError
from everbeat.errors.tasks import TaskFailed as TaskFailed
from everbeat.errors.tasks import TaskNotFound as TaskNotFound
from everbeat.errors.tasks import TaskNotRetryable as TaskNotRetryable
from everbeat.errors.tasks import TaskStopped as TaskStopped
from everbeat.errors.tasks import TaskSuspended as TaskSuspended
from everbeat.errors.tasks import UnknownTask as UnknownTask
from everbeat.errors.tasks import WaitTimeout as WaitTimeout
from everbeat.errors.tracing import OpenTelemetryNotInstalled as OpenTelemetryNotInstalled
from everbeat.errors.tracing import SentryNotInstalled as SentryNotInstalled
from everbeat.errors.tree import AmbiguousId as AmbiguousId
from everbeat.errors.tree import AppClosed as AppClosed
from everbeat.errors.tree import AppNotFound as AppNotFound
from everbeat.errors.tree import BlockingCallInLoop as BlockingCallInLoop
from everbeat.errors.tree import ConfigurationError as ConfigurationError
from everbeat.errors.tree import DatabaseError as DatabaseError
from everbeat.errors.tree import DatabaseReadOnly as DatabaseReadOnly
from everbeat.errors.tree import DatabaseTooOld as DatabaseTooOld
from everbeat.errors.tree import DatabaseUnreachable as DatabaseUnreachable
from everbeat.errors.tree import DuplicateTask as DuplicateTask
from everbeat.errors.tree import EmbeddedUnavailable as EmbeddedUnavailable
from everbeat.errors.tree import EverbeatError as EverbeatError
from everbeat.errors.tree import ImportFailed as ImportFailed
from everbeat.errors.tree import LimitFull as LimitFull
from everbeat.errors.tree import MigrationStopped as MigrationStopped
from everbeat.errors.tree import NatsError as NatsError
from everbeat.errors.tree import NatsNotInstalled as NatsNotInstalled
from everbeat.errors.tree import NatsRefused as NatsRefused
from everbeat.errors.tree import NatsUnreachable as NatsUnreachable
from everbeat.errors.tree import NotPaused as NotPaused
from everbeat.errors.tree import PayloadError as PayloadError
from everbeat.errors.tree import Problem as Problem
from everbeat.errors.tree import QueueFull as QueueFull
from everbeat.errors.tree import RegistrationError as RegistrationError
from everbeat.errors.tree import ScheduleNotChanged as ScheduleNotChanged
from everbeat.errors.tree import SchemaForbidden as SchemaForbidden
from everbeat.errors.tree import SchemaFromTheFuture as SchemaFromTheFuture
from everbeat.errors.tree import SchemaGone as SchemaGone
from everbeat.errors.tree import SchemaMissing as SchemaMissing
from everbeat.errors.tree import SchemaOutdated as SchemaOutdated
from everbeat.errors.tree import SendError as SendError
from everbeat.errors.tree import UnknownName as UnknownName
from everbeat.errors.tree import WorkerEnded as WorkerEnded
from everbeat.errors.tree import WorkerError as WorkerError
from everbeat.errors.tree import WorkerRefused as WorkerRefused
from everbeat.errors.tree import WrongDatabaseURL as WrongDatabaseURL
from everbeat.errors.web import AddressInUse as AddressInUse
from everbeat.errors.web import WebNotInstalled as WebNotInstalled
from everbeat.errors.workflows import NodeNotEnded as NodeNotEnded
from everbeat.errors.workflows import NoSuchPart as NoSuchPart
from everbeat.errors.workflows import PlaceholderUsed as PlaceholderUsed
from everbeat.errors.workflows import WorkflowNotFound as WorkflowNotFound
from everbeat.errors.workflows import WorkflowNotRetryable as WorkflowNotRetryable

# Errors are stored and matched by their qualified names, so each name must be the one that users import.
for _each in list(globals().values()):
    if isinstance(_each, type) and issubclass(_each, BaseException) and _each.__module__.startswith(__name__):
        _each.__module__ = __name__
del _each
