"""An app that reports to Sentry's SDK. Its transport writes what it is given to a file."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import sentry_sdk
from sentry_sdk.envelope import Envelope
from sentry_sdk.transport import Transport

from everbeat import App, Context, RecoveryConfig
from everbeat.config import WorkerConfig
from everbeat.sentry import EverbeatIntegration


class FileTransport(Transport):
    """Appends the items to a file, each on one line. A single write is atomic."""

    def capture_envelope(self, envelope: Envelope) -> None:
        file = os.open(os.environ["STORY_EFFECTS"] + ".sentry", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            for item in envelope.items:
                line: dict[str, Any] = {"kind": item.type, "pid": os.getpid(), "payload": item.payload.json}
                os.write(file, json.dumps(line).encode() + b"\n")
        finally:
            os.close(file)


sentry_sdk.init(
    dsn="https://key@127.0.0.1/1",
    transport=FileTransport(),
    traces_sample_rate=1.0,
    integrations=[EverbeatIntegration()],
)
app = App(
    os.environ["STORY_URL"],
    schema=os.environ["STORY_SCHEMA"],
    recovery=RecoveryConfig(**json.loads(os.environ["STORY_RECOVERY"])),
    worker=WorkerConfig(**json.loads(os.environ["STORY_WORKER"])),
    dashboard_url="https://ops.example.com",
)


@app.task(run_in="process")
def fails() -> None:
    raise ValueError("broken")


@app.task(on_crash="retry")
async def dies() -> str:
    """Kill the own worker process in the first attempt."""
    if Context.current().attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"
