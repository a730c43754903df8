"""The program of a worker process: `python -m everbeat.cli.worker_process LOCATOR OVERRIDES`, started by a supervisor."""

from __future__ import annotations

import logging
import os
import sys
from typing import Final, NoReturn

import msgspec

from everbeat.assembly.tree import run_worker_process
from everbeat.cli.locate import locate
from everbeat.errors import EverbeatError
from everbeat.worker.farewell import leave
from everbeat.worker.worker_process import prepare_process, refuse_to_start

EXIT_REFUSED: Final = 1
LOG_LEVEL_VARIABLE: Final = "EVERBEAT_LOG_LEVEL"
LOG_FORMAT: Final = "%(asctime)s %(process)d %(levelname)-7s %(name)s: %(message)s"


def main() -> NoReturn:
    """Imports the app and works; says why where that is impossible."""
    sock = prepare_process()
    locator, overrides = sys.argv[1], msgspec.json.decode(sys.argv[2])
    try:
        app = locate(locator)
        log_to_stderr()
        run_worker_process(sock, app.blueprint(locator=locator, **overrides))
    except EverbeatError as error:
        refuse_to_start(sock, code=error.code, message=error.message, fix=error.fix)
        leave(EXIT_REFUSED)


def log_to_stderr() -> None:
    """Shows logs, unless the user's module has set up logging itself; EVERBEAT_LOG_LEVEL says from which level on."""
    if not logging.root.handlers:
        level = os.environ.get(LOG_LEVEL_VARIABLE, "INFO").upper()
        known = logging.getLevelNamesMapping().get(level, logging.INFO)
        logging.basicConfig(level=known, format=LOG_FORMAT)


if __name__ == "__main__":
    main()
