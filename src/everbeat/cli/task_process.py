"""The program that a worker starts as a task process: `python -m everbeat.cli.program task_process LOCATOR [MODULE...]`.

Each `MODULE` registers tasks of the app, but the app's own module does not import it.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from everbeat.app import definition_of
from everbeat.assembly.workers import run_task_process
from everbeat.cli.locate import load, locate
from everbeat.cli.logs import log_to_stderr
from everbeat.errors import EverbeatError
from everbeat.runtime.main_loop import leave
from everbeat.worker.process import EXIT_REFUSED, prepare_process, refuse_to_start


def main() -> NoReturn:
    """Import the app and run attempts. If this is impossible, report the reason to the worker."""
    sock = prepare_process()
    locator = sys.argv[1]
    try:
        app = locate(locator)
        for module in sys.argv[2:]:
            load(module)
        log_to_stderr()
        run_task_process(sock, definition_of(app, locator=locator))
    except EverbeatError as error:
        refuse_to_start(sock, code=error.code, message=error.message, fix=error.fix)
        leave(EXIT_REFUSED)
