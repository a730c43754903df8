"""A task process with the deeds of steps as well."""

import sys
from pathlib import Path

from everbeat.worker.task_process import run_task_process
from everbeat.worker.worker_process import prepare_process


def main() -> None:
    sock = prepare_process()
    sys.path.insert(0, str(Path(__file__).parents[3]))
    from tests.worker import step_deeds
    from tests.worker.deeds import APP_CODES, DEFINITIONS

    assert step_deeds
    run_task_process(sock, definitions=DEFINITIONS, exception_codes=APP_CODES)


if __name__ == "__main__":
    main()
