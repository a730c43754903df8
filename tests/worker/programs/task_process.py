"""Run a task process with the sample tasks; `--refuse` makes it unable to start, `--slow-processes` delays its start."""

import sys
import time
from pathlib import Path

from everbeat.worker.executors.task_process import run_task_process
from everbeat.worker.process import prepare_process, refuse_to_start


def main() -> None:
    sock = prepare_process()
    if "--refuse" in sys.argv:
        refuse_to_start(sock, code="APP_NOT_FOUND", message="there is no app")
        sys.exit(1)
    if "--slow-processes" in sys.argv:
        time.sleep(60)  # stands for an app that is slow to import
    sys.path.insert(0, str(Path(__file__).parents[3]))
    from tests.worker import sample_logs
    from tests.worker.sample_tasks import APP_CODES, DEFINITIONS

    assert sample_logs.AGAIN

    run_task_process(sock, definitions=DEFINITIONS, exception_codes=APP_CODES)


if __name__ == "__main__":
    main()
