"""Test the check of a NATS server before it is used: credentials, TLS, foreign streams and unreachable servers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import nkeys
import pytest

from everbeat.errors import NatsError, NatsRefused, NatsUnreachable
from everbeat.nats.jetstream import check
from everbeat.nats.options import NatsConfig
from everbeat.nats.stream_plan import StreamPlan
from tests.nats.stream_fixtures import message, plan_for, running
from tests.nats_server import NatsServer, free_port
from tests.nats_tls import TlsFiles


async def refusal(plan: StreamPlan, kind: type[NatsError] = NatsRefused) -> str:
    """Return the error of `check`, which must come within 6 s."""
    async with asyncio.timeout(6):
        with pytest.raises(kind) as refused:
            await check(plan, plan.config)
    assert type(refused.value) is kind
    assert refused.value.fix
    assert "SECRET" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("changed", ["description", "schema", "retention", "subjects"])
async def test_a_stream_that_everbeat_did_not_create_is_refused(
    shared_nats: NatsServer, changed: str
) -> None:
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
        assert await run.transport.publish([message()]) == [None]
    assert (await shared_nats.counters(plan.stream)).config == made["config"]


async def test_subjects_that_another_stream_uses_are_refused(shared_nats: NatsServer) -> None:
    plan = plan_for(shared_nats.url)
    await shared_nats.add_stream(f"other_{plan.schema}", [plan.subjects])
    assert "overlap" in await refusal(plan)


async def test_replicas_without_a_nats_cluster_are_refused(shared_nats: NatsServer) -> None:
    assert "replicas" in await refusal(plan_for(shared_nats.url, replicas=3))


async def test_a_wrong_nats_password_or_token_is_refused() -> None:
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


async def test_an_nkey_seed_authenticates_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
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


async def test_nats_uses_tls_and_reports_its_problems(tmp_path: Path, shared_nats: NatsServer) -> None:
    files = TlsFiles.made_in(tmp_path)
    with NatsServer(tls=files, user="me", password="SECRET") as server:
        plan = plan_for(server.url, tls_ca=str(files.ca))
        await check(plan, plan.config)
        async with running(plan) as run:
            await run.published(message())
        assert "TLS" in await refusal(plan_for(server.url))
        assert "TLS" in await refusal(plan_for(server.url, tls_ca=str(files.key)))
    # The client must not send a password in the clear because the server offers no TLS.
    told = await refusal(plan_for(f"tls://me:SECRET@{shared_nats.address}"))
    assert "offers no TLS" in told


async def test_a_nats_server_without_jetstream_is_refused() -> None:
    with NatsServer(jetstream=False) as server:
        assert "JetStream" in await refusal(plan_for(server.url))


async def test_an_unreachable_nats_server_is_reported() -> None:
    url = f"nats://me:SECRET@127.0.0.1:{free_port()},127.0.0.1:{free_port()}"
    assert "127.0.0.1" in await refusal(plan_for(url), NatsUnreachable)


async def test_a_frozen_nats_server_is_reported_as_unreachable(nats_server: NatsServer) -> None:
    nats_server.freeze()
    assert nats_server.address in await refusal(plan_for(nats_server.url), NatsUnreachable)


async def test_one_reachable_nats_server_of_several_is_enough(shared_nats: NatsServer) -> None:
    plan = plan_for(f"nats://127.0.0.1:{free_port()},{shared_nats.address}")
    await check(plan, plan.config)
    async with running(plan) as run:
        await run.published(message())
        assert run.states == [True]


async def test_a_nats_cluster_without_a_leader_is_reported_as_unreachable() -> None:
    port, route = free_port(), free_port()
    cluster = (
        f'cluster {{ name: "tests", listen: "127.0.0.1:{port}", routes: [ "nats://127.0.0.1:{route}" ] }}'
    )
    with NatsServer(extra=cluster) as server:
        assert server.address in await refusal(plan_for(server.url), NatsUnreachable)
