"""What the doctor thinks of NATS, by the facts."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from everbeat.domain.diagnosis import Check, Verdict
from everbeat.domain.nats_checks import NatsTrouble, Outbox, StreamFacts, Told, judge_nats

SEEN = StreamFacts(
    server="nats://host:4222",
    stream="EVERBEAT_x",
    waiting=3,
    unended=2,
    redelivered=1,
    published_at=datetime(2030, 1, 1, tzinfo=UTC),
)
SOUND = Outbox(holder="w1", waiting=0, oldest_s=None)
NOBODY = Outbox(holder=None, waiting=0, oldest_s=None)
NONE_TOLD = Told(up=0, away=0)
TOLD = Told(up=2, away=0)


def judged(check: Check) -> tuple[Verdict, str]:
    assert (check.fix is None) == (check.verdict is Verdict.OK)
    return check.verdict, check.text


def test_what_works_is_told_in_numbers() -> None:
    verdict, text = judged(judge_nats(SEEN, SOUND, TOLD))
    assert verdict is Verdict.OK
    assert text == (
        "NATS answers at nats://host:4222: stream 'EVERBEAT_x' holds 3 messages not delivered and 2 under way, 1 of them"
        " delivered more than once, the last one came at 2030-01-01T00:00:00+00:00; w1 publishes, NATS tells 2 workers"
    )
    fresh = StreamFacts(server="nats://host:4222", stream="EVERBEAT_x")
    assert "nothing was published yet" in judge_nats(fresh, SOUND, TOLD).text


def test_who_never_used_messages_is_told_so() -> None:
    assert judged(judge_nats(None, None, NONE_TOLD)) == (
        Verdict.OK,
        "messages are not in use: PostgreSQL tells workers of tasks",
    )
    verdict, text = judged(judge_nats(SEEN, None, NONE_TOLD))
    assert (verdict, "no worker has used it" in text) == (Verdict.OK, True)


def test_an_app_without_wake_sees_what_the_database_says() -> None:
    verdict, text = judged(judge_nats(None, SOUND, TOLD))
    assert verdict is Verdict.OK
    assert "NATS tells 2 workers of tasks, w1 publishes; NATS itself was not asked" in text
    verdict, text = judged(judge_nats(None, NOBODY, NONE_TOLD))
    assert (verdict, "were in use" in text) == (Verdict.OK, True)
    late = Outbox(holder="w1", waiting=4, oldest_s=30.0)
    assert judge_nats(None, late, TOLD).verdict is Verdict.WARN


@pytest.mark.parametrize(("oldest_s", "verdict"), [(9.9, Verdict.OK), (10.1, Verdict.WARN)])
def test_messages_that_wait_for_long_are_a_warning(oldest_s: float, verdict: Verdict) -> None:
    late = Outbox(holder="w1", waiting=4, oldest_s=oldest_s)
    check = judge_nats(SEEN, late, TOLD)
    assert check.verdict is verdict
    if verdict is Verdict.WARN:
        assert "4 messages due and not published, for up to 10 s" in check.text
        assert "w1 publishes" in check.text
    alone = Outbox(holder=None, waiting=10_000, oldest_s=60.0)
    assert "10,000 messages or more due" in judge_nats(SEEN, alone, TOLD).text


def test_a_stream_that_takes_nothing_is_a_warning_at_once() -> None:
    failing = Outbox(holder="w1", waiting=1, oldest_s=0.1, failing=True)
    for seen in (SEEN, None):
        verdict, text = judged(judge_nats(seen, failing, TOLD))
        assert verdict is Verdict.WARN
        assert "takes none of the messages of w1" in text


def test_nobody_who_publishes_is_a_warning() -> None:
    verdict, text = judged(judge_nats(SEEN, NOBODY, TOLD))
    assert (verdict, "no worker publishes" in text) == (Verdict.WARN, True)


def test_a_stream_that_is_gone_is_a_warning() -> None:
    gone = StreamFacts(server="nats://host:4222", stream="EVERBEAT_x", exists=False)
    verdict, text = judged(judge_nats(gone, SOUND, TOLD))
    assert (verdict, "stream 'EVERBEAT_x' is gone" in text) == (Verdict.WARN, True)


def test_workers_that_are_cut_off_are_a_warning() -> None:
    snapshots = [{"up": True}, {"up": False}, None, {"up": True, "relay": True}]
    verdict, text = judged(judge_nats(SEEN, SOUND, Told.of(snapshots)))
    assert (verdict, "1 of 3 workers" in text) == (Verdict.WARN, True)


def test_a_refusal_fails_and_silence_warns() -> None:
    refused = NatsTrouble(refused=True, text="NATS server x refused the user 'u'.", fix="check it.")
    assert judged(judge_nats(refused, SOUND, TOLD)) == (Verdict.FAIL, refused.text)
    silent = NatsTrouble(refused=False, text="NATS server x does not answer.", fix="start it.")
    verdict, text = judged(judge_nats(silent, SOUND, TOLD))
    assert (verdict, "PostgreSQL tells workers" in text) == (Verdict.WARN, True)


FULL = StreamFacts(server="nats://host:4222", stream="EVERBEAT_x", bytes=65_400, max_bytes=65_536)


def test_a_full_stream_is_a_warning() -> None:  # N11
    verdict, text = judged(judge_nats(FULL, SOUND, TOLD))
    assert verdict is Verdict.WARN
    assert "is full (65,400 of 65,536 bytes)" in text
    with_room = StreamFacts(server="nats://host:4222", stream="EVERBEAT_x", bytes=60_000, max_bytes=65_536)
    assert judge_nats(with_room, SOUND, TOLD).verdict is Verdict.OK
    snapshots = [{"up": True}, {"up": True, "refusal": "maximum bytes exceeded (10077)"}]
    for seen in (SEEN, None):
        verdict, text = judged(judge_nats(seen, SOUND, Told.of(snapshots)))
        assert (verdict, "maximum bytes exceeded" in text) == (Verdict.WARN, True)


def test_consumers_of_others_and_changed_ones_are_named() -> None:
    strange = StreamFacts(
        server="nats://host:4222",
        stream="EVERBEAT_x",
        foreign=("'theirs' (takes everbeat.x.mail)",),
        altered=("'default': max_deliver is 3, not -1",),
        undeliverable=7,
    )
    verdict, text = judged(judge_nats(strange, SOUND, TOLD))
    assert verdict is Verdict.WARN
    assert "'theirs' (takes everbeat.x.mail)" in text
    assert "'default': max_deliver is 3, not -1" in text
    assert "no consumer delivers 7 messages" in text


def test_queues_without_a_consumer_are_named_with_the_reason() -> None:
    snapshots = [{"up": True, "refused": {f"q{n}": "not unique" for n in range(7)}}]
    for seen in (SEEN, None):
        verdict, text = judged(judge_nats(seen, SOUND, Told.of(snapshots)))
        assert verdict is Verdict.WARN
        assert "'q0' (not unique)" in text
        assert "and 2 more" in text


def test_queues_whose_messages_nobody_takes_are_named_and_no_fault() -> None:
    verdict, text = judged(judge_nats(SEEN, SOUND, Told.of([{"up": True, "not_taken": ["mail"]}])))
    assert (verdict, "whose messages nobody takes: 'mail'" in text) == (Verdict.OK, True)
