"""Test the NATS settings: parsing of URLs, refused values, and that no password is ever shown."""

from __future__ import annotations

import pytest

from everbeat.config import RecoveryConfig
from everbeat.errors import ConfigurationError
from everbeat.nats.options import NatsConfig, user_info


def parsed(text: object) -> NatsConfig:
    config = NatsConfig.parse(text)  # type: ignore[arg-type]
    assert config is not None
    return config


@pytest.mark.parametrize(
    ("given", "servers"),
    [
        ("nats://host", ["nats://host:4222"]),
        ("nats://host:5000/", ["nats://host:5000"]),
        ("tls://host", ["tls://host:4222"]),
        (" nats://a:1 , b ,c:3", ["nats://a:1", "nats://b:4222", "nats://c:3"]),
        ("nats://me:pw@a,b:2", ["nats://me:pw@a:4222", "nats://me:pw@b:2"]),
        (
            "nats://me:pw@a,you:qw@b,tls://c",
            ["nats://me:pw@a:4222", "nats://you:qw@b:4222", "tls://me:pw@c:4222"],
        ),
        ("nats://[::1]:7,127.0.0.1", ["nats://[::1]:7", "nats://127.0.0.1:4222"]),
    ],
)
def test_a_nats_url_names_servers_that_share_the_first_user_info(given: str, servers: list[str]) -> None:
    assert list(parsed(given).servers) == servers


def test_nats_config_parse_returns_none_and_a_config_unchanged() -> None:
    config = NatsConfig(servers=["nats://host"])
    assert NatsConfig.parse(None) is None
    assert NatsConfig.parse(config) is config


def test_percent_encoded_user_info_of_a_nats_url_is_decoded() -> None:
    assert user_info(parsed("nats://me:p%40ss%2Fword@host").servers[0]) == ("me", "p@ss/word", None)
    assert user_info(parsed("nats://t%3Aken@host").servers[0]) == (None, None, "t:ken")
    assert user_info(parsed("nats://host").servers[0]) == (None, None, None)


@pytest.mark.parametrize(
    "given",
    [
        "",
        "host:4222",
        "http://host",
        "ws://host",
        "redis://me:SECRET@host",
        "nats://",
        "nats://me:SECRET@",
        "nats://host:0",
        "nats://host:70000",
        "nats://host:SECRET",
        "nats://me:SEC/RET@host",
        "nats://me:SEC,RET@host",
        "nats://me:SEC@RET@ho st",
        "nats://me:SEC?RET@host",
        "nats://me:SEC#RET@host",
        "nats://host/path",
        "nats://host?token=SECRET",
        "nats://host,,other",
        "me:SECRET@host",
        "nats://me:SECRET@[::1",
    ],
)
def test_an_invalid_nats_url_is_refused_without_showing_its_password(given: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        NatsConfig.parse(given)
    (problem,) = refused.value.problems
    assert problem.code == "WRONG_NATS_URL"
    assert problem.subject == "App.wake"
    assert "nats://" in problem.fix
    assert "SEC" not in str(refused.value)
    assert "RET" not in str(refused.value)
    if "," in given:
        return  # the password of a single server can contain a comma, because no list is split there
    with pytest.raises(ConfigurationError) as refused:
        NatsConfig(servers=["nats://fine", given])
    assert "NatsConfig.servers[1]" in str(refused.value)
    assert "SEC" not in str(refused.value)
    assert "RET" not in str(refused.value)


@pytest.mark.parametrize("given", [7, b"nats://me:SECRET@host", ["nats://me:SECRET@host"], True])
def test_a_nats_url_that_is_not_text_is_refused(given: object) -> None:
    with pytest.raises(ConfigurationError) as refused:
        parsed(given)
    assert "App.wake" in str(refused.value)
    assert "SECRET" not in str(refused.value)


def test_nats_config_never_shows_a_password() -> None:
    config = parsed("nats://me:SECRET@host,SECRET@other:1")
    assert config.shown == "nats://host:4222,nats://other:1"
    assert "SECRET" not in repr(config)
    for servers in ("nats://me:SECRET@host", [], ["nats://me:SECRET@host"] * 101, [b"SECRET"], {"SECRET": 1}):
        with pytest.raises(ConfigurationError) as refused:
            NatsConfig(servers=servers)  # type: ignore[arg-type]
        if not isinstance(servers, dict):
            assert "SECRET" not in str(refused.value)


def test_all_problems_of_a_nats_config_are_reported_together() -> None:
    with pytest.raises(ConfigurationError) as refused:
        NatsConfig(
            servers=["nats://host"],
            stream="a.b",
            replicas=6,
            ack_wait="soon",
            credentials="",
            max_bytes=1,
            tls_cert="cert.pem",
        )
    told = {problem.subject.partition(".")[2] for problem in refused.value.problems}
    assert told == {"stream", "replicas", "ack_wait", "credentials", "max_bytes", "tls_cert"}


def test_an_nkey_seed_together_with_credentials_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="together with credentials"):
        NatsConfig(servers=["nats://host"], credentials="user.creds", nkey_seed="user.nk")


def test_tls_is_on_if_a_url_or_a_tls_setting_requests_it() -> None:
    assert not parsed("nats://host").wants_tls
    assert parsed("nats://host,tls://other").wants_tls
    assert NatsConfig(servers=["nats://host"], tls_ca="ca.pem").wants_tls


def test_the_default_ack_wait_follows_the_recovery_thresholds() -> None:
    config = parsed("nats://host")
    assert config.ack_wait_s(RecoveryConfig()) == 660
    assert config.problems(RecoveryConfig()) == ()
    fast = RecoveryConfig(
        running_stale_threshold_ms=2_000,
        claimed_stale_threshold_ms=2_000,
        runner_heartbeat_interval_ms=1_000,
        claimer_heartbeat_interval_ms=1_000,
        check_interval_ms=1_000,
    )
    assert config.ack_wait_s(fast) == 600
    slow = RecoveryConfig(claimed_stale_threshold_ms=3_600_000)
    assert config.ack_wait_s(slow) == 2 * 3_630
    assert config.problems(slow) == ()
    assert config.replace(ack_wait="3100ms").problems(fast) == ()
    assert config.replace(ack_wait="1h").ack_wait_s(fast) == 3_600


@pytest.mark.parametrize("wait", ["5m", 330])
def test_an_ack_wait_shorter_than_the_recovery_thresholds_is_refused(wait: object) -> None:
    (problem,) = NatsConfig(servers=["nats://host"], ack_wait=wait).problems(RecoveryConfig())  # type: ignore[arg-type]
    assert problem.code == "ACK_WAIT_TOO_SHORT"
    assert problem.subject == "NatsConfig.ack_wait"
    assert "330s" in problem.rule
    assert "11m" in problem.fix
