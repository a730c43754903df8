"""The reference pages say what the code says: settings, commands, exit codes, errors, states, tables."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import pytest

import everbeat
from everbeat import App, ConfigurationError, Context, EverbeatError, NatsConfig, TaskFailed
from everbeat.cli.exit_codes import MEANINGS, exit_code_of
from everbeat.cli.main import COMMANDS, load_command
from everbeat.client.options import SendOptions, SendSettings
from everbeat.config import QueueConfig, RecoveryConfig, WorkerConfig
from everbeat.domain.context import OutsideTask, OutsideWorker
from everbeat.domain.duration import to_seconds
from everbeat.domain.outcome import BUILT_IN_CODES
from everbeat.domain.policy import TaskOptions
from everbeat.domain.retry import RetryPolicy
from everbeat.domain.states import TASK_TERMINAL_STATES, TRANSITIONS, TaskState
from everbeat.errors import WorkerRefused
from tests.docs.tables import marked_tables, section, table, text_of

SOURCE = Path(everbeat.__file__).parent
ROOT = SOURCE.parents[1]
SETTINGS = {
    "everbeat.domain.policy.TaskOptions": TaskOptions,
    "everbeat.client.options.SendSettings": SendSettings,
    "everbeat.RetryPolicy": RetryPolicy,
    "everbeat.RecoveryConfig": RecoveryConfig,
    "everbeat.WorkerConfig": WorkerConfig,
    "everbeat.QueueConfig": QueueConfig,
    "everbeat.NatsConfig": NatsConfig,
}
REQUIRED: dict[type[Any], dict[str, Any]] = {
    QueueConfig: {"name": "any"},
    NatsConfig: {"servers": ["nats://any"]},
}
MARKED = marked_tables("configuration.md")
ROWS = [(SETTINGS[name], row) for name, rows in MARKED.items() for row in rows]
BOUNDS = re.compile(
    r"(?P<lowest>-?[\d,.]+(?:ms|s|m|h|d)?) … (?P<highest>[\d,.]+(?:ms|s|m|h|d)?)(?P<none> or None)?"
)


class TestSettings:
    @pytest.mark.parametrize("name", SETTINGS)
    def test_every_field_has_its_row_in_order(self, name: str) -> None:
        assert [row["Field"] for row in MARKED[name]] == [each.name for each in fields(SETTINGS[name])]

    @pytest.mark.parametrize(
        ("settings", "row"), ROWS, ids=lambda each: each["Field"] if isinstance(each, dict) else each.__name__
    )
    def test_the_default_is_as_written(self, settings: type[Any], row: dict[str, str]) -> None:
        each = field_of(settings, row["Field"])
        if each.default_factory is not MISSING and row["Field"] == "process_concurrency":
            assert row["Default"] == "processors"
        elif each.default_factory is MISSING and each.default is MISSING:
            assert row["Default"] == "required"
        else:
            default = getattr(settings(**REQUIRED.get(settings, {})), each.name)
            assert row["Default"] == written(default)

    @pytest.mark.parametrize(
        ("settings", "row"), ROWS, ids=lambda each: each["Field"] if isinstance(each, dict) else each.__name__
    )
    def test_the_bounds_hold_and_one_beyond_is_refused(
        self, settings: type[Any], row: dict[str, str]
    ) -> None:
        check = field_of(settings, row["Field"]).metadata["check"]
        allowed = BOUNDS.fullmatch(row["Allowed"])
        if allowed is None:
            assert "…" not in row["Allowed"]
            accepts_none = row["Allowed"].endswith("or None") or row["Allowed"].endswith(", or None")
            assert accepts(check, None) == accepts_none
            return
        lowest, highest = bound(allowed["lowest"]), bound(allowed["highest"])
        step = 1 if isinstance(lowest, int) else 0.001
        assert [accepts(check, value) for value in (lowest - step, lowest, highest, highest + step)] == [
            False,
            True,
            True,
            False,
        ]
        assert accepts(check, None) == bool(allowed["none"])

    @pytest.mark.parametrize(("settings", "row"), [each for each in ROWS if '"' in each[1]["Allowed"]])
    def test_the_words_are_the_choices(self, settings: type[Any], row: dict[str, str]) -> None:
        check = field_of(settings, row["Field"]).metadata["check"]
        words = re.findall(r'"(\w+)"', row["Allowed"])
        assert all(accepts(check, word) for word in words)
        with pytest.raises(ConfigurationError) as refusal:
            check("no such word", subject="it")
        assert re.findall(r"'(\w+)'", refusal.value.problems[0].rule) == words

    def test_the_parameters_of_an_app_are_all_there(self) -> None:
        parameters = list(inspect.signature(App.__init__).parameters.values())[1:]
        rows = table("configuration.md", "Parameter", "Default", "Meaning")
        assert [(row["Parameter"], row["Default"]) for row in rows] == [
            (each.name, repr(each.default).replace("'", '"')) for each in parameters
        ]

    def test_one_send_decides_what_is_written(self) -> None:
        settings = [each.name for each in fields(SendSettings)]
        assert list(SendOptions.__annotations__) == [*settings, "connection", "patience"]

    def test_every_environment_variable_is_there(self) -> None:
        code = "".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
        known = set(re.findall(r'"(EVERBEAT_[A-Z_]+|NO_COLOR)"', code)) - {"EVERBEAT_ERROR"}
        assert known <= set(
            re.findall(r"EVERBEAT_[A-Z_]+|NO_COLOR", section("configuration.md", "Environment"))
        )


class TestCommands:
    @pytest.mark.parametrize("name", COMMANDS)
    def test_every_option_is_in_the_section_of_its_command(self, name: str) -> None:
        text = section("cli.md", name) + text_of("cli.md").partition("\n## ")[0]
        missing = [option for option in options_of(load_command(name)) if f"`{option}" not in text]
        assert missing == []

    @pytest.mark.parametrize("name", COMMANDS)
    def test_every_option_of_a_section_exists(self, name: str) -> None:
        known = set(options_of(load_command(name), hidden=True)) | {
            "--help",
            "--version",
            "--url",
            "--schema",
            "--app",
            "--json",
        }
        assert set(re.findall(r"`(--[a-z-]+)", section("cli.md", name))) <= known

    def test_the_exit_codes_are_those_of_the_commands(self) -> None:
        rows = table("cli.md", "Code", "Means")
        assert [(int(row["Code"]), row["Means"]) for row in rows] == [
            (code.value, text) for code, text in MEANINGS.items()
        ]

    def test_every_error_has_its_code_and_exit_code(self) -> None:
        rows = table("cli.md", "Code", "Class", "Exit code", "Means")
        public = [each for each in subclasses(EverbeatError) if each.__module__.startswith("everbeat.errors")]
        assert {(row["Code"], row["Class"], row["Exit code"]) for row in rows} == {
            (each.code, each.__name__, exit_code_as_written(each))
            for each in [*public, TaskFailed, OutsideTask, OutsideWorker]
        }

    def test_where_each_error_is_imported_from_is_said(self) -> None:
        sentence = re.search(
            r"only in `everbeat.errors`: (.*?)\. A command", section("cli.md", "Errors"), re.DOTALL
        )
        assert sentence is not None
        listed = {row["Class"] for row in table("cli.md", "Code", "Class", "Exit code", "Means")}
        assert set(re.findall(r"`(\w+)`", sentence[1])) == listed - set(everbeat.__all__)


class TestTasks:
    def test_the_error_codes_are_those_that_everbeat_gives(self) -> None:  # B3
        assert {row["Code"] for row in table("tasks.md", "Code", "Means")} == BUILT_IN_CODES

    def test_every_member_of_a_context_exists(self) -> None:
        members = ", ".join(row["Member"] for row in table("tasks.md", "Member", "Is"))
        names = {re.match(r"\w+", each).group() for each in members.split(", ") if each[0].isalpha()} - {
            "fraction",
            "message",
        }  # type: ignore[union-attr]
        public = {name for name in dir(Context) if not name.startswith("_")}
        assert names == public - {
            "backend",
            "book",
            "current",
            "current_or_none",
            "detached",
            "entered",
            "work",
        }


class TestLifeCycle:  # B1
    def test_the_seven_states(self) -> None:
        rows = table("life-cycle.md", "State", "Means", "Code runs")
        assert [row["State"] for row in rows] == [state.value for state in TaskState]
        assert {row["State"] for row in rows[-4:]} == TASK_TERMINAL_STATES

    def test_the_transitions_are_the_table_of_the_code(self) -> None:
        rows = table("life-cycle.md", "From", "To", "Statement", "Because")
        assert [tuple(row.values()) for row in rows] == [
            ("" if each.old is None else each.old.value, each.new.value, each.statement, each.why)
            for each in TRANSITIONS
        ]

    def test_the_diagram_shows_each_of_them_and_no_other(self) -> None:
        drawn = re.findall(r"^ +(\[\*\]|[A-Z]+) --> ([A-Z]+)$", text_of("life-cycle.md"), flags=re.MULTILINE)
        assert len(drawn) == len(set(drawn))
        assert set(drawn) == {
            ("[*]" if each.old is None else each.old.value, each.new.value) for each in TRANSITIONS
        }


class TestInternals:
    def test_every_table_and_view_is_there(self) -> None:
        statements = "".join(
            path.read_text(encoding="utf-8") for path in (SOURCE / "sql" / "schema").rglob("*.sql")
        )
        made = re.findall(
            r"^create (?:table|view) (?:if not exists )?\{schema\}\.(\w+)", statements, flags=re.MULTILINE
        )
        rows = table("internals.md", "Table or view", "Holds", "Grows")
        assert {row["Table or view"].removesuffix(" (view)") for row in rows} == set(made)

    @pytest.mark.parametrize("page", ["internals.md", "life-cycle.md"])
    def test_every_file_that_is_named_exists(self, page: str) -> None:
        named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]*(?:\.py|\.sql)?)`", text_of(page)))
        places = (SOURCE, SOURCE / "sql", ROOT)
        wrong = [
            name
            for name in named
            if not any((place / name).exists() or (place / f"{name}.sql").exists() for place in places)
        ]
        assert named
        assert wrong == []


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        *sorted(path.name for path in (ROOT / "docs").glob("*.md")),
    ],
)
def test_every_link_leads_somewhere(page: str) -> None:
    path = ROOT / page if (ROOT / page).exists() else ROOT / "docs" / page
    for target, _, anchor in (
        link.partition("#")
        for link in re.findall(r"\]\((?!https?:)([^)]+)\)", path.read_text(encoding="utf-8"))
    ):
        other = (path.parent / target).resolve() if target else path
        assert other.exists(), target
        if anchor:
            assert anchor in set(anchors(other.read_text(encoding="utf-8"))), f"{target}#{anchor}"


def field_of(settings: type[Any], name: str) -> Field[Any]:
    return next(each for each in fields(settings) if each.name == name)


def accepts(check: Any, value: object) -> bool:
    try:
        check(value, subject="it")
    except ConfigurationError:
        return False
    return True


def bound(text: str) -> int | float:
    return to_seconds(text, subject="a bound") if text[-1].isalpha() else int(text.replace(",", ""))


def written(value: object) -> str:
    match value:
        case bool() | None:
            return str(value)
        case int():
            return f"{value:,}"
        case dict():
            return str(value)
        case _ if not isinstance(value, str | tuple | float):
            return str(dict(value))  # type: ignore[call-overload]
        case _:
            return repr(value).replace("'", '"')


def options_of(command: Any, *, hidden: bool = False) -> Iterator[str]:
    for each in getattr(command, "commands", {}).values():
        if hidden or not each.hidden:
            yield from options_of(each, hidden=hidden)
    for parameter in command.params:
        if parameter.param_type_name == "option" and not parameter.hidden and parameter.name != "help":
            yield parameter.opts[0]


def exit_code_as_written(kind: type[EverbeatError]) -> str:
    return "that of its reason" if kind is WorkerRefused else str(int(exit_code_of(kind.__new__(kind))))


def subclasses(kind: type[EverbeatError]) -> Iterator[type[EverbeatError]]:
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


def anchors(text: str) -> Iterator[str]:
    for heading in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
