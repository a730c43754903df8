"""Failed logins: an address gets a few a minute, and remembering the addresses takes bounded memory."""

from __future__ import annotations

import base64
import logging

import httpx
import pytest

from everbeat import App
from everbeat.testing.clock import ManualClock
from everbeat.web import Basic, Role, Web
from everbeat.web.failed_logins import MOST_ADDRESSES, MOST_FAILURES, WITHIN_S, FailedLogins

RIGHT = "correct-horse"


class Protected:
    """A dashboard with one user, and its visitors."""

    def __init__(self, app: App, *, proxies: tuple[str, ...] = ()) -> None:
        self.clock = ManualClock()
        auth = Basic({"ann": (RIGHT, Role.SEE)}, proxies=proxies)
        auth._failed = FailedLogins(clock=self.clock)
        self.web = Web(app, auth=auth)

    async def log_in(
        self, password: str | None, *, client: str = "203.0.113.7", forwarded: str | None = None
    ) -> httpx.Response:
        """Log in from an address, and return the answer."""
        headers = {} if forwarded is None else {"x-forwarded-for": forwarded}
        if password is not None:
            secret = base64.b64encode(f"ann:{password}".encode()).decode()
            headers["authorization"] = f"Basic {secret}"
        transport = httpx.ASGITransport(self.web, client=(client, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://dashboard.test") as session:
            return await session.get("/nothing-here", headers=headers)


async def test_an_address_whose_logins_fail_is_refused_for_a_minute_even_with_the_right_password(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    dashboard = Protected(app)
    caplog.set_level(logging.INFO, "everbeat.web")
    for _ in range(3 * MOST_FAILURES):
        answer = await dashboard.log_in(None)
        assert answer.status_code == 401, "a request without a password is not an attempt"
    for _ in range(MOST_FAILURES):
        assert (await dashboard.log_in("secret-guess")).status_code == 401
    for password in ("secret-guess", RIGHT):
        answer = await dashboard.log_in(password)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "60")
        assert "Too many logins" in answer.text
    assert (await dashboard.log_in(RIGHT, client="203.0.113.8")).status_code == 404
    await dashboard.clock.advance(WITHIN_S - 0.5)
    assert (await dashboard.log_in(RIGHT)).headers["retry-after"] == "1"
    await dashboard.clock.advance(0.5)
    assert (await dashboard.log_in(RIGHT)).status_code == 404
    assert [each.getMessage() for each in caplog.records if each.name == "everbeat.web"] == [
        "logins_refused address=203.0.113.7 failures=10 for_s=60"
    ]
    await dashboard.web.aclose()


async def test_behind_a_trusted_proxy_each_client_counts_for_itself_and_cannot_choose_its_address(
    app: App,
) -> None:
    dashboard = Protected(app, proxies=("10.0.0.0/8",))
    for number in range(MOST_FAILURES):
        await dashboard.log_in(
            "wrong", client="10.0.0.1", forwarded=f"198.51.100.{number}, 203.0.113.9, 10.0.0.2"
        )
    assert (
        await dashboard.log_in(RIGHT, client="10.0.0.1", forwarded="198.51.100.99, 203.0.113.9")
    ).status_code == 429
    assert (await dashboard.log_in(RIGHT, client="10.0.0.1", forwarded="203.0.113.10")).status_code == 404
    assert (await dashboard.log_in(RIGHT, client="203.0.113.7", forwarded="203.0.113.9")).status_code == 404
    for number in range(MOST_FAILURES):
        await dashboard.log_in("wrong", client="203.0.113.7", forwarded=f"198.51.100.{number}")
    assert (await dashboard.log_in(RIGHT, client="203.0.113.7", forwarded="198.51.100.99")).status_code == 429
    await dashboard.web.aclose()


async def test_all_addresses_of_an_ipv6_network_count_as_one_client(app: App) -> None:
    dashboard = Protected(app)
    for number in range(MOST_FAILURES):
        await dashboard.log_in("wrong", client=f"2001:db8::{number}")
    assert (await dashboard.log_in(RIGHT, client="2001:db8::ffff")).status_code == 429
    assert (await dashboard.log_in(RIGHT, client="2001:db8:1::1")).status_code == 404
    await dashboard.web.aclose()


def test_failures_of_any_number_of_addresses_take_bounded_memory() -> None:
    logins = FailedLogins(clock=ManualClock())
    for number in range(MOST_ADDRESSES + 100):
        logins.note(str(number))
    assert len(logins) == MOST_ADDRESSES
