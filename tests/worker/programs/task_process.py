"""A task process with the deeds of the tests; `--refuse` makes one that cannot start."""

import sys
from pathlib import Path

from everbeat.worker.task_process import run_task_process
from everbeat.worker.worker_process import prepare_process, refuse_to_start


def main() -> None:
    sock = prepare_process()
    if "--refuse" in sys.argv:
        refuse_to_start(sock, code="APP_NOT_FOUND", message="there is no app")
        sys.exit(1)
    sys.path.insert(0, str(Path(__file__).parents[3]))
    from tests.worker.deeds import APP_CODES, DEFINITIONS

    run_task_process(sock, definitions=DEFINITIONS, exception_codes=APP_CODES)


if __name__ == "__main__":
    main()
