"""A network that silently drops all packets: which sessions PostgreSQL keeps."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "silent_network.py"
UNSHARE = ("unshare", "--net")


def can_own_a_network() -> bool:
    """Whether a process here can have a separate network namespace and shut it down."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    down = ("ip", "link", "set", "lo", "down")
    return subprocess.run([*UNSHARE, *down], check=False, capture_output=True).returncode == 0


@pytest.mark.long
@pytest.mark.skipif(not can_own_a_network(), reason="LOUD: no network namespaces, or no ip command, here")
def test_only_the_session_of_the_lock_survives_a_silent_network() -> None:  # E14
    """So an early release of the lock means that its socket was closed. The other sessions end within 11 s."""
    with tempfile.TemporaryDirectory(prefix="eb-", ignore_cleanup_errors=True) as folder:
        command = [*UNSHARE, sys.executable, str(PROGRAM), f"{folder}/server"]
        ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    print(found)
    assert found["before"] == ["silent-lock", "silent-other"]
    assert found["after"] == ["silent-lock"]
    assert 5 < found["took_s"] < 3 * 11
