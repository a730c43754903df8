"""Run a task process that also has the sample partial tasks."""

import sys
from pathlib import Path

from everbeat.worker.executors.task_process import run_task_process
from everbeat.worker.process import prepare_process


def main() -> None:
    sock = prepare_process()
    sys.path.insert(0, str(Path(__file__).parents[3]))
    from tests.worker import sample_partial_tasks as sample_partial_tasks
    from tests.worker.sample_tasks import APP_CODES, DEFINITIONS

    assert sample_partial_tasks
    run_task_process(sock, definitions=DEFINITIONS, exception_codes=APP_CODES)


if __name__ == "__main__":
    main()
