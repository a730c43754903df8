"""`everbeat metrics`: prints the metrics of a cluster, or serves them to Prometheus."""

from __future__ import annotations

import signal
import threading
from time import monotonic
from typing import Annotated, Final

import typer

from everbeat import __version__
from everbeat.app import App
from everbeat.cli.output import say, show_json
from everbeat.cli.selection import with_app
from everbeat.client.database_access import database_of
from everbeat.client.metrics import cluster_metrics
from everbeat.domain.metrics import names
from everbeat.domain.metrics.text import CONTENT_TYPE, MOST_NAMES, OTHER, MetricsText
from everbeat.errors import DatabaseError
from everbeat.runtime.http_server import HttpAnswer, HttpServer, listen, shown_address
from everbeat.runtime.main_loop import take_signal

LOOK_EVERY_S: Final = 5.0
"""How old an answer can be, in seconds. So any number of scrapers costs the database one look in this time."""
_PATIENCE_S: Final = 4.0

commands = typer.Typer(rich_markup_mode=None, add_completion=False)


class ClusterMetrics:
    """Reads the metrics of an app's cluster. Queues that were seen once stay, so that an empty queue reports zeros."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._queues: set[str] = set()
        self._last: tuple[float, HttpAnswer] | None = None

    def read(self) -> MetricsText:
        """Read the metrics now. Raises DatabaseError if the database cannot be reached within some seconds."""
        access = database_of(self._app)
        plan = cluster_metrics(
            self._app.recovery,
            schema=self._app.schema,
            version=__version__,
            known_queues=self._queues,
        )
        with access.patience(_PATIENCE_S):
            found = access.run(plan, name="metrics", twin="metrics")
        if len(self._queues) < MOST_NAMES:
            self._queues.update({*found.values_of(names.OLDEST_DUE_SECONDS)} - {OTHER})
        return found

    def answer(self) -> HttpAnswer:
        """Return the answer to a scrape, at most some seconds old. While the database is away, the scrape fails.

        The reason is written to stderr, because clients without a password must not read where the database is.
        """
        if self._last is None or monotonic() - self._last[0] >= LOOK_EVERY_S:
            try:
                answer = HttpAnswer(200, self.read().text(), CONTENT_TYPE)
            except DatabaseError as problem:
                if self._last is None or self._last[1].status == 200:
                    say(f"The database cannot be read. Scrapes fail until it can be read again. {problem}")
                answer = HttpAnswer(503, "The database cannot be read. See the messages of this command.\n")
            self._last = monotonic(), answer
        return self._last[1]


@commands.command()
@with_app
def metrics(
    app: App,
    *,
    listen_at: Annotated[
        str | None,
        typer.Option(
            "--listen",
            metavar="HOST:PORT",
            help="Serve /metrics at this address, or at all addresses: :9109.",
        ),
    ] = None,
    as_json: bool,
) -> None:
    """Print the metrics of the cluster in the text format of Prometheus, or serve them.

    These are the metrics that the database knows. Run one such command for each cluster. Each supervisor serves the
    metrics of its own processes: everbeat worker --probe.
    """
    found = ClusterMetrics(app)
    if listen_at is not None:
        _serve(found, listen_at)
    elif as_json:
        show_json({"metrics": found.read().document()})
    else:
        print(found.read().text(), end="")


def _serve(found: ClusterMetrics, address: str) -> None:
    """Serve the metrics until SIGINT or SIGTERM."""
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        take_signal(number, lambda *_: stopped.set())
    listening = listen(address, subject="--listen")
    server = HttpServer(listening, {"/metrics": found.answer}, name="everbeat-metrics")
    server.start()
    try:
        for each in listening:
            say(f"Serving /metrics at {shown_address(each)}. To stop: Ctrl-C.")
        stopped.wait()
    finally:
        server.close()
