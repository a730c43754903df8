"""URLs as users write them: those of other libraries work, and no password is ever shown."""

from __future__ import annotations

import logging
import traceback
from typing import Any

import psycopg
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from everbeat import App
from everbeat.errors import ConfigurationError, EverbeatError, WrongDatabaseURL
from everbeat.nats.options import NatsConfig
from everbeat.store.address import DatabaseAddress
from everbeat.store.target import Target

FIRST, SECOND = "alphaSECRET", "SECRETomega"
ODD = st.sampled_from([*"@/:?#%&='\\\" ,;[]$!+\t", "%40", "%zz", "@@", "//", "://", "", "é", "\n"])
USER = st.sampled_from(["user", "user@realm", ""])
PLACE = st.sampled_from(
    ["host:5432/db", "host/db", "a:1,b:2/db", "host", "/db", "[::1]:5432/db", "", "127.0.0.1:1/db"]
)
SCHEME = st.sampled_from(
    ["postgresql://", "postgres://", "postgresql+psycopg://", "postgresql+asyncpg://", "postgre://", "POSTGRESQL://", "mysql://", "jdbc:postgresql://",
     "", "//", "postgresql:/", "postgresql:", " postgresql://", "sqlite+aiosqlite://", "embeded://", "embedded:"]
)  # fmt: skip
FORM = st.sampled_from(
    [
        "{scheme}{user}:{secret}@{place}", "{scheme}{user}:{secret}@@{place}", "{scheme}{place}?user={user}&password={secret}",
        "{scheme}{user}@{place}?sslpassword={secret}&sslkey=x", "{scheme}{user}@{place}?pasword={secret}",
        "{scheme}{user}:{secret}@{place}?pooler=none", "{scheme}{user}:{secret}@{place}?prot=1", "{scheme}{user}:{secret}",
        "host=host user={user} password={secret}", "host=host password='{secret}' dbname=db", "password = {secret} host=host",
        "host=host password='{secret}", "host=host passwrd={secret}", "host=host;password={secret}",
        "user={user} password={secret} pooler=transaction",
    ]
)  # fmt: skip


@st.composite
def urls(draw: st.DrawFn) -> str:
    secret = f"{FIRST}{draw(ODD)}{draw(ODD)}{SECOND}"
    form = draw(FORM)
    # Without a host, the part of a password after an @ is parsed as a host.
    assume(not (form.endswith("{user}:{secret}") and "@" in secret))
    return form.format(scheme=draw(SCHEME), user=draw(USER), place=draw(PLACE), secret=secret)


def shows_no_secret(text: str) -> bool:
    return "SECRET" not in text.upper()


@given(url=urls())
def test_no_error_and_no_repr_shows_a_database_password(url: str) -> None:
    try:
        target = Target.parse(url)
        address = DatabaseAddress.parse(url, schema="everbeat", environment={})
    except EverbeatError as problem:
        error = problem
        assert shows_no_secret("".join(traceback.format_exception(error)).replace(url, ""))
        assert shows_no_secret(f"{error!r} {error} {error.fix}")
    else:
        said = psycopg.OperationalError(f"cannot log in with {target.url} and {_password(target)}")
        for shown in (
            repr(target),
            target.shown,
            repr(address),
            repr([target, address]),
            _without_url(target, said),
        ):
            assert shows_no_secret(shown)


@given(url=urls())
def test_no_error_of_a_nats_url_shows_a_password(url: str) -> None:
    wake = url.replace("postgresql", "nats").replace("postgres", "tls")
    try:
        shown = repr(NatsConfig.parse(wake))
    except ConfigurationError as error:
        shown = f"{error!r} {error}"
    assert shows_no_secret(shown)


@pytest.mark.parametrize("secret", ["hunterSECRET2", "p@SECRET", "SECRET/1", "SECRET 1", "100%SECRET"])
def test_a_failed_connection_shows_no_password(secret: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for url in (
        f"postgresql://user:{secret}@127.0.0.1:1/db",
        f"host=127.0.0.1 port=1 password={secret}",
        f"postgresql://127.0.0.1:1/db?password={secret}&sslpassword={secret}",
    ):
        with pytest.raises(EverbeatError) as refusal:
            App(url, patience="100ms").send_by_name("work")
        shown = "".join(traceback.format_exception(refusal.value))
        assert shows_no_secret(shown), shown
    assert shows_no_secret(caplog.text)


@pytest.mark.parametrize(
    "scheme", ["postgresql+psycopg", "postgresql+asyncpg", "postgresql+psycopg2", "postgres", "POSTGRESQL"]
)
def test_urls_of_other_libraries_are_accepted(scheme: str) -> None:
    target = Target.parse(f" {scheme}://user:p%40ss@db.example.org:5433/app?sslmode=require ")
    read = psycopg.conninfo.conninfo_to_dict(target.url)
    assert read == {
        "user": "user", "password": "p@ss", "host": "db.example.org", "port": "5433", "dbname": "app", "sslmode": "require",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:hunter2@h:5432/d", "postgresql://u@h:5432/d"),
        ("postgres://u:hunter2@a:1,b:2/d?sslmode=require", "postgresql://u@a:1,b:2/d"),
        ("postgresql://u:hunter2%40@[::1]/d", "postgresql://u@[::1]/d"),
        ("postgresql:///d?host=/tmp&port=5433", "postgresql:///d?host=/tmp&port=5433"),
        ("host=h password=hunter2 user=u", "postgresql://u@h/"),
        ("user=a:hunter2 host=h", "postgresql://***@h/"),
    ],
)
def test_a_url_is_shown_by_its_host_port_and_database(url: str, shown: str) -> None:
    assert Target.parse(url).shown == shown


@pytest.mark.parametrize(
    ("url", "fix"),
    [
        ("postgresql://u:a@b@h/d", "%40"),
        ("postgresql://u:a/b@h/d", "%2F"),
        ("postgresql://u:100%@h/d", "%25"),
        ("host=h prot=1", "did you mean 'port'"),
        ("postgresql://h/d?pasword=x", "did you mean 'password'"),
        ("postgresql://h/d?pooler=statement", "pooler=session or pooler=transaction"),
        ("postgresql://h:99999/d", "5432"),
        ("mysql://h/d", "postgresql://"),
    ],
)
def test_an_invalid_url_is_rejected_with_a_fix(url: str, fix: str) -> None:
    with pytest.raises(WrongDatabaseURL) as refusal:
        Target.parse(url)
    assert fix in str(refusal.value)


@pytest.mark.parametrize(
    ("url", "read", "pooler"),
    [
        ("postgresql://h/d?pooler=session", "postgresql://h/d", "session"),
        ("postgresql://h/d?pooler=session&sslmode=disable", "postgresql://h/d?sslmode=disable", "session"),
        (
            "postgresql://h/d?sslmode=disable&pooler=transaction",
            "postgresql://h/d?sslmode=disable",
            "transaction",
        ),
        ("host=h pooler=session dbname=d", "host=h dbname=d", "session"),
        ("pooler=session host=h", "host=h", "session"),
        ("postgresql://h/d", "postgresql://h/d", None),
    ],
)
def test_a_url_can_name_the_kind_of_pooler(url: str, read: str, pooler: str | None) -> None:
    target = Target.parse(url)
    assert (target.url, target.pooler) == (read, pooler)
    assert Target.parse(target.portable) == target, "other processes parse it the same way"


@pytest.mark.parametrize(
    "name", ["public", "PUBLIC", "information_schema", "pg_temp", "ever$beat", "$", "1a", "", "a" * 64, 5]
)
def test_a_schema_name_that_everbeat_cannot_use_is_rejected(name: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"App\.schema"):
        Target.parse("postgresql://h/d", schema=name)


def _password(target: Target) -> object:
    return psycopg.conninfo.conninfo_to_dict(target.url).get("password", "")


def _without_url(target: Target, problem: psycopg.Error) -> str:
    return str(target.explain(psycopg.OperationalError(str(problem).replace(target.url, ""))))
