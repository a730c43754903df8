"""How a process of the tree ends when its work is settled: as any Python program, but within seconds."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Final, NoReturn

EXIT_ORDERLY: Final = 0
EXIT_SLOTS_LEAKED: Final = 74
"""Every slot of a kind was kept by code that had been given up; the process has settled its work and wants to be replaced."""
EXIT_UNSETTLED: Final = 75
"""The worker was told to leave at once, and the database could not be reached to settle its work."""

FAREWELL_PATIENCE_S: Final = 1.0


def leave(code: int) -> NoReturn:
    """Exit with `code`; threads and exit handlers of user code may take 1 s, then they are cut off."""

    def cut_off() -> None:
        time.sleep(FAREWELL_PATIENCE_S)
        os._exit(code)

    threading.Thread(target=cut_off, name="everbeat-farewell", daemon=True).start()
    sys.exit(code)
