"""The stream at a real server: made, mended, refused where it is somebody else's; and a link that comes back by itself."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from uuid import uuid4

import nkeys
import pytest

from everbeat.errors import NatsError, NatsRefused, NatsUnreachable
from everbeat.wake.jetstream import check
from everbeat.wake.options import NatsConfig
from everbeat.wake.stream_plan import StreamPlan
from tests.nats_cluster import NatsCluster
from tests.nats_server import NatsServer, free_port
from tests.nats_tls import TlsFiles
from tests.wake.stream_fixtures import message, messages, plan_for, running, tapped

NOTICED_S = 6.0


async def refusal(plan: StreamPlan, kind: type[NatsError] = NatsRefused) -> str:
    """What `check` says, which it says within 6 s."""
    async with asyncio.timeout(6):
        with pytest.raises(kind) as refused:
            await check(plan, plan.config)
    assert type(refused.value) is kind
    assert refused.value.fix
    assert "SECRET" not in str(refused.value)
    return str(refused.value)


async def test_stream_and_consumers_are_made_as_planned(shared_nats: NatsServer) -> None:
    plan = plan_for(shared_nats.url, 'a"b; ünï.*>', ack_wait_s=1.5, max_bytes="1MB")
    await check(plan, plan.config)
    async with running(plan) as run:
        await run.published(message("mail.x"), message("> *", 2))
        found = await shared_nats.counters(plan.stream)
        assert not plan.differs(found.config)
        assert found.config["retention"] == "workqueue"
        assert found.config["discard"] == "new"
        assert set(found.consumers) == {"mail%2Ex", "%3E%20%2A"}
        listed = await shared_nats.ask(f"CONSUMER.INFO.{plan.stream}.mail%2Ex")
        assert listed["config"]["ack_wait"] == 1_500_000_000
        assert listed["config"]["filter_subject"] == plan.subject("mail.x")
        assert listed["config"].get("max_deliver", -1) == -1


async def test_a_stream_of_ours_that_is_set_otherwise_is_changed(shared_nats: NatsServer) -> None:
    old = plan_for(shared_nats.url, ack_wait_s=5)
    async with running(old) as run:
        await run.published(message())
    new = StreamPlan(old.schema, old.config.replace(max_bytes="2MB"), 7.0)
    async with running(new) as run:
        await run.published(message(number=2))
    found = await shared_nats.counters(new.stream)
    assert found.config["max_bytes"] == 2 << 20
    assert found.messages == 2
    assert (await shared_nats.ask(f"CONSUMER.INFO.{new.stream}.mail"))["config"]["ack_wait"] == 7_000_000_000


async def test_what_is_published_twice_with_one_id_is_there_once(shared_nats: NatsServer) -> None:
    async with running(plan_for(shared_nats.url)) as run:
        sent = messages(250)
        places = await run.carrier.publish(sent)
        assert await run.carrier.publish(sent) == places
        assert len(set(places)) == 250
        assert (await shared_nats.counters(run.plan.stream)).messages == 250
        again = message(number=1, times=1)
        assert await run.carrier.publish([again]) != places[:1]


async def test_a_recovery_says_so_in_the_headers(shared_nats: NatsServer) -> None:
    async with running(plan_for(shared_nats.url)) as run:
        sent = message(cleared=True, reason="HEARTBEAT_LOST", times=1, fence=3)
        (place,) = await run.published(sent)
        async with shared_nats.connected() as client:
            found = await client.jetstream().get_msg(run.plan.stream, place)
        assert found.headers == {
            "Nats-Msg-Id": f"{run.plan.schema}.1.1",
            "Everbeat-Task": str(sent.task_id),
            "cleared": "true",
            "clear_reason": "HEARTBEAT_LOST",
        }


async def test_what_is_not_there_any_more_is_missing(shared_nats: NatsServer) -> None:
    async with running(plan_for(shared_nats.url)) as run:
        sent = messages(3)
        places = await run.published(*sent)
        tasks = {place: each.task_id for place, each in zip(places, sent, strict=True)}
        assert await run.carrier.missing(tasks) == set()
        await shared_nats.delete_message(run.plan.stream, places[1])
        assert await run.carrier.missing(tasks) == {places[1]}
        assert await run.carrier.missing({places[0]: uuid4()}) == {places[0]}
        await shared_nats.delete_stream(run.plan.stream)
        assert await run.carrier.missing(tasks) == set(places)
        await run.published(message(number=9))
        assert await run.carrier.missing(tasks) == set(places)


async def test_states_count_what_waits_and_what_is_under_way(shared_nats: NatsServer) -> None:
    async with running(plan_for(shared_nats.url)) as run:
        places = await run.published(*messages(3))
        found = await run.carrier.states(["mail", "unknown"])
        assert set(found) == {"mail"}
        assert (found["mail"].waiting, found["mail"].unended, found["mail"].published) == (3, 0, places[-1])
        await tapped(run.carrier, room=2).expect(2)
        found = await run.carrier.states(["mail"])
        assert (found["mail"].waiting, found["mail"].unended) == (1, 2)


async def test_while_the_server_is_away_nothing_is_published_and_nobody_waits(
    nats_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    nats_server.kill()
    caplog.set_level(logging.INFO)
    async with running(plan_for(nats_server.url), up=False) as run:
        await run.expect_down()
        assert run.states == [False]
        before = time.monotonic()
        assert await run.carrier.publish(messages(3)) == [None] * 3
        assert time.monotonic() - before < 1
        with pytest.raises(ConnectionError):
            await run.carrier.missing({1: uuid4()})
        with pytest.raises(ConnectionError):
            await run.carrier.states(["mail"])
        nats_server.start()
        await run.expect_up()
        await run.published(message())
        nats_server.restart(kill=True)
        await run.expect_up(times=2)
        assert run.states == [False, True, False, True]
        assert await run.carrier.publish([message()]) != [None]
    assert {record.name for record in caplog.records} <= {"everbeat.wake"}
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING", "INFO"]
    assert "Traceback" not in caplog.text


async def test_a_deleted_stream_is_made_again_by_the_next_publication(shared_nats: NatsServer) -> None:
    async with running(plan_for(shared_nats.url)) as run:
        (first,) = await run.published(message())
        await shared_nats.delete_stream(run.plan.stream)
        (second,) = await run.carrier.publish([message(number=2)])
        assert second not in (None, first)
        assert run.states == [True]


async def test_a_server_that_lost_its_store_gets_stream_and_consumers_again(nats_server: NatsServer) -> None:
    async with running(plan_for(nats_server.url)) as run:
        tap = tapped(run.carrier)
        places = await run.published(*messages(3))
        await tap.expect(3)
        nats_server.restart(empty=True)
        await run.expect_up(times=2)
        sent = messages(3, first=10)
        assert not set(await run.published(*sent)) & set(places)
        for old in tap.deliveries[:3]:
            old.ack()  # of a stream that is no more: it must not take a message of the new one
        await tap.expect(6)
        assert sorted(tap.numbers[3:]) == [10, 11, 12]
        assert (await nats_server.counters(run.plan.stream)).messages == 3


async def test_a_frozen_server_is_noticed_and_its_return_too(nats_server: NatsServer) -> None:
    async with running(plan_for(nats_server.url)) as run:
        tap = tapped(run.carrier)
        await run.published(message())
        await tap.expect(1)
        nats_server.freeze()
        before = time.monotonic()
        tap.deliveries[0].ack()
        assert await run.carrier.publish([message(number=2)]) == [None]
        assert time.monotonic() - before < NOTICED_S
        await run.expect_down(timeout_s=NOTICED_S)
        nats_server.thaw()
        await run.expect_up(times=2)
        await run.published(message(number=2))
        await tap.expect(2)
        # What was said in vain was said again: only the second is left.
        assert [each.times for each in tap.deliveries] == [1, 1]
        assert (await nats_server.counters(run.plan.stream)).messages == 1


@pytest.mark.parametrize("changed", ["description", "schema", "retention", "subjects"])
async def test_a_stream_of_somebody_else_is_not_touched(shared_nats: NatsServer, changed: str) -> None:
    plan = plan_for(shared_nats.url)
    settings = plan.stream_settings()
    other = {
        "description": {"description": "mine", "metadata": {}},
        "schema": {"metadata": {"everbeat": "hints", "everbeat.schema": "other"}},
        "retention": {"retention": "limits"},
        "subjects": {"subjects": [f"everbeat.{plan.schema}.a"]},
    }[changed]
    made = await shared_nats.ask(f"STREAM.CREATE.{plan.stream}", {**settings, **other})
    told = await refusal(plan)
    assert plan.stream in told
    async with running(plan, up=False) as run:
        await run.expect_down()
        assert await run.carrier.publish([message()]) == [None]
    assert (await shared_nats.counters(plan.stream)).config == made["config"]


async def test_subjects_that_another_stream_takes_are_refused(shared_nats: NatsServer) -> None:
    plan = plan_for(shared_nats.url)
    await shared_nats.add_stream(f"other_{plan.schema}", [plan.subjects])
    assert "overlap" in await refusal(plan)


async def test_replicas_need_a_cluster(shared_nats: NatsServer) -> None:
    assert "replicas" in await refusal(plan_for(shared_nats.url, replicas=3))


async def test_a_wrong_password_or_token_is_refused() -> None:
    with NatsServer(user="me", password="p@ss/w:rd") as server:
        address = server.address
        await check(
            plan_for(f"nats://me:p%40ss%2Fw%3Ard@{address}"),
            NatsConfig.parse(f"nats://me:p%40ss%2Fw%3Ard@{address}"),
        )  # type: ignore[arg-type]
        assert "'me'" in await refusal(plan_for(f"nats://me:SECRET@{address}"))
        assert "token" in await refusal(plan_for(f"nats://SECRET@{address}"))
        assert "without credentials" in await refusal(plan_for(f"nats://{address}"))
    with NatsServer(token="right") as server:
        plan = plan_for(server.url)
        await check(plan, plan.config)
        assert server.address in await refusal(plan_for(f"nats://SECRET@{server.address}"))


async def test_a_seed_opens_and_a_wrong_one_does_not(tmp_path: Path) -> None:
    seeds = []
    for number, fill in enumerate((b"\x01", b"\x02")):
        seed = bytes(nkeys.encode_seed(fill * 32, nkeys.PREFIX_BYTE_USER))
        seeds.append((tmp_path / f"{number}.nk", nkeys.from_seed(bytearray(seed)).public_key.decode()))
        seeds[-1][0].write_bytes(seed)
    (right, public), (wrong, _) = seeds
    with NatsServer(nkey=public, nkey_seed_file=right) as server:
        plan = plan_for(server.url, nkey_seed=str(right))
        await check(plan, plan.config)
        assert "refused" in await refusal(plan_for(server.url, nkey_seed=str(wrong)))
        wrong.write_text("nonsense")
        assert "seed" in await refusal(plan_for(server.url, nkey_seed=str(wrong)))
        assert "cannot be read" in await refusal(plan_for(server.url, nkey_seed=str(tmp_path / "none")))


async def test_tls_is_used_and_its_problems_are_told(tmp_path: Path, shared_nats: NatsServer) -> None:
    files = TlsFiles.made_in(tmp_path)
    with NatsServer(tls=files, user="me", password="SECRET") as server:
        plan = plan_for(server.url, tls_ca=str(files.ca))
        await check(plan, plan.config)
        async with running(plan) as run:
            await run.published(message())
        assert "TLS" in await refusal(plan_for(server.url))
        assert "TLS" in await refusal(plan_for(server.url, tls_ca=str(files.key)))
    # Nobody sends a password in the clear because the server says that it wants no TLS.
    told = await refusal(plan_for(f"tls://me:SECRET@{shared_nats.address}"))
    assert "offers no TLS" in told


async def test_a_server_without_jetstream_is_refused() -> None:
    with NatsServer(jetstream=False) as server:
        assert "JetStream" in await refusal(plan_for(server.url))


async def test_nobody_there_is_told_as_such() -> None:
    url = f"nats://me:SECRET@127.0.0.1:{free_port()},127.0.0.1:{free_port()}"
    assert "127.0.0.1" in await refusal(plan_for(url), NatsUnreachable)


async def test_a_frozen_server_is_told_as_not_answering(nats_server: NatsServer) -> None:
    nats_server.freeze()
    assert nats_server.address in await refusal(plan_for(nats_server.url), NatsUnreachable)


async def test_one_of_several_servers_is_enough(shared_nats: NatsServer) -> None:
    plan = plan_for(f"nats://127.0.0.1:{free_port()},{shared_nats.address}")
    await check(plan, plan.config)
    async with running(plan) as run:
        await run.published(message())
        assert run.states == [True]


async def test_a_cluster_that_finds_no_leader_is_told_as_not_answering() -> None:
    port, route = free_port(), free_port()
    cluster = (
        f'cluster {{ name: "tests", listen: "127.0.0.1:{port}", routes: [ "nats://127.0.0.1:{route}" ] }}'
    )
    with NatsServer(extra=cluster) as server:
        assert server.address in await refusal(plan_for(server.url), NatsUnreachable)


@pytest.mark.long
async def test_a_cluster_goes_on_when_its_leader_is_killed() -> None:
    with NatsCluster() as cluster:
        await cluster.ready()
        async with running(plan_for(cluster.url, replicas=3)) as run:
            tap = tapped(run.carrier)
            await run.published(*messages(50))
            await tap.expect(50)
            for each in tap.deliveries:
                each.ack()
            await cluster.kill_leader(run.plan.stream)
            sent = messages(50, first=100)
            await run.published(*sent)
            await tap.expect(100)
            assert {each.number for each in sent} <= set(tap.numbers)
