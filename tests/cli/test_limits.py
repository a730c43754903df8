"""Test the commands of `everbeat limits`, and the check of limits in `everbeat doctor`: what they print, change and refuse."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from rich.cells import cell_len

from everbeat import App
from everbeat.cli.failures import ExitCode
from everbeat.domain.limit.model import LimitDefinition
from everbeat.store.limits import declare_limits
from everbeat.store.target import Target
from tests.cli.conftest import Command
from tests.cli.terminal import pages_at_terminal
from tests.client.conftest import app
from tests.store.conftest import StoreHarness
from tests.variants import every_nth_quick

__all__ = ["app"]

WRONG = b"a\xed\xa0\x80".decode(errors="surrogateescape")  # a forked command cannot be given such a text


@pytest.fixture
def db(app: App, database_url: str, schema: str) -> Iterator[StoreHarness]:
    """Yield a harness with two limits, a held permit and a waiting task."""
    target = Target.parse(database_url, schema=schema)
    with target.connect("everbeat test") as connection:
        made = StoreHarness(target, connection)
        made.supervisor("s1", "w1")
        stripe = LimitDefinition(name="stripe", concurrency=1, starts=100, period_s=10.0, burst=10)
        tenant = LimitDefinition(
            name="tenant", concurrency=2, key="tenant_id", fair=True, weights={"acme": 2}
        )
        made.run(declare_limits([stripe, tenant]))
        for _ in range(2):
            made.send(gates='{"stripe","tenant/acme"}')
        made.claim(starts=5)
        yield made
        made.database.close()


def test_list_shows_the_numbers_the_permits_in_use_and_the_waiting_tasks(
    everbeat: Command, db: StoreHarness
) -> None:
    lines = everbeat("limits").assert_code(0).out.splitlines()
    assert [line.split()[:5] for line in lines] == [
        ["LIMIT", "CONCURRENCY", "RATE", "HELD", "WAITING"],
        ["stripe", "1", "100/10s", "1", "1"],
        ["tenant", "2", "1", "1", "tenant_id"],
    ]
    assert lines[0].split()[5:7] == ["KEY", "KEYS"]
    document = everbeat("limits", "list", "--json").assert_code(0).document
    assert [(each["name"], each["held"], each["waiting"]) for each in document["limits"]] == [
        ("stripe", 1, 1),
        ("tenant", 1, 1),
    ]
    assert document["limits"][0]["numbers"] == {"concurrency": 1, "rate": "100/10s", "burst": 10}


def test_show_names_the_holders_with_their_worker_host_pid_and_last_beat(
    everbeat: Command, db: StoreHarness
) -> None:
    shown = everbeat("limits", "show", "tenant").assert_code(0).out
    assert "weights" in shown
    assert "acme: 2" in shown
    assert "Holders of permits" in shown
    document = everbeat("limits", "show", "tenant", "--json").assert_code(0).document
    (holder,) = document["holders"]
    assert (holder["worker_id"], holder["hostname"], holder["pid"], holder["key"]) == (
        "w1",
        "host",
        2,
        "acme",
    )
    assert holder["last_beat_at"] is not None
    assert [(each["key"], each["held"], each["waiting"]) for each in document["in_use"]] == [("acme", 1, 1)]


def test_set_replaces_numbers_and_clear_restores_them(everbeat: Command, db: StoreHarness) -> None:
    line = everbeat(
        "limits", "set", "stripe", "--concurrency", "5", "--until", "2h", "--reason", "an incident"
    )
    assert line.assert_code(0).out.startswith(
        "limit stripe: concurrency 5, rate 100/10s, burst 10, set by operator, until "
    )
    assert line.out.rstrip().endswith(": an incident")
    assert "operator" in everbeat("limits").assert_code(0).out
    everbeat("limits", "set", "stripe", "--concurrency", "none", "--rate", "none").assert_code(0)
    document = everbeat("limits", "show", "stripe", "--json").assert_code(0).document
    assert document["numbers"] == {"concurrency": None, "rate": None, "burst": 10}
    assert document["declared"]["concurrency"] == 1
    assert everbeat("limits", "clear", "stripe", "tenant").assert_code(0).out.splitlines() == [
        "limit stripe: concurrency 1, rate 100/10s, burst 10",
        "limit tenant: concurrency 2; no operator had set it",
    ]


def test_wrong_numbers_and_names_are_refused_with_the_option(everbeat: Command, db: StoreHarness) -> None:
    wrong = everbeat("limits", "set", "stripe", "--concurrency", "many", "--rate", "x").assert_code(
        ExitCode.USAGE
    )
    assert "--concurrency" in wrong.err
    assert "--rate" in wrong.err
    nothing = everbeat("limits", "set", "stripe", "--reason", "none").assert_code(ExitCode.USAGE)
    assert "write --concurrency 50" in nothing.err
    unknown = everbeat("limits", "set", "stripes", "--concurrency", "5").assert_code(ExitCode.NOT_FOUND)
    assert "did you mean 'stripe'?" in unknown.err
    everbeat("limits", "clear", "none").assert_code(ExitCode.NOT_FOUND)


def test_refused_numbers_show_how_to_write_them_in_a_shell(everbeat: Command, db: StoreHarness) -> None:
    def refused(*words: str) -> str:
        return everbeat("limits", "set", "stripe", *words).assert_code(ExitCode.USAGE).err

    assert "write a number such as 0, or none for no limit" in refused("--concurrency", "many")
    assert "omit it" not in refused("--concurrency", "-1")
    assert "--rate = 0: must be" in refused("--rate", "0/s")
    assert "limits set = nothing: changes no number" in refused("--reason", "x")
    assert "or a moment: 2030-01-31T12:00:00Z" in refused("--concurrency", "5", "--until", "yesterday")
    past = refused("--concurrency", "5", "--until", "2020-01-01T00:00:00Z")
    assert "--until = '2020-01-01T00:00:00+00:00': must be after now" in past


def test_numbers_that_are_not_plain_digits_are_refused(everbeat: Command, db: StoreHarness) -> None:
    for wrong in ("--5", "²", "9" * 5_000):
        answer = everbeat("limits", "set", "stripe", f"--concurrency={wrong}").assert_code(ExitCode.USAGE)
        assert "write a number such as 0, or none for no limit" in answer.err
    for wrong in ("²", "-1"):
        answer = everbeat("send", "x", "--cost", f"two={wrong}").assert_code(ExitCode.USAGE)
        assert "write it as two=2" in answer.err
    many = everbeat("send", "x", "--limit", "two", "--cost", f"two={'9' * 5_000}").assert_code(ExitCode.USAGE)
    assert "--cost two = " in many.err


def test_show_reports_that_long_lists_stop(everbeat: Command, db: StoreHarness) -> None:
    everbeat("limits", "set", "stripe", "--concurrency", "none", "--rate", "none").assert_code(0)
    tenant = db.plain("update {schema}.limits set concurrency = 1 where name = 'tenant'")
    db.connection.execute(tenant)
    add = db.plain(
        "insert into {schema}.tasks (id, name, queue, priority, args, sent_at, enqueued_at, gates)"
        " select gen_random_uuid(), 'work', 'default', 0, '{{}}', now(), now(), array['tenant/' || n]"
        " from generate_series(%s::integer, %s::integer) n"
    )
    db.connection.execute(add, [1, 40])
    assert "21 more: --json" in everbeat("limits", "show", "tenant").assert_code(0).err
    db.connection.execute(add, [41, 1_100])
    answer = everbeat("limits", "show", "tenant").assert_code(0).err
    assert "At least 980 more. --json lists the first 1,000." in answer


def test_set_keeps_the_end_and_the_reason_of_the_numbers_in_force(
    everbeat: Command, db: StoreHarness
) -> None:
    everbeat("limits", "set", "stripe", "--concurrency", "5", "--until", "2h", "--reason", "an incident")
    line = everbeat("limits", "set", "stripe", "--burst", "2").assert_code(0).out
    assert line.startswith("limit stripe: concurrency 5, rate 100/10s, burst 2, set by operator, until ")
    assert line.rstrip().endswith(": an incident")


def test_doctor_judges_tasks_whose_lines_no_worker_has_applied(everbeat: Command, db: StoreHarness) -> None:
    db.send("other", gates='{"none/a"}')
    db.send("costly", gates='{"tenant/b"}', costs="{3}")
    document = everbeat("doctor", "--json").document
    (check,) = [each for each in document["checks"] if each["code"] == "LIMITS"]
    assert check["verdict"] == "WARN"
    assert "do not exist, so nothing limits them: none" in check["text"]
    assert "costly needs 3 of tenant/b" in check["text"]


def test_doctor_proposes_the_option_that_the_code_or_the_operator_needs(
    everbeat: Command, db: StoreHarness
) -> None:
    def fix() -> str:
        document = everbeat("doctor", "--json").document
        (check,) = [each for each in document["checks"] if each["code"] == "LIMITS"]
        return str(check["fix"])

    db.run(declare_limits([LimitDefinition(name="smooth", starts=5, period_s=1.0, burst=2)]))
    db.send("costly", gates='{"smooth"}', costs="{3}")
    assert "the limit: everbeat limits set smooth --burst 3, or cancel" in fix()
    for statement, options in (
        ("update {schema}.limits set concurrency = 1 where name = 'smooth'", "--concurrency 3 --burst 3"),
        (
            "update {schema}.limits set sliding = true, starts = 2, burst = 1 where name = 'smooth'",
            "--concurrency 3 --rate 3/PERIOD",
        ),
        ("delete from {schema}.limits where name = 'smooth'", None),
    ):
        db.connection.execute(db.plain(statement))
        assert options is None or f"everbeat limits set smooth {options}, or cancel" in fix()
    db.send("other", gates='{"task:x"}')
    assert (
        "tart a worker whose code declares them with @app.task(concurrency=...) and App(limits=...)." in fix()
    )
    db.send("other", gates='{"queue:y"}')
    assert "with @app.task(concurrency=...) and App(limits=...) and QueueConfig(concurrency=...)." in fix()


LIMITED = """
import os

from everbeat import App, Limit

app = App(schema=os.environ["EVERBEAT_SCHEMA"], limits=[Limit("two", concurrency=2), Limit("ten", concurrency=10, key="user")])

@app.task(limits=["two", "ten"])
def charge(user: str) -> None: ...
"""


def test_send_takes_limits_and_costs(everbeat: Command, db: StoreHarness) -> None:
    (everbeat.folder / "limited.py").write_text(LIMITED)
    options = ["--limit", "ten=k", "--limit", "two", "--cost", "two=2"]
    everbeat("send", "limited:app", "charge", "user=ann", *options).assert_code(0)
    everbeat("send", "elsewhere", "--limit", "x=a=b", "--limit", "y", "--cost", "x=3").assert_code(0)
    rows = {row[0]: row[1:] for row in db.table("tasks", "name, gates, costs")}
    assert rows["charge"] == (["two", "ten/k"], [2, 1])
    assert rows["elsewhere"] == (["x/a=b", "y"], [3, 1])
    wrong = everbeat("send", "limited:app", "charge", "user=ann", "--limit", "two=k").assert_code(
        ExitCode.USAGE
    )
    assert "limit 'two' has no key" in wrong.err
    assert "write --limit two, or omit it" in wrong.err
    assert "write it as two=2" in everbeat("send", "x", "--cost", "two").assert_code(ExitCode.USAGE).err


def test_send_reports_wrong_options_as_they_are_typed(everbeat: Command, db: StoreHarness) -> None:
    def refused(*words: str) -> str:
        return everbeat("send", "elsewhere", *words).assert_code(ExitCode.USAGE).err

    assert "--unique-for = '0s'" in refused("--key", "k", "--unique-for", "0s")
    assert "--on-duplicate = 'foo'" in refused("--key", "k", "--on-duplicate", "foo")
    assert "--cost stripe = 0: must be a whole number" in refused("--limit", "stripe", "--cost", "stripe=0")
    assert "--limit bad name = 'bad name': must be 1 to 63" in refused("--limit", "bad name=x")
    assert "--limit a.b c = 'a.b c': must be 1 to 63" in refused("--limit", "a.b c")
    assert "--limit gives the limit 'a' twice" in refused("--limit", "a=1", "--limit", "a=2")
    assert "--cost gives the limit 'a' twice" in refused("--limit", "a", "--cost", "a=1", "--cost", "a=1")
    late = refused("--key", "k", "--at-latest", "5m")
    assert "--at-latest = '5m'" in late
    assert "write --on-duplicate debounce, or omit --at-latest" in late
    keyless = refused("--unique-for", "1h")
    assert "= '1h': is about tasks with the same key" in keyless
    assert "add --key TEXT, or omit --unique-for" in keyless


@pytest.mark.parametrize(
    "words",
    every_nth_quick(
        4,
        [
            ["limits", "set", WRONG, "--concurrency", "1"],
            ["limits", "show", WRONG],
            ["limits", "clear", WRONG],
            ["schedules", "list", "--prefix", WRONG],
            ["tasks", "list", "--name", WRONG],
            ["tasks", "list", "--worker", WRONG],
            ["workflows", "list", "--name", WRONG],
            ["workers", "release", WRONG],
        ],
    ),
    ids=lambda words: " ".join(word for word in words if word != WRONG),
)
def test_names_that_are_not_text_are_refused(everbeat: Command, db: StoreHarness, words: list[str]) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "everbeat", *words],
        cwd=everbeat.folder, env=everbeat.environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert answer.returncode == ExitCode.USAGE, answer.stderr
    assert "must be a text without NUL characters and lone surrogates" in answer.stderr


def test_explain_of_a_limit_names_the_command_that_shows_it(everbeat: Command, db: StoreHarness) -> None:
    answer = everbeat("explain", "limit:two").assert_code(ExitCode.USAGE)
    assert "run everbeat limits show two" in answer.err


def test_the_tables_fit_a_terminal_of_80_columns(everbeat: Command, db: StoreHarness) -> None:
    everbeat("limits", "set", "stripe", "--concurrency", "5", "--until", "2h").assert_code(0)
    commands = [["limits"], ["limits", "show", "tenant"]]
    pages = pages_at_terminal(commands, folder=everbeat.folder, environment=everbeat.environment, columns=80)
    assert len(pages) == 2
    assert max(cell_len(line) for page in pages for line in page.splitlines()) <= 80


def test_doctor_reports_gates_without_a_limit_forgotten_numbers_and_too_high_costs(
    everbeat: Command, db: StoreHarness
) -> None:
    db.send("other", gates='{"none/a"}')
    db.send("costly", gates='{"tenant/b"}', costs="{3}")
    db.claim(names=("nothing",))
    everbeat("limits", "set", "stripe", "--concurrency", "5").assert_code(0)
    db.connection.execute(
        db.plain("update {schema}.limits set set_at = set_at - interval '30 hours' where name = 'stripe'")
    )
    document = everbeat("doctor", "--json").document
    (check,) = [each for each in document["checks"] if each["code"] == "LIMITS"]
    assert check["verdict"] == "WARN"
    assert "do not exist, so nothing limits them: none" in check["text"]
    assert "costly needs 3 of tenant/b" in check["text"]
    assert "stripe (1 d 6 h)" in check["text"]
    assert "everbeat limits clear stripe" in check["fix"]
