"""Run a task process that also has the sample tasks with steps."""

import sys
from pathlib import Path

from everbeat.worker.executors.task_process import run_task_process
from everbeat.worker.process import prepare_process


def main() -> None:
    sock = prepare_process()
    sys.path.insert(0, str(Path(__file__).parents[3]))
    from tests.worker import sample_endings, sample_steps
    from tests.worker.sample_tasks import APP_CODES, DEFINITIONS

    assert sample_steps
    assert sample_endings
    run_task_process(sock, definitions=DEFINITIONS, exception_codes=APP_CODES)


if __name__ == "__main__":
    main()
