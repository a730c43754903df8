"""Test the promises of every hint transport. It can lose, repeat or delay hints, but it must report a lost connection."""

from __future__ import annotations

import asyncio
import logging
from uuid import uuid4

import psycopg
import pytest

from everbeat.hints.topics import CancelAsked, Everything, LeaseTaken, TaskEnded, TasksReady, encode
from tests.hints.conftest import Listener, OwnServer, Wire
from tests.notify_queue import full_queue


def terminate_listeners(url: str, channel: str) -> int:
    with psycopg.connect(url, autocommit=True) as connection:
        listening = f'%LISTEN "{channel}"%'
        found = connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where query like %s and pid <> pg_backend_pid()",
            (listening,),
        ).fetchall()
        return len(found)


async def test_a_listener_reports_its_state_and_stops_promptly(any_listener: Listener, channel: str) -> None:
    async with any_listener.listening(channel) as heard:
        await heard.expect(lambda heard: heard.states != [])
    assert heard.states[-1] is False
    ended = list(heard.hints)
    await any_listener.tell(channel, "t:mail")
    await asyncio.sleep(0)  # runs the callbacks that are still scheduled
    assert heard.hints == ended


async def test_a_silent_listener_delivers_no_hints_and_reports_it(database_url: str, channel: str) -> None:
    for kind in ("silent", "silent thread"):
        listener = Listener(kind, database_url)
        async with listener.listening(channel) as heard:
            await heard.expect(lambda heard: heard.states == [False])
            await listener.tell(channel, "t:mail")
        assert heard.hints == []


async def test_a_listener_delivers_every_kind_of_hint(listener: Listener, channel: str) -> None:
    ids = tuple(uuid4() for _ in range(300))
    sent = (TasksReady("mail"), TaskEnded(ids[:100]), CancelAsked(ids[0]), LeaseTaken(ids[:2]), Everything())
    async with listener.listening(channel) as heard:
        await heard.expect_connected()
        payloads = [payload for hint in sent for payload in encode(hint)]
        await listener.tell(channel, *payloads)
        await heard.expect(lambda heard: set(sent) <= set(heard.hints))


async def test_a_connected_listener_first_hints_to_check_everything(listener: Listener, channel: str) -> None:
    async with listener.listening(channel) as heard:
        await heard.expect(lambda heard: heard.hints != [])
        assert heard.states == [True]
        assert heard.hints[0] == Everything()


async def test_a_listener_ignores_unknown_payloads(listener: Listener, channel: str) -> None:
    async with listener.listening(channel) as heard:
        await heard.expect_connected()
        await listener.tell(channel, "", "x" * 7_000, "d:1", "q:mail", "t:mail")
        await heard.expect(lambda heard: TasksReady("mail") in heard.hints)
        assert set(heard.hints) == {Everything(), TasksReady("mail")}


async def test_a_listener_ignores_other_channels(listener: Listener, channel: str) -> None:
    async with listener.listening(channel) as heard:
        await heard.expect_connected()
        await listener.tell(f"{channel}_other", "t:other")
        await listener.tell(channel, "t:mail")
        await heard.expect(lambda heard: TasksReady("mail") in heard.hints)
        assert TasksReady("other") not in heard.hints


@pytest.mark.parametrize("name", ['a"b; c', "ünïcode", "x" * 63])
async def test_a_listener_accepts_any_channel_name(listener: Listener, name: str) -> None:
    async with listener.listening(name) as heard:
        await heard.expect_connected()
        await listener.tell(name, "t:mail")
        await heard.expect(lambda heard: TasksReady("mail") in heard.hints)


async def test_callbacks_that_raise_do_not_end_the_listener(
    listener: Listener, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with listener.listening(channel, fails=True) as heard:
        await heard.expect_connected()
        await listener.tell(channel, "t:first", "t:second")
        await heard.expect(lambda heard: TasksReady("second") in heard.hints)
    assert "raised on purpose by the test" in caplog.text


async def test_a_listener_reports_a_terminated_session_and_reconnects(
    listener: Listener, database_url: str, channel: str
) -> None:
    async with listener.listening(channel) as heard:
        await heard.expect(lambda heard: heard.hints != [])
        assert await asyncio.to_thread(terminate_listeners, database_url, channel) == 1
        await heard.expect_connected(times=2)
        await heard.expect(lambda heard: heard.hints.count(Everything()) == 2)
        assert heard.states == [True, False, True]
        await listener.tell(channel, "t:mail")
        await heard.expect(lambda heard: TasksReady("mail") in heard.hints)


async def test_a_listener_retries_an_absent_server_and_logs_it_once(
    listener: Listener, own_server: OwnServer, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = own_server
    await asyncio.to_thread(server.stop)
    caplog.set_level(logging.INFO, logger="everbeat.hints")
    async with listener.listening(channel, url=server.url) as heard:
        await heard.expect(lambda heard: heard.states == [False])
        await asyncio.to_thread(server.restart)
        await heard.expect_connected()
        await asyncio.to_thread(server.restart)
        await heard.expect_connected(times=2)
        await listener.tell(channel, "t:mail", url=server.url)
        await heard.expect(lambda heard: TasksReady("mail") in heard.hints)
        assert heard.states == [False, True, False, True]
    # The NATS connection has its own event.
    records = [record for record in caplog.records if record.getMessage().startswith("hints_")]
    assert [record.levelname for record in records] == ["WARNING", "INFO", "WARNING", "INFO"]
    deaf, again = (records[0].getMessage(), records[1].getMessage())
    assert deaf.startswith(f'hints_not_heard channel={channel} problem="')
    assert again == f"hints_heard_again channel={channel}"


async def test_a_listener_stops_promptly_while_the_server_is_down(
    listener: Listener, own_server: OwnServer, channel: str
) -> None:
    server = own_server
    await asyncio.to_thread(server.stop)
    async with listener.listening(channel, url=server.url) as heard:
        await heard.expect(lambda heard: heard.states == [False])
    assert heard.states == [False]


async def test_a_listener_notices_a_silent_server(listener: Listener, wire: Wire, channel: str) -> None:
    options = {"probe_interval_s": 0.2, "reply_timeout_s": 0.5}
    async with listener.listening(channel, url=wire.url, **options) as heard:
        await heard.expect_connected()
        wire.freeze()
        await heard.expect(lambda heard: heard.states == [True, False], timeout_s=10)
        wire.thaw()
        await heard.expect_connected(times=2)


async def test_a_listener_stops_promptly_while_the_server_is_silent(
    listener: Listener, wire: Wire, channel: str
) -> None:
    async with listener.listening(channel, url=wire.url) as heard:
        await heard.expect_connected()
        wire.freeze()
    assert heard.states == [True, False]


async def test_a_listener_keeps_an_idle_connection_that_answers_probes(
    listener: Listener, wire: Wire, channel: str
) -> None:
    async with listener.listening(channel, url=wire.url, probe_interval_s=0.05) as heard:
        await heard.expect_connected()
        await asyncio.sleep(0.5)  # time for some probes, in which nothing must happen
        await listener.tell(channel, "t:mail", url=wire.url)
        await heard.expect(lambda heard: TasksReady("mail") in heard.hints)
        assert heard.states == [True]


async def test_a_listener_behind_a_pooler_reports_once_that_it_cannot_listen(
    listener: Listener, wire: Wire, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    wire.feigns_backend = True
    async with listener.listening(channel, url=wire.url) as heard:
        await heard.expect(lambda heard: heard.states != [])
        await asyncio.sleep(0.5)  # time for some attempts, in which nothing must happen
        assert wire.connections == 1
        assert heard.states == [False]
        assert heard.hints == []
    assert caplog.text.count("transaction pooler") == 1


async def test_a_full_notification_queue_and_its_end_are_reported_once_each(
    listener: Listener, small_queue: str, channel: str, caplog: pytest.LogCaptureFixture
) -> None:  # J12
    caplog.set_level(logging.INFO, logger="everbeat.hints")
    async with listener.listening(channel, url=small_queue, probe_interval_s=0.2) as heard:
        await heard.expect_connected()
        with full_queue(small_queue):
            await heard.expect(lambda heard: heard.states == [True, False])
            await asyncio.sleep(1.0)  # time for some probes, in which nothing must happen
        await heard.expect_connected(times=2)
        await listener.tell(channel, "t:mail", url=small_queue)
        await heard.expect(lambda heard: TasksReady("mail") in heard.hints)
    assert heard.states == [True, False, True, False], "the last state comes from the end of the test"
    told = [record.getMessage() for record in caplog.records if record.name == "everbeat.hints"]
    assert [line.split()[0] for line in told] == ["hints_not_heard", "hints_heard_again"]
    assert "notification queue is" in told[0]
