"""Test names in the stream: one token for each queue, unique and the same in every program."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from everbeat.nats.options import NatsConfig
from everbeat.nats.stream_plan import LONGEST_TOKEN, StreamPlan, token

NAMES = st.text(max_size=300)


def plan(schema: str = "jobs", **settings: object) -> StreamPlan:
    return StreamPlan(schema, NatsConfig(servers=["nats://host"], **settings), 2.0)  # type: ignore[arg-type]


@given(NAMES)
def test_every_queue_name_becomes_one_short_token(name: str) -> None:
    found = token(name)
    assert re.fullmatch(r"[A-Za-z0-9_%-]+", found)
    assert len(found) <= LONGEST_TOKEN


@given(st.lists(NAMES, unique=True, max_size=20))
def test_different_queue_names_become_different_tokens(names: list[str]) -> None:
    assert len({token(name) for name in names}) == len(names)


def test_queue_names_that_look_like_escapes_become_different_tokens() -> None:
    names = ["a.b", "a%2Eb", "a%252Eb", "", "%h", "x" * 120, "x" * 121, "x" * 122, token("x" * 121)]
    assert len({token(name) for name in names}) == len(names)


def test_names_in_the_stream_are_stable_across_programs() -> None:
    found = plan("jobs")
    assert found.stream == "EVERBEAT_jobs"
    assert found.subjects == "everbeat.jobs.*"
    assert found.subject("mail.bulk") == "everbeat.jobs.mail%2Ebulk"
    assert found.consumer("mail.bulk") == "mail%2Ebulk"
    assert found.message_id("7.0") == "jobs.7.0"


def test_a_stream_with_another_name_has_its_own_subjects() -> None:
    own = plan("jobs", stream="jobs")
    assert own.stream == "jobs"
    assert own.subjects == "everbeat.jobs@jobs.*"


def test_a_stream_created_by_another_program_or_schema_is_foreign() -> None:
    ours = plan()
    settings = ours.stream_settings()
    assert ours.foreign(settings) is None
    assert not ours.differs(settings)
    assert not ours.differs({**settings, "metadata": {**settings["metadata"], "_nats.ver": "2.15"}})
    assert ours.foreign({**settings, "metadata": None}) is None  # an old server stores no metadata
    assert "everbeat did not create it" in str(
        ours.foreign({**settings, "metadata": None, "description": ""})
    )
    assert "schema 'other'" in str(ours.foreign(plan("other").stream_settings()))
    assert "retention" in str(ours.foreign({**settings, "retention": "limits"}))
    assert "subjects" in str(ours.foreign({**settings, "subjects": ["a"]}))
    assert ours.differs(plan(max_bytes="1MB").stream_settings())
