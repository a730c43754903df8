"""The processes of a tree that import the app: worker processes, and their task processes.

What lives here: the main of each, once the app is imported. What may not: importing it, and exit codes of the command line.
"""

from __future__ import annotations

import socket
from typing import NoReturn

from everbeat.assembly.blueprint import Blueprint
from everbeat.assembly.parts import Surroundings, local_hooks
from everbeat.assembly.worker_parts import make_worker, plan_of, prepare
from everbeat.worker.farewell import leave
from everbeat.worker.link import Link
from everbeat.worker.protocol import Hello, Welcome
from everbeat.worker.task_process import run_task_process as run_attempts
from everbeat.worker.worker import Worker
from everbeat.worker.worker_process import run_worker_process as serve


def run_worker_process(sock: socket.socket, blueprint: Blueprint, *, again: bool = False) -> NoReturn:
    """Works as a worker process until its supervisor says otherwise. Raises a DatabaseError, NatsError or WorkerError before it begins.

    `again`: its tree works already, and goes on without NATS if it must.
    """
    blueprint.check()
    opened = blueprint.address.open()
    make_messenger = prepare(blueprint, opened, again=again)
    plan = plan_of(blueprint, opened.target)
    around = Surroundings()

    def worker(welcome: Welcome, link: Link) -> Worker:
        return make_worker(plan, welcome=welcome, link=link, around=around, make_messenger=make_messenger)

    code = serve(
        sock,
        hello=hello_of(blueprint),
        make_worker=worker,
        hooks=local_hooks(blueprint.hooks, blueprint.recovery, around=around),
    )
    opened.close()
    leave(code)


def run_task_process(sock: socket.socket, blueprint: Blueprint) -> NoReturn:
    """Runs attempts, one at a time, until its worker says otherwise."""
    run_attempts(sock, definitions=blueprint.definitions, exception_codes=blueprint.exception_codes)


def hello_of(blueprint: Blueprint) -> Hello:
    """What a supervisor must know of the app."""
    queues = blueprint.worker.queues
    return Hello(
        url=blueprint.address.portable,
        schema=blueprint.address.schema,
        recovery=blueprint.recovery.to_dict(),
        worker=blueprint.worker.to_dict(),
        queues=None if queues is None else list(queues),
        task_names=sorted(blueprint.definitions),
        on_loop=blueprint.on_loop(),
        hooks=blueprint.hooks.scopes,
        lanes=blueprint.lanes(),
        parameters=blueprint.parameters(),
    )
