"""Test that only a terminal that can show colours and bold gets them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from everbeat import App
from everbeat.store.target import Target
from tests.cli.conftest import Command
from tests.cli.terminal import at_terminal
from tests.cli.wide_scene import WideScene, played
from tests.client.conftest import app
from tests.store.conftest import StoreHarness

__all__ = ["app"]
_REFUSED = [["tasks", "list", "--state", "runing"], ["tasks", "show", "00000000-0000-7000-8000-000000000000"]]


@pytest.fixture
def scene(app: App, database_url: str, schema: str) -> Iterator[WideScene]:
    target = Target.parse(database_url, schema=schema)
    with target.connect("everbeat test") as connection:
        db = StoreHarness(target, connection)
        yield played(app, db)
        db.database.close()


def test_a_terminal_gets_colours_and_bold(scene: WideScene, everbeat: Command) -> None:  # J10
    written = at_terminal(
        [["tasks", "list"]],
        folder=everbeat.folder,
        environment={**everbeat.environment, "NO_COLOR": ""},
        columns=400,
    )
    assert "\x1b[1m" in written
    assert re.search(r"\x1b\[3\dm(FAILED|RUNNING)", written), written
    assert str(scene.failed) in written


@pytest.mark.parametrize(
    ("changed", "term"),
    [({"NO_COLOR": "1"}, "xterm-256color"), pytest.param({}, "dumb", marks=pytest.mark.long)],
    ids=["NO_COLOR", "dumb"],
)
def test_no_color_and_a_dumb_terminal_switch_every_style_off(
    scene: WideScene, everbeat: Command, changed: dict[str, str], term: str
) -> None:  # J10
    written = at_terminal(
        [*scene.pages(), *_REFUSED],
        folder=everbeat.folder,
        environment={**everbeat.environment, **changed},
        term=term,
    )
    assert "\x1b" not in written
    assert written.count("WORKER ") > 1


def test_a_dumb_terminal_gets_no_live_display(everbeat: Command) -> None:  # J10
    everbeat("migrate").assert_code(0)
    written = at_terminal(
        [["send", "shop:app", "welcome", "user_id=1", "--wait", "--wait-timeout", "1s"]],
        folder=everbeat.folder,
        environment=everbeat.environment,
        term="dumb",
    )
    assert "\x1b" not in written
    assert "PENDING" in written


@pytest.mark.long
def test_a_pipe_gets_no_escape_even_if_force_color_is_set(scene: WideScene, everbeat: Command) -> None:  # J10
    forced = {"FORCE_COLOR": "1", "CLICOLOR_FORCE": "1", "TTY_COMPATIBLE": "1", "TERM": "xterm-256color"}
    for words in (*scene.pages(), *_REFUSED, ["--help"]):
        answer = everbeat(*words, **forced)
        assert "\x1b" not in answer.out + answer.err, words
