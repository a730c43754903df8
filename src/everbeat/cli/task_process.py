"""The program of a task process: `python -m everbeat.cli.task_process LOCATOR`, started by a worker."""

from __future__ import annotations

import sys
from typing import NoReturn

from everbeat.assembly.processes import run_task_process
from everbeat.cli.locate import locate
from everbeat.cli.logs import log_to_stderr
from everbeat.cli.worker_process import EXIT_REFUSED
from everbeat.errors import EverbeatError
from everbeat.worker.farewell import leave
from everbeat.worker.worker_process import prepare_process, refuse_to_start


def main() -> NoReturn:
    """Imports the app and runs attempts; says why where that is impossible."""
    sock = prepare_process()
    locator = sys.argv[1]
    try:
        app = locate(locator)
        log_to_stderr()
        run_task_process(sock, app.blueprint(locator=locator))
    except EverbeatError as error:
        refuse_to_start(sock, code=error.code, message=error.message, fix=error.fix)
        leave(EXIT_REFUSED)


if __name__ == "__main__":
    main()
