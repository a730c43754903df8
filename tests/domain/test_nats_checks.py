"""The doctor's verdicts about NATS, from given facts."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from everbeat.domain.doctor.findings import Check, CheckVerdict
from everbeat.domain.doctor.nats import NatsConnections, NatsTrouble, Outbox, StreamFacts, judge_nats

SEEN = StreamFacts(
    server="nats://host:4222",
    stream="EVERBEAT_x",
    waiting=3,
    unended=2,
    redelivered=1,
    published_at=datetime(2030, 1, 1, tzinfo=UTC),
)
SOUND = Outbox(holder="w1", waiting=0, oldest_s=None)
NO_PUBLISHER = Outbox(holder=None, waiting=0, oldest_s=None)
NO_CONNECTIONS = NatsConnections(up=0, away=0)
CONNECTED = NatsConnections(up=2, away=0)


def judged(check: Check) -> tuple[CheckVerdict, str]:
    assert (check.fix is None) == (check.verdict is CheckVerdict.OK)
    return check.verdict, check.text


def test_the_doctor_reports_a_working_nats_in_numbers() -> None:
    verdict, text = judged(judge_nats(SEEN, SOUND, CONNECTED))
    assert verdict is CheckVerdict.OK
    assert text == (
        "NATS answers at nats://host:4222: stream 'EVERBEAT_x' holds 3 messages not delivered and 2 in progress, 1 of them"
        " delivered more than once, the last one came at 2030-01-01T00:00:00+00:00; w1 publishes, NATS notifies 2 workers"
    )
    fresh = StreamFacts(server="nats://host:4222", stream="EVERBEAT_x")
    assert "no message was published yet" in judge_nats(fresh, SOUND, CONNECTED).text


def test_the_doctor_reports_that_nats_is_not_in_use() -> None:
    assert judged(judge_nats(None, None, NO_CONNECTIONS)) == (
        CheckVerdict.OK,
        "NATS is not in use: PostgreSQL notifies workers of tasks",
    )
    verdict, text = judged(judge_nats(SEEN, None, NO_CONNECTIONS))
    assert (verdict, "no worker has used it" in text) == (CheckVerdict.OK, True)


def test_the_doctor_judges_nats_by_the_database_without_a_wake_setting() -> None:
    verdict, text = judged(judge_nats(None, SOUND, CONNECTED))
    assert verdict is CheckVerdict.OK
    assert "NATS notifies 2 workers of tasks, w1 publishes; to check NATS itself" in text
    verdict, text = judged(judge_nats(None, NO_PUBLISHER, NO_CONNECTIONS))
    assert (verdict, "no longer in use" in text) == (CheckVerdict.OK, True)
    late = Outbox(holder="w1", waiting=4, oldest_s=30.0)
    assert judge_nats(None, late, CONNECTED).verdict is CheckVerdict.WARN


@pytest.mark.parametrize(("oldest_s", "verdict"), [(9.9, CheckVerdict.OK), (10.1, CheckVerdict.WARN)])
def test_the_doctor_warns_about_messages_that_stay_in_the_outbox(
    oldest_s: float, verdict: CheckVerdict
) -> None:
    late = Outbox(holder="w1", waiting=4, oldest_s=oldest_s)
    check = judge_nats(SEEN, late, CONNECTED)
    assert check.verdict is verdict
    if verdict is CheckVerdict.WARN:
        assert "4 messages due and not published, for up to 10 s" in check.text
        assert "w1 publishes" in check.text
    alone = Outbox(holder=None, waiting=10_000, oldest_s=60.0)
    assert "10,000 messages or more due" in judge_nats(SEEN, alone, CONNECTED).text


def test_the_doctor_warns_at_once_about_a_stream_that_rejects_all_messages() -> None:
    failing = Outbox(holder="w1", waiting=1, oldest_s=0.1, failing=True)
    for seen in (SEEN, None):
        verdict, text = judged(judge_nats(seen, failing, CONNECTED))
        assert verdict is CheckVerdict.WARN
        assert "rejects all messages of w1" in text


def test_the_doctor_warns_if_no_worker_publishes() -> None:
    verdict, text = judged(judge_nats(SEEN, NO_PUBLISHER, CONNECTED))
    assert (verdict, "no worker publishes" in text) == (CheckVerdict.WARN, True)


def test_the_doctor_warns_about_a_missing_stream() -> None:
    gone = StreamFacts(server="nats://host:4222", stream="EVERBEAT_x", exists=False)
    verdict, text = judged(judge_nats(gone, SOUND, CONNECTED))
    assert (verdict, "stream 'EVERBEAT_x' does not exist" in text) == (CheckVerdict.WARN, True)


def test_the_doctor_warns_about_workers_without_a_nats_connection() -> None:
    snapshots = [{"up": True}, {"up": False}, None, {"up": True, "relay": True}]
    verdict, text = judged(judge_nats(SEEN, SOUND, NatsConnections.of(snapshots)))
    assert (verdict, "1 of 3 workers" in text) == (CheckVerdict.WARN, True)


def test_the_doctor_fails_on_refused_credentials_and_warns_about_a_silent_server() -> None:
    refused = NatsTrouble(refused=True, text="NATS server x refused the user 'u'.", fix="check it.")
    assert judged(judge_nats(refused, SOUND, CONNECTED)) == (CheckVerdict.FAIL, refused.text)
    silent = NatsTrouble(refused=False, text="NATS server x does not answer.", fix="start it.")
    verdict, text = judged(judge_nats(silent, SOUND, CONNECTED))
    assert (verdict, "PostgreSQL notifies workers" in text) == (CheckVerdict.WARN, True)


FULL = StreamFacts(server="nats://host:4222", stream="EVERBEAT_x", bytes=65_400, max_bytes=65_536)


def test_the_doctor_warns_about_a_full_stream() -> None:  # N11
    verdict, text = judged(judge_nats(FULL, SOUND, CONNECTED))
    assert verdict is CheckVerdict.WARN
    assert "is full (65,400 of 65,536 bytes)" in text
    with_room = StreamFacts(server="nats://host:4222", stream="EVERBEAT_x", bytes=60_000, max_bytes=65_536)
    assert judge_nats(with_room, SOUND, CONNECTED).verdict is CheckVerdict.OK
    snapshots = [{"up": True}, {"up": True, "refusal": "maximum bytes exceeded (10077)"}]
    for seen in (SEEN, None):
        verdict, text = judged(judge_nats(seen, SOUND, NatsConnections.of(snapshots)))
        assert (verdict, "maximum bytes exceeded" in text) == (CheckVerdict.WARN, True)


def test_the_doctor_names_foreign_and_changed_consumers() -> None:
    strange = StreamFacts(
        server="nats://host:4222",
        stream="EVERBEAT_x",
        foreign=("'theirs' (takes everbeat.x.mail)",),
        altered=("'default': max_deliver is 3, not -1",),
        undeliverable=7,
    )
    verdict, text = judged(judge_nats(strange, SOUND, CONNECTED))
    assert verdict is CheckVerdict.WARN
    assert "'theirs' (takes everbeat.x.mail)" in text
    assert "'default': max_deliver is 3, not -1" in text
    assert "no consumer delivers 7 messages" in text


def test_the_doctor_names_queues_without_a_consumer_and_the_reason() -> None:
    snapshots = [{"up": True, "refused": {f"q{n}": "not unique" for n in range(7)}}]
    for seen in (SEEN, None):
        verdict, text = judged(judge_nats(seen, SOUND, NatsConnections.of(snapshots)))
        assert verdict is CheckVerdict.WARN
        assert "'q0' (not unique)" in text
        assert "and 2 more" in text


def test_the_doctor_names_permissions_that_workers_lack() -> None:
    said = 'permissions violation for publish to "everbeat.x.mail"'
    for seen in (SEEN, None):
        verdict, text = judged(
            judge_nats(seen, SOUND, NatsConnections.of([{"up": True, "denied": [said]}, {"up": True}]))
        )
        assert (verdict, said in text) == (CheckVerdict.WARN, True)


def test_the_doctor_names_queues_whose_messages_no_worker_takes_without_a_warning() -> None:
    verdict, text = judged(judge_nats(SEEN, SOUND, NatsConnections.of([{"up": True, "not_taken": ["mail"]}])))
    assert (
        verdict,
        "no worker takes messages of these queues, so PostgreSQL notifies workers of their tasks: 'mail'"
        in text,
    ) == (CheckVerdict.OK, True)
