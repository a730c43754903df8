"""How a process of the tree ends when its work is settled: as any Python program, but within seconds."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Final, NoReturn

from everbeat.runtime.exit_report import EXIT_CODE_RUNS as EXIT_CODE_RUNS
from everbeat.runtime.exit_report import EXIT_SLOTS_LEAKED as EXIT_SLOTS_LEAKED
from everbeat.runtime.exit_report import EXIT_UNSETTLED as EXIT_UNSETTLED

EXIT_ORDERLY: Final = 0

FAREWELL_PATIENCE_S: Final = 1.0


def leave(code: int) -> NoReturn:
    """Exit with `code`; threads and exit handlers of user code may take 1 s, then they are cut off."""

    def cut_off() -> None:
        time.sleep(FAREWELL_PATIENCE_S)
        os._exit(code)

    threading.Thread(target=cut_off, name="everbeat-farewell", daemon=True).start()
    sys.exit(code)
