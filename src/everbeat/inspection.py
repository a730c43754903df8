"""Result types and filters of the `App` methods that inspect, explain, cancel, pause and recover tasks."""

from everbeat.domain.explain.reasons import Explanation as Explanation
from everbeat.domain.explain.reasons import Reason as Reason
from everbeat.domain.explain.reasons import ReasonCode as ReasonCode
from everbeat.domain.explain.reasons import WorkflowExplanation as WorkflowExplanation
from everbeat.domain.inspection import AttemptInfo as AttemptInfo
from everbeat.domain.inspection import CancelResult as CancelResult
from everbeat.domain.inspection import CancelVerdict as CancelVerdict
from everbeat.domain.inspection import HeartbeatInfo as HeartbeatInfo
from everbeat.domain.inspection import Pause as Pause
from everbeat.domain.inspection import Progress as Progress
from everbeat.domain.inspection import QueueInfo as QueueInfo
from everbeat.domain.inspection import QuietTree as QuietTree
from everbeat.domain.inspection import RecoveryFilters as RecoveryFilters
from everbeat.domain.inspection import RecoveryInfo as RecoveryInfo
from everbeat.domain.inspection import SupervisorInfo as SupervisorInfo
from everbeat.domain.inspection import SweepResult as SweepResult
from everbeat.domain.inspection import SweptTask as SweptTask
from everbeat.domain.inspection import TaskFilters as TaskFilters
from everbeat.domain.inspection import TaskInfo as TaskInfo
from everbeat.domain.inspection import TaskSummary as TaskSummary
from everbeat.domain.inspection import WorkerInfo as WorkerInfo
from everbeat.domain.inspection import WorkerStateInfo as WorkerStateInfo
from everbeat.domain.task.states import TASK_TERMINAL_STATES as TASK_TERMINAL_STATES
