"""The program of a worker process: `python -m everbeat.cli.worker_process LOCATOR OVERRIDES [again]`, started by a supervisor.

`again`: a worker of this supervisor was ready before.
"""

from __future__ import annotations

import sys
from typing import Final, NoReturn

import msgspec

from everbeat.assembly.processes import run_worker_process
from everbeat.cli.locate import locate
from everbeat.cli.logs import log_to_stderr
from everbeat.errors import EverbeatError
from everbeat.worker.farewell import leave
from everbeat.worker.worker_process import prepare_process, refuse_to_start

EXIT_REFUSED: Final = 1


def main() -> NoReturn:
    """Imports the app and works; says why where that is impossible."""
    sock = prepare_process()
    locator, overrides = sys.argv[1], msgspec.json.decode(sys.argv[2])
    try:
        app = locate(locator)
        log_to_stderr()
        run_worker_process(sock, app.blueprint(locator=locator, **overrides), again="again" in sys.argv[3:])
    except EverbeatError as error:
        refuse_to_start(sock, code=error.code, message=error.message, fix=error.fix)
        leave(EXIT_REFUSED)


if __name__ == "__main__":
    main()
