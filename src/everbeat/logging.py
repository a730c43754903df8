"""The names for programs that configure logging themselves: the task, attempt and worker of a log record."""

from everbeat.runtime.task_links import task_url as task_url
from everbeat.runtime.task_logging import TaskFilter as TaskFilter
from everbeat.runtime.task_logging import task_fields as task_fields
