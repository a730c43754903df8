"""What every transport of hints keeps. Lost, repeated and late hints are legal; silence without a word is not."""

from __future__ import annotations

import asyncio
import logging
from uuid import uuid4

import psycopg
import pytest

from everbeat.wake.topics import CancelAsked, Everything, LeaseLost, TaskEnded, TasksReady, encode
from tests.notify_queue import full_queue
from tests.wake.conftest import BadLine, Listener, OwnServer, Wire


def terminate_listeners(url: str, channel: str) -> int:
    with psycopg.connect(url, autocommit=True) as connection:
        listening = f'%LISTEN "{channel}"%'
        found = connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where query like %s and pid <> pg_backend_pid()",
            (listening,),
        ).fetchall()
        return len(found)


async def test_the_state_is_told_and_the_end_is_prompt(any_listener: Listener, channel: str) -> None:
    async with any_listener.listening(channel) as heard:
        await heard.expect(lambda heard: heard.states != [])
    assert heard.states[-1] is False
    ended = list(heard.hints)
    await any_listener.tell(channel, "t:mail")
    await asyncio.sleep(0)  # what was still scheduled is told now
    assert heard.hints == ended


async def test_a_silent_wake_hears_nothing_and_says_so(database_url: str, channel: str) -> None:
    for kind in ("silent", "silent thread"):
        listener = Listener(kind, database_url)
        async with listener.listening(channel) as heard:
            await heard.expect(lambda heard: heard.states == [False])
            await listener.tell(channel, "t:mail")
        assert heard.hints == []


async def test_every_kind_of_hint_arrives(postgres_listener: Listener, channel: str) -> None:
    ids = tuple(uuid4() for _ in range(300))
    sent = (TasksReady("mail"), TaskEnded(ids[:100]), CancelAsked(ids[0]), LeaseLost(ids[:2]), Everything())
    async with postgres_listener.listening(channel) as heard:
        await heard.expect_connected()
        payloads = [payload for hint in sent for payload in encode(hint)]
        await postgres_listener.tell(channel, *payloads)
        await heard.expect(lambda heard: set(sent) <= set(heard.hints))


async def test_the_first_hint_is_to_look_at_everything(listener: Listener, channel: str) -> None:
    async with listener.listening(channel) as heard:
        await heard.expect(lambda heard: heard.hints != [])
        assert heard.states == [True]
        assert heard.hints[0] == Everything()


async def test_what_is_not_understood_is_ignored(listener: Listener, channel: str) -> None:
    async with listener.listening(channel) as heard:
        await heard.expect_connected()
        await listener.tell(channel, "", "x" * 7_000, "d:1", "q:mail", "t:mail")
        await heard.expect(lambda heard: TasksReady("mail") in heard.hints)
        assert set(heard.hints) == {Everything(), TasksReady("mail")}


async def test_other_channels_are_not_heard(listener: Listener, channel: str) -> None:
    async with listener.listening(channel) as heard:
        await heard.expect_connected()
        await listener.tell(f"{channel}_other", "t:other")
        await listener.tell(channel, "t:mail")
        await heard.expect(lambda heard: TasksReady("mail") in heard.hints)
        assert TasksReady("other") not in heard.hints


@pytest.mark.parametrize("name", ['a"b; c', "ünïcode", "x" * 63])
async def test_any_channel_name_works(listener: Listener, name: str) -> None:
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
    assert "meant by the test" in caplog.text


async def test_a_terminated_session_is_told_and_made_anew(
    postgres_listener: Listener, database_url: str, channel: str
) -> None:
    async with postgres_listener.listening(channel) as heard:
        await heard.expect(lambda heard: heard.hints != [])
        assert await asyncio.to_thread(terminate_listeners, database_url, channel) == 1
        await heard.expect_connected(times=2)
        await heard.expect(lambda heard: heard.hints.count(Everything()) == 2)
        assert heard.states == [True, False, True]
        await postgres_listener.tell(channel, "t:mail")
        await heard.expect(lambda heard: TasksReady("mail") in heard.hints)


async def test_a_server_that_is_away_is_awaited_for_ever_and_complained_about_once(
    listener: Listener, own_server: OwnServer, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = own_server
    await asyncio.to_thread(server.stop)
    caplog.set_level(logging.INFO, logger="everbeat.wake")
    async with listener.listening(channel, url=server.url) as heard:
        await heard.expect(lambda heard: heard.states == [False])
        await asyncio.to_thread(server.restart)
        await heard.expect_connected()
        await asyncio.to_thread(server.restart)
        await heard.expect_connected(times=2)
        await listener.tell(channel, "t:mail", url=server.url)
        await heard.expect(lambda heard: TasksReady("mail") in heard.hints)
        assert heard.states == [False, True, False, True]
    # The link to NATS has an event of its own.
    records = [record for record in caplog.records if record.getMessage().startswith("hints_")]
    assert [record.levelname for record in records] == ["WARNING", "INFO", "WARNING", "INFO"]
    deaf, again = (records[0].getMessage(), records[1].getMessage())
    assert deaf.startswith(f'hints_not_heard channel={channel} problem="')
    assert again == f"hints_heard_again channel={channel}"


async def test_the_end_is_prompt_while_nobody_answers(
    listener: Listener, own_server: OwnServer, channel: str
) -> None:
    server = own_server
    await asyncio.to_thread(server.stop)
    async with listener.listening(channel, url=server.url) as heard:
        await heard.expect(lambda heard: heard.states == [False])
    assert heard.states == [False]


async def test_a_peer_that_fell_silent_is_noticed(
    listener: Listener, bad_line: BadLine, channel: str
) -> None:
    options = {"probe_interval_s": 0.2, "reply_timeout_s": 0.5}
    async with listener.listening(channel, url=bad_line.url, **options) as heard:
        await heard.expect_connected()
        bad_line.freeze()
        await heard.expect(lambda heard: heard.states == [True, False], timeout_s=10)
        bad_line.thaw()
        await heard.expect_connected(times=2)


async def test_the_end_is_prompt_while_the_peer_is_silent(
    listener: Listener, bad_line: BadLine, channel: str
) -> None:
    async with listener.listening(channel, url=bad_line.url) as heard:
        await heard.expect_connected()
        bad_line.freeze()
    assert heard.states == [True, False]


async def test_a_quiet_connection_that_answers_is_kept(
    listener: Listener, bad_line: BadLine, channel: str
) -> None:
    async with listener.listening(channel, url=bad_line.url, probe_interval_s=0.05) as heard:
        await heard.expect_connected()
        await asyncio.sleep(0.5)  # only time can show that nothing happens in it: some probes go by
        await listener.tell(channel, "t:mail", url=bad_line.url)
        await heard.expect(lambda heard: TasksReady("mail") in heard.hints)
        assert heard.states == [True]


async def test_behind_a_pooler_the_listener_says_once_that_it_is_deaf_and_stays_so(
    postgres_listener: Listener, wire: Wire, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    wire.feigns_backend = True
    async with postgres_listener.listening(channel, url=wire.url) as heard:
        await heard.expect(lambda heard: heard.states != [])
        await asyncio.sleep(0.5)  # only time can show that nothing happens in it: some attempts would go by
        assert wire.connections == 1
        assert heard.states == [False]
        assert heard.hints == []
    assert caplog.text.count("transaction pooler") == 1


async def test_a_full_queue_of_notifications_is_told_once_and_so_is_its_end(
    postgres_listener: Listener, small_queue: str, channel: str, caplog: pytest.LogCaptureFixture
) -> None:  # J12
    caplog.set_level(logging.INFO, logger="everbeat.wake")
    async with postgres_listener.listening(channel, url=small_queue, probe_interval_s=0.2) as heard:
        await heard.expect_connected()
        with full_queue(small_queue):
            await heard.expect(lambda heard: heard.states == [True, False])
            await asyncio.sleep(1.0)  # only time can show that nothing happens in it: some probes go by
        await heard.expect_connected(times=2)
        await postgres_listener.tell(channel, "t:mail", url=small_queue)
        await heard.expect(lambda heard: TasksReady("mail") in heard.hints)
    assert heard.states == [True, False, True, False], "the last one is the end of the test"
    told = [record.getMessage() for record in caplog.records if record.name == "everbeat.wake"]
    assert [line.split()[0] for line in told] == ["hints_not_heard", "hints_heard_again"]
    assert "queue of notifications is" in told[0]
