"""everbeat: a PostgreSQL task queue for Python that notices dead workers and finishes their work.

What lives here: the public names. What is not here may change without notice.

A name is loaded when it is first asked for: the command line and the supervisor, which need few of them, start fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from everbeat.app import App
    from everbeat.client.context import (
        Context,
        NamedStep,
        OutsideTask,
        OutsideWorker,
        TaskStopped,
        TaskSuspended,
    )
    from everbeat.client.control import CancelResult, CancelVerdict
    from everbeat.client.handle import Handle
    from everbeat.client.task import AsyncTask, Call, SyncTask, Task
    from everbeat.client.workflow import Workflow, WorkflowDefinition
    from everbeat.client.workflow_handle import WorkflowHandle
    from everbeat.client.workflow_node import Node, Nodes, outcomes, results
    from everbeat.config import QueueConfig, RecoveryConfig, WorkerConfig
    from everbeat.domain.commit import Completion
    from everbeat.domain.explanation import Explanation, Reason, ReasonCode, WorkflowExplanation
    from everbeat.domain.hooks import (
        Default,
        FailWithBackoff,
        RecoveryContext,
        Reschedule,
        Skip,
        SweepSummary,
    )
    from everbeat.domain.inspection import (
        AttemptInfo,
        HeartbeatInfo,
        Progress,
        QueueInfo,
        QuietTree,
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
        EVENT_TIMEOUT,
        RESULT_NOT_AVAILABLE,
        RESULT_UNSERIALISABLE,
        TASK_CANCELLED,
        TASK_EXPIRED,
        TASK_STALLED,
        TASK_TIMEOUT,
        UNHANDLED_EXCEPTION,
        WORKER_CRASHED,
        Completed,
        EventTimeout,
        Failed,
        TaskError,
        TaskFailed,
        TaskResult,
    )
    from everbeat.domain.pauses import Pause
    from everbeat.domain.retry import RetryPolicy
    from everbeat.domain.states import TASK_TERMINAL_STATES, TaskState
    from everbeat.domain.workflow_info import (
        NodeInfo,
        NodeState,
        StuckWorkflow,
        WorkflowInfo,
        WorkflowRetry,
        WorkflowState,
    )
    from everbeat.errors import (
        AppClosed,
        BlockingCallInLoop,
        CommitRefused,
        ConfigurationError,
        DatabaseError,
        EverbeatError,
        LeaseLost,
        NatsError,
        NatsNotInstalled,
        NatsRefused,
        NatsUnreachable,
        NotPaused,
        PayloadError,
        RegistrationError,
        SendError,
        SignalRefused,
        TaskNotFound,
        TaskNotRetryable,
        UnknownName,
        UnknownTask,
        WaitTimeout,
        WorkerError,
    )
    from everbeat.wake.options import NatsConfig

__version__ = "0.1.0"

_ROOMS: Final = {
    "everbeat.app": ("App",),
    "everbeat.client.context": (
        "Context",
        "NamedStep",
        "OutsideTask",
        "OutsideWorker",
        "TaskStopped",
        "TaskSuspended",
    ),
    "everbeat.client.control": ("CancelResult", "CancelVerdict"),
    "everbeat.client.handle": ("Handle",),
    "everbeat.client.task": ("AsyncTask", "Call", "SyncTask", "Task"),
    "everbeat.client.workflow": ("Workflow", "WorkflowDefinition"),
    "everbeat.client.workflow_handle": ("WorkflowHandle",),
    "everbeat.client.workflow_node": ("Node", "Nodes", "outcomes", "results"),
    "everbeat.config": ("QueueConfig", "RecoveryConfig", "WorkerConfig"),
    "everbeat.domain.explanation": ("Explanation", "Reason", "ReasonCode", "WorkflowExplanation"),
    "everbeat.domain.hooks": (
        "Default",
        "FailWithBackoff",
        "RecoveryContext",
        "Reschedule",
        "Skip",
        "SweepSummary",
    ),
    "everbeat.domain.commit": ("Completion",),
    "everbeat.domain.inspection": (
        "AttemptInfo",
        "HeartbeatInfo",
        "Progress",
        "QueueInfo",
        "QuietTree",
        "RecoveryInfo",
        "SupervisorInfo",
        "SweepResult",
        "SweptTask",
        "TaskInfo",
        "TaskSummary",
        "WorkerInfo",
        "WorkerStateInfo",
    ),
    "everbeat.domain.outcome": (
        "ARGUMENTS_INVALID",
        "EVENT_TIMEOUT",
        "RESULT_NOT_AVAILABLE",
        "RESULT_UNSERIALISABLE",
        "TASK_CANCELLED",
        "TASK_EXPIRED",
        "TASK_STALLED",
        "TASK_TIMEOUT",
        "UNHANDLED_EXCEPTION",
        "WORKER_CRASHED",
        "Completed",
        "EventTimeout",
        "Failed",
        "TaskError",
        "TaskFailed",
        "TaskResult",
    ),
    "everbeat.domain.pauses": ("Pause",),
    "everbeat.domain.retry": ("RetryPolicy",),
    "everbeat.domain.states": ("TASK_TERMINAL_STATES", "TaskState"),
    "everbeat.domain.workflow_info": (
        "NodeInfo",
        "NodeState",
        "StuckWorkflow",
        "WorkflowInfo",
        "WorkflowRetry",
        "WorkflowState",
    ),
    "everbeat.errors": (
        "AppClosed",
        "BlockingCallInLoop",
        "CommitRefused",
        "ConfigurationError",
        "DatabaseError",
        "EverbeatError",
        "LeaseLost",
        "NatsError",
        "NatsNotInstalled",
        "NatsRefused",
        "NatsUnreachable",
        "NotPaused",
        "PayloadError",
        "RegistrationError",
        "SendError",
        "SignalRefused",
        "TaskNotFound",
        "TaskNotRetryable",
        "UnknownName",
        "UnknownTask",
        "WaitTimeout",
        "WorkerError",
    ),
    "everbeat.wake.options": ("NatsConfig",),
}
_ROOM_OF: Final = {name: room for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> Any:
    room = _ROOM_OF.get(name)
    if room is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(room), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "ARGUMENTS_INVALID",
    "EVENT_TIMEOUT",
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
    "CommitRefused",
    "Completed",
    "Completion",
    "ConfigurationError",
    "Context",
    "DatabaseError",
    "Default",
    "EventTimeout",
    "EverbeatError",
    "Explanation",
    "FailWithBackoff",
    "Failed",
    "Handle",
    "HeartbeatInfo",
    "LeaseLost",
    "NamedStep",
    "NatsConfig",
    "NatsError",
    "NatsNotInstalled",
    "NatsRefused",
    "NatsUnreachable",
    "Node",
    "NodeInfo",
    "NodeState",
    "Nodes",
    "NotPaused",
    "OutsideTask",
    "OutsideWorker",
    "Pause",
    "PayloadError",
    "Progress",
    "QueueConfig",
    "QueueInfo",
    "QuietTree",
    "Reason",
    "ReasonCode",
    "RecoveryConfig",
    "RecoveryContext",
    "RecoveryInfo",
    "RegistrationError",
    "Reschedule",
    "RetryPolicy",
    "SendError",
    "SignalRefused",
    "Skip",
    "StuckWorkflow",
    "SupervisorInfo",
    "SweepResult",
    "SweepSummary",
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
    "TaskSuspended",
    "UnknownName",
    "UnknownTask",
    "WaitTimeout",
    "WorkerConfig",
    "WorkerError",
    "WorkerInfo",
    "WorkerStateInfo",
    "Workflow",
    "WorkflowDefinition",
    "WorkflowExplanation",
    "WorkflowHandle",
    "WorkflowInfo",
    "WorkflowRetry",
    "WorkflowState",
    "outcomes",
    "results",
]
