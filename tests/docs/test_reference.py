"""The reference pages say what the code says: settings, commands, exit codes, errors, states, tables."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import pytest
from msgspec import UnsetType

import everbeat
from everbeat import App, Context, EverbeatError, NatsConfig, TaskFailed, errors
from everbeat.cli.failures import MEANINGS, exit_code_of
from everbeat.cli.main import COMMANDS, load_command
from everbeat.client.options import SendOptions, SendSettings
from everbeat.config import QueueConfig, RecoveryConfig, WorkerConfig
from everbeat.domain.settings.units import to_seconds
from everbeat.domain.task.policy import TaskOptions
from everbeat.domain.task.retry import RetryPolicy
from everbeat.domain.task.states import TASK_TERMINAL_STATES, TRANSITIONS, TaskState
from everbeat.errors import ConfigurationError, OutsideTask, OutsideWorker, WorkerRefused
from everbeat.errors.tasks import BUILT_IN_CODES
from tests.docs.tables import marked_tables, section, table, text_of

SOURCE = Path(everbeat.__file__).parent
ROOT = SOURCE.parents[1]
SETTINGS = {
    "everbeat.domain.task.policy.TaskOptions": TaskOptions,
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
    def test_every_setting_has_its_row_in_the_reference_in_order(self, name: str) -> None:
        assert [row["Field"] for row in MARKED[name]] == [each.name for each in fields(SETTINGS[name])]

    @pytest.mark.parametrize(
        ("settings", "row"), ROWS, ids=lambda each: each["Field"] if isinstance(each, dict) else each.__name__
    )
    def test_the_documented_default_of_a_setting_is_that_of_the_code(
        self, settings: type[Any], row: dict[str, str]
    ) -> None:
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
    def test_the_documented_bounds_of_a_setting_are_those_of_the_code(
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
    def test_the_documented_words_of_a_setting_are_its_choices(
        self, settings: type[Any], row: dict[str, str]
    ) -> None:
        check = field_of(settings, row["Field"]).metadata["check"]
        words = re.findall(r'"(\w+)"', row["Allowed"])
        assert all(accepts(check, word) for word in words)
        with pytest.raises(ConfigurationError) as refusal:
            check("no such word", subject="it")
        assert re.findall(r"'(\w+)'", refusal.value.problems[0].rule) == words

    def test_every_parameter_of_an_app_is_documented_with_its_default(self) -> None:
        parameters = list(inspect.signature(App.__init__).parameters.values())[1:]
        rows = table("configuration.md", "Parameter", "Default", "Meaning")
        assert [(row["Parameter"], row["Default"]) for row in rows] == [
            (each.name, repr(each.default).replace("'", '"')) for each in parameters
        ]

    def test_send_options_are_the_settings_that_one_send_can_change(self) -> None:
        settings = [each.name for each in fields(SendSettings)]
        assert list(SendOptions.__annotations__) == [*settings, "connection", "patience"]

    def test_every_environment_variable_is_documented(self) -> None:
        code = "".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
        known = set(re.findall(r'"(EVERBEAT_[A-Z_]+|NO_COLOR)"', code)) - {"EVERBEAT_ERROR"}
        assert known <= set(
            re.findall(r"EVERBEAT_[A-Z_]+|NO_COLOR", section("configuration.md", "Environment"))
        )


class TestCommands:
    @pytest.mark.parametrize("name", COMMANDS)
    def test_every_option_is_documented_in_the_section_of_its_command(self, name: str) -> None:
        text = section("cli.md", name) + text_of("cli.md").partition("\n## ")[0]
        missing = [option for option in options_of(load_command(name)) if f"`{option}" not in text]
        assert missing == []

    @pytest.mark.parametrize("name", COMMANDS)
    def test_every_documented_option_of_a_command_exists(self, name: str) -> None:
        known = set(options_of(load_command(name), hidden=True)) | {
            "--help",
            "--version",
            "--url",
            "--schema",
            "--app",
            "--json",
        }
        assert set(re.findall(r"`(--[a-z-]+)", section("cli.md", name))) <= known

    def test_the_documented_exit_codes_are_those_of_the_commands(self) -> None:
        rows = table("cli.md", "Code", "Means")
        assert [(int(row["Code"]), row["Means"]) for row in rows] == [
            (code.value, text) for code, text in MEANINGS.items()
        ]

    def test_every_error_is_documented_with_its_code_and_exit_code(self) -> None:
        rows = table("cli.md", "Code", "Class", "Exit code", "Means")
        public = [each for each in subclasses(EverbeatError) if each.__module__.startswith("everbeat.errors")]
        assert {(row["Code"], row["Class"], row["Exit code"]) for row in rows} == {
            (each.code, each.__name__, exit_code_as_written(each))
            for each in [*public, TaskFailed, OutsideTask, OutsideWorker]
        }

    def test_the_documentation_lists_the_errors_that_everbeat_exports(self) -> None:
        sentence = re.search(r"also in `everbeat`: (.*?)\.\n", section("cli.md", "Errors"))
        assert sentence is not None
        listed = {row["Class"] for row in table("cli.md", "Code", "Class", "Exit code", "Means")}
        public = {
            each.__name__
            for each in vars(errors).values()
            if isinstance(each, type) and issubclass(each, EverbeatError)
        }
        assert set(re.findall(r"`(\w+)`", sentence[1])) == {*listed, "EverbeatError"} & set(everbeat.__all__)
        assert listed - {"EverbeatError"} <= public


class TestTasks:
    def test_the_documented_task_error_codes_are_the_built_in_ones(self) -> None:  # B3
        assert {row["Code"] for row in table("codes.md", "Code", "Means")} == BUILT_IN_CODES

    def test_every_documented_member_of_a_context_exists(self) -> None:
        members = ", ".join(row["Member"] for row in table("tasks.md", "Member", "Is"))
        names = {re.match(r"\w+", each).group() for each in members.split(", ") if each[0].isalpha()} - {
            "fraction",
            "message",
        }  # type: ignore[union-attr]
        public = {name for name in dir(Context) if not name.startswith("_")}
        assert names == public - {"current", "current_or_none"}


class TestLifeCycle:  # B1
    def test_the_seven_task_states_are_documented_in_order(self) -> None:
        rows = table("life-cycle.md", "State", "Means", "Code runs")
        assert [row["State"] for row in rows] == [state.value for state in TaskState]
        assert {row["State"] for row in rows[-4:]} == TASK_TERMINAL_STATES

    def test_the_documented_transitions_are_the_table_of_the_code(self) -> None:
        rows = table("life-cycle.md", "From", "To", "Statement", "Because")
        assert [tuple(row.values()) for row in rows] == [
            ("" if each.old is None else each.old.value, each.new.value, each.statement, each.why)
            for each in TRANSITIONS
        ]

    def test_the_state_diagram_shows_each_transition_and_no_other(self) -> None:
        drawn = re.findall(r"^ +(\[\*\]|[A-Z]+) --> ([A-Z]+)$", text_of("life-cycle.md"), flags=re.MULTILINE)
        assert len(drawn) == len(set(drawn))
        assert set(drawn) == {
            ("[*]" if each.old is None else each.old.value, each.new.value) for each in TRANSITIONS
        }


class TestInternals:
    def test_every_table_and_view_is_documented(self) -> None:
        statements = "".join(
            path.read_text(encoding="utf-8") for path in (SOURCE / "sql" / "schema").rglob("*.sql")
        )
        made = re.findall(
            r"^create (?:table|view) (?:if not exists )?\{schema\}\.(\w+)", statements, flags=re.MULTILINE
        )
        rows = table("internals.md", "Table or view", "Holds", "Grows")
        assert {row["Table or view"].removesuffix(" (view)") for row in rows} == set(made)


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
        case bool() | None | UnsetType():
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
