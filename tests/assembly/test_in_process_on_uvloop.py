"""Test an in-process worker on uvloop, as under uvicorn: it runs tasks of all modes, sends, waits and stops on request."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everbeat import App

PROGRAM = """
import asyncio, os, signal, threading
import uvloop
from everbeat import App

app = App({url!r}, schema={schema!r})

@app.task(run_in="process")
def in_process() -> int:
    return os.getpid()

@app.task(run_in="thread")
def in_thread() -> int:
    return threading.get_ident()

@app.task
async def on_loop() -> list[str]:
    loop = asyncio.get_running_loop()
    elsewhere = await (await in_process.asend()).aresult(timeout=60)
    thread = await (await in_thread.asend()).aresult(timeout=60)
    assert elsewhere != os.getpid() and thread != threading.get_ident()
    return [type(loop).__module__, type(loop).__name__]

async def main() -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, app.stop_worker)
    await app.arun_worker()

if __name__ == "__main__":
    uvloop.run(main())
    print("left")
"""


@pytest.fixture
def app(database_url: str, schema: str) -> Iterator[App]:
    opened = App(database_url, schema=schema)
    yield opened
    opened.close()


@pytest.mark.story
@pytest.mark.skipif(sys.platform == "win32", reason="uvloop does not exist for Windows")
def test_an_in_process_worker_on_uvloop_runs_tasks_of_all_modes_and_stops(  # D7
    app: App, database_url: str, schema: str, tmp_path: Path
) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(url=database_url, schema=schema))
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert app.send_by_name("on_loop").result(timeout=60) == ["uvloop", "Loop"]
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, output.split()) == (0, ["left"])
    assert app.list_active_workers() == []
