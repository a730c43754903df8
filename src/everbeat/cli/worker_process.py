"""The program that a supervisor starts as a worker process: `python -m everbeat.cli.program worker_process LOCATOR OVERRIDES [again]`.

`again` means that an earlier worker of this supervisor has already been ready.
"""

from __future__ import annotations

import sys
from typing import NoReturn

import msgspec

from everbeat.app import definition_of
from everbeat.assembly.workers import run_worker_process
from everbeat.cli.locate import locate
from everbeat.cli.logs import log_to_stderr
from everbeat.errors import EverbeatError
from everbeat.runtime.main_loop import leave
from everbeat.worker.process import EXIT_REFUSED, prepare_process, refuse_to_start


def main() -> NoReturn:
    """Import the app and run a worker. If this is impossible, report the reason to the supervisor."""
    sock = prepare_process()
    locator, overrides = sys.argv[1], msgspec.json.decode(sys.argv[2])
    try:
        app = locate(locator)
        log_to_stderr()
        run_worker_process(
            sock, definition_of(app, locator=locator, **overrides), is_replacement="again" in sys.argv[3:]
        )
    except EverbeatError as error:
        refuse_to_start(sock, code=error.code, message=error.message, fix=error.fix)
        leave(EXIT_REFUSED)
