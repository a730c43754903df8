"""An app with the OpenTelemetry tracer. Every process appends the spans that it exports to one file, as the SDK writes them in JSON."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from everbeat import App, Context, RecoveryConfig, RetryPolicy, TaskStopped
from everbeat.config import WorkerConfig
from everbeat.domain.task.policy import OnCrash
from everbeat.tracing import OpenTelemetry

GATES = Path(os.environ["STORY_GATES"])
SPANS = Path(os.environ["STORY_EFFECTS"]).with_name("spans.jsonl")
AGAIN: OnCrash = "retry"


class FileExporter(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        file = os.open(SPANS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            for span in spans:
                os.write(file, span.to_json(indent=None).encode() + b"\n")
        finally:
            os.close(file)
        return SpanExportResult.SUCCESS


provider = TracerProvider(resource=Resource({"process.pid": os.getpid()}))
late = (GATES / "batched").exists()
provider.add_span_processor(
    BatchSpanProcessor(FileExporter(), schedule_delay_millis=60_000)
    if late
    else SimpleSpanProcessor(FileExporter())
)
app = App(
    os.environ["STORY_URL"],
    schema=os.environ["STORY_SCHEMA"],
    worker=WorkerConfig(**json.loads(os.environ["STORY_WORKER"])),
    recovery=RecoveryConfig(**json.loads(os.environ["STORY_RECOVERY"])),
    tracing=OpenTelemetry(trace="parent" if (GATES / "parent").exists() else "link", provider=provider),
)


def record(step: str) -> None:
    context = Context.current()
    line = {"step": step, "pid": os.getpid(), "task": str(context.task_id), "attempt": context.attempt}
    file = os.open(os.environ["STORY_EFFECTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, json.dumps(line).encode() + b"\n")
    finally:
        os.close(file)


def pack() -> int:
    logging.getLogger("shop.orders").warning("packing the order")
    return 1


def work(ctx: Context) -> int:
    packed = ctx.step(pack)
    record("packed")
    while ctx.attempt == 1 and not (GATES / "calm").exists():
        time.sleep(0.05)
    return packed


@app.task(on_crash=AGAIN)
def in_thread(ctx: Context) -> int:
    return work(ctx)


@app.task(on_crash=AGAIN, run_in="process")
def in_process(ctx: Context) -> int:
    return work(ctx)


@app.task(run_in="process", timeout="1s")
def deaf() -> None:
    record("deaf")
    while True:
        try:
            time.sleep(10)
        except TaskStopped:
            continue


@app.task(retry=RetryPolicy(auto_retry_for=[ValueError], max_retries=1, intervals=[1]), run_in="process")
def failing() -> None:
    raise ValueError("no stock")


@app.task
async def tick() -> None:
    record("ticked")


async def order(request: Request) -> JSONResponse:
    kind = request.path_params["kind"]
    with provider.get_tracer("shop").start_as_current_span(f"POST /orders/{kind}"):
        handle = await {"thread": in_thread, "process": in_process}[kind].asend()
    return JSONResponse({"task": str(handle.id)})


shop = Starlette(routes=[Route("/orders/{kind}", order, methods=["POST"])])
