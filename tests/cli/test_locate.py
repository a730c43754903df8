"""Test locators: they find the app, or the error says in the user's terms why there is none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everbeat.app import App
from everbeat.cli.locate import locate
from everbeat.errors import AppNotFound, ConfigurationError, RegistrationError

APP = 'from everbeat import App\napp = App("postgresql://localhost/shop")\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield an empty working folder; modules imported from it are removed afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    "locator",
    [
        "shop_a:app",
        "shop_a",
        "shop_a.py:app",
        "./shop_a.py",
        "inner/shop_b.py:app",
        "pack_c.shop:app",
        "pack_c/shop.py",
        "shop_d:holder.app",
    ],
)
def test_a_locator_finds_the_app_of_a_module_or_file(folder: Path, locator: str) -> None:
    write(folder, "shop_a.py", APP)
    write(folder, "inner/sibling_b.py", "")
    write(folder, "inner/shop_b.py", f"import sibling_b\n{APP}")
    write(folder, "pack_c/__init__.py", "")
    write(folder, "pack_c/settings.py", "")
    write(folder, "pack_c/shop.py", f"from . import settings\n{APP}")
    write(folder, "shop_d.py", f"{APP}class holder: app = app\n")
    assert isinstance(locate(locator), App)
    assert locate(locator) is locate(locator)


def test_an_app_with_two_names_in_a_module_is_found_once(folder: Path) -> None:
    write(folder, "shop_e.py", f"{APP}celery = app\n")
    assert locate("shop_e") is locate("shop_e:celery")


@pytest.mark.parametrize(
    ("locator", "said"),
    [
        ("", "incomplete"),
        (":app", "incomplete"),
        ("shop_f:", "incomplete"),
        ("shop_g:app", r"no module 'shop_g'.*did you mean 'shop_f'"),
        ("nowhere.at.all:app", "no module 'nowhere'"),
        ("elsewhere/shop_f.py:app", "no file 'elsewhere/shop_f.py'"),
        ("shop_f:ap", r"no attribute 'ap'.*use 'shop_f:app'"),
        ("shop_f:numbr", r"no attribute 'numbr'.*use 'shop_f:app'"),
        ("shop_f:number", r"is of type int, not an App.*use 'shop_f:app'"),
        ("several_f", r"several apps: one, two.*use 'several_f:one'"),
        ("empty_f", r"contains no App.*app = App"),
        ("empty_f:app", "no attribute 'app'"),
    ],
)
def test_an_invalid_locator_is_refused_with_an_explanation(folder: Path, locator: str, said: str) -> None:
    write(folder, "shop_f.py", f"{APP}number = 5\n")
    write(folder, "several_f.py", f"{APP}one, two = app, App('postgresql://localhost/two')\ndel app\n")
    write(folder, "empty_f.py", "")
    with pytest.raises(AppNotFound, match=f"(?s){said}") as refusal:
        locate(locator)
    assert refusal.value.locator == locator
    assert refusal.value.fix


def test_a_module_that_fails_shows_the_users_part_of_its_traceback(folder: Path) -> None:
    write(folder, "broken_h.py", "def load():\n    return {}['key']\n\nload()\n")
    for locator in ("broken_h:app", "broken_h.py:app"):
        with pytest.raises(AppNotFound) as refusal:
            locate(locator)
        text = refusal.value.message
        assert "KeyError: 'key'" in text
        assert "line 4, in <module>" in text
        assert "line 2, in load" in text
        assert "importlib" not in text
        assert "cli/locate.py" not in text


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import nothing_of_this_name", "No module named 'nothing_of_this_name'"),
        ("from everbeat import Ap", "cannot import name 'Ap'"),
        ("def f(:\n", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit"),
    ],
)
def test_every_failure_inside_a_module_is_reported(folder: Path, source: str, said: str) -> None:
    write(folder, "broken_i.py", source)
    with pytest.raises(AppNotFound, match=f"(?s)Importing 'broken_i' failed.*{said}"):
        locate("broken_i:app")
    assert "broken_i" not in sys.modules


def test_an_everbeat_error_inside_a_module_is_raised_unchanged(folder: Path) -> None:
    write(
        folder,
        "wrong_j.py",
        f"{APP}from everbeat import RecoveryConfig\nRecoveryConfig(check_interval_ms=1)\n",
    )
    with pytest.raises(ConfigurationError, match=r"wrong_j.py:4.*check_interval_ms"):
        locate("wrong_j:app")
    write(
        folder, "twice_j.py", f"{APP}\n@app.task\ndef work(): ...\n@app.task(name='work')\ndef other(): ...\n"
    )
    with pytest.raises(
        RegistrationError, match=r"twice_j.py:6.*'work' is already registered, by .*twice_j.py:4"
    ):
        locate("twice_j.py:app")
