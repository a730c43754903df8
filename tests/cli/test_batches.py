"""Test the commands of `everbeat batches`, and the check of batches in `everbeat doctor`: what they print, change and refuse."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import pytest

from everbeat import App
from everbeat.cli.failures import ExitCode
from everbeat.store import batches
from everbeat.store.target import Target
from tests.cli.conftest import Command
from tests.client.conftest import app
from tests.store.conftest import StoreHarness
from tests.store.test_batches import fill

pytestmark = pytest.mark.usefixtures("migrated")
__all__ = ["app"]

OPEN, SEALED = UUID("018f0000-0000-7000-8000-000000000001"), UUID("018f9999-0000-7000-8000-000000000002")


@pytest.fixture
def db(app: App, database_url: str, schema: str) -> Iterator[StoreHarness]:
    """Yield a harness with an open batch of two tasks, and a sealed one with three."""
    target = Target.parse(database_url, schema=schema)
    with target.connect("everbeat test") as connection:
        made = StoreHarness(target, connection)
        made.supervisor("s1", "w1")
        for batch_id, name, count in ((OPEN, "import-7", 2), (SEALED, "report", 3)):
            made.run(batches.open_batch(batch_id, name=name, on_end=None, on_success=None))
            fill(made, batch_id, count)
        made.run(batches.seal_batch(SEALED))
        yield made
        made.database.close()


def test_list_shows_batches_newest_first_with_their_progress(everbeat: Command, db: StoreHarness) -> None:
    lines = everbeat("batches").assert_code(0).out.splitlines()
    assert [line.split()[:5] for line in lines] == [
        ["ID", "STATE", "NAME", "TASKS", "LIVE"],
        [str(SEALED), "SEALED", "report", "3", "3"],
        [str(OPEN), "OPEN", "import-7", "2", "2"],
    ]
    document = everbeat("batches", "list", "--live", "--limit", "1", "--json").assert_code(0).document
    assert [(each["name"], each["total"], each["state"]) for each in document["batches"]] == [
        ("report", 3, "SEALED")
    ]


def test_the_list_continues_before_a_batch(everbeat: Command, db: StoreHarness) -> None:
    page = everbeat("batches", "--limit", "1").assert_code(0)
    assert page.err == f"There might be more: --before {SEALED}\n"
    following = everbeat("batches", "--limit", "1", "--before", str(SEALED)[:8], "--json").assert_code(0)
    assert [each["name"] for each in following.document["batches"]] == ["import-7"]


@pytest.mark.parametrize("words", ["batches", "failures", "audit", "bulk", "workflows"])
def test_a_limit_that_the_list_refuses_is_refused_as_the_help_says(everbeat: Command, words: str) -> None:
    assert (
        "1<=x<=10000]"
        in everbeat(words, "list" if words not in ("failures", "audit") else "--help", "--help").out
    )
    everbeat("migrate").assert_code(0)
    everbeat(words, "--limit", "10000").assert_code(0)
    assert "--limit" in everbeat(words, "--limit", "10001").assert_code(2).err


def test_show_finds_a_batch_by_the_beginning_of_its_id(everbeat: Command, db: StoreHarness) -> None:
    document = everbeat("batches", "show", "018f0000", "--json").assert_code(0).document
    assert (document["id"], document["waiting"], document["sealed_at"]) == (str(OPEN), 2, None)
    assert "import-7" in everbeat("batches", "show", "018f0000").assert_code(0).out


def test_seal_and_cancel_name_each_batch_and_refuse_unknown_ids(everbeat: Command, db: StoreHarness) -> None:
    sealed = everbeat("batches", "seal", str(OPEN)).assert_code(0).out
    assert sealed.split() == [str(OPEN), "SEALED"]
    cancelled = everbeat("batches", "cancel", str(OPEN), "--json").assert_code(0).document
    assert "'cancelled': 2" in str(cancelled)
    assert db.run(batches.advance_batches(channel=db.target.channel)).ended == 1
    assert everbeat("batches", "cancel", str(OPEN)).assert_code(0).out.split() == [str(OPEN), "ENDED"]
    answer = everbeat("batches", "seal", "ffff")
    assert answer.code == ExitCode.NOT_FOUND
    assert "does not exist" in answer.err


def test_doctor_reports_a_batch_that_has_been_open_for_more_than_a_day(
    everbeat: Command, db: StoreHarness
) -> None:
    def check() -> dict[str, str]:
        document = everbeat("doctor", "--json").document
        (found,) = [each for each in document["checks"] if each["code"] == "BATCHES"]
        return dict(found)

    assert check()["verdict"] == "OK"
    db.connection.execute(db.plain("update {schema}.batches set created_at = now() - interval '25 hours'"))
    found = check()
    assert found["verdict"] == "WARN"
    assert f"1 batch has been open for more than a day, first 'import-7' ({OPEN})" in found["text"]
    assert f"everbeat batches seal {OPEN}" in found["fix"]
