"""everbeat: a PostgreSQL task queue for Python that notices dead workers and finishes their work.

What lives here: the public names. What is not here may change without notice.
"""

from everbeat.app import App
from everbeat.client.context import Context, OutsideTask, TaskStopped
from everbeat.client.control import CancelResult, CancelVerdict
from everbeat.client.handle import Handle
from everbeat.client.task import AsyncTask, Call, SyncTask, Task
from everbeat.config import QueueConfig, RecoveryConfig, WorkerConfig
from everbeat.domain.inspection import (
    AttemptInfo,
    HeartbeatInfo,
    Progress,
    QueueInfo,
    RecoveryInfo,
    SupervisorInfo,
    SweepResult,
    SweptTask,
    TaskInfo,
    TaskSummary,
    WorkerInfo,
    WorkerStateInfo,
)
from everbeat.domain.outcome import (
    ARGUMENTS_INVALID,
    RESULT_NOT_AVAILABLE,
    RESULT_UNSERIALISABLE,
    TASK_CANCELLED,
    TASK_EXPIRED,
    TASK_STALLED,
    TASK_TIMEOUT,
    UNHANDLED_EXCEPTION,
    WORKER_CRASHED,
    Completed,
    Failed,
    TaskError,
    TaskFailed,
    TaskResult,
)
from everbeat.domain.retry import RetryPolicy
from everbeat.domain.states import TASK_TERMINAL_STATES, TaskState
from everbeat.errors import (
    AppClosed,
    BlockingCallInLoop,
    ConfigurationError,
    DatabaseError,
    EverbeatError,
    LeaseLost,
    PayloadError,
    RegistrationError,
    SendError,
    TaskNotFound,
    TaskNotRetryable,
    UnknownTask,
    WaitTimeout,
    WorkerError,
)

__version__ = "0.1.0"

__all__ = [
    "ARGUMENTS_INVALID",
    "RESULT_NOT_AVAILABLE",
    "RESULT_UNSERIALISABLE",
    "TASK_CANCELLED",
    "TASK_EXPIRED",
    "TASK_STALLED",
    "TASK_TERMINAL_STATES",
    "TASK_TIMEOUT",
    "UNHANDLED_EXCEPTION",
    "WORKER_CRASHED",
    "App",
    "AppClosed",
    "AsyncTask",
    "AttemptInfo",
    "BlockingCallInLoop",
    "Call",
    "CancelResult",
    "CancelVerdict",
    "Completed",
    "ConfigurationError",
    "Context",
    "DatabaseError",
    "EverbeatError",
    "Failed",
    "Handle",
    "HeartbeatInfo",
    "LeaseLost",
    "OutsideTask",
    "PayloadError",
    "Progress",
    "QueueConfig",
    "QueueInfo",
    "RecoveryConfig",
    "RecoveryInfo",
    "RegistrationError",
    "RetryPolicy",
    "SendError",
    "SupervisorInfo",
    "SweepResult",
    "SweptTask",
    "SyncTask",
    "Task",
    "TaskError",
    "TaskFailed",
    "TaskInfo",
    "TaskNotFound",
    "TaskNotRetryable",
    "TaskResult",
    "TaskState",
    "TaskStopped",
    "TaskSummary",
    "UnknownTask",
    "WaitTimeout",
    "WorkerConfig",
    "WorkerError",
    "WorkerInfo",
    "WorkerStateInfo",
]
