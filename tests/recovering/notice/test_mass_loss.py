"""Test which trees count as dead after many lost their sessions together, and when."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from everbeat.recovering.notice.session import LostSession, MassLoss

SESSION = datetime(2026, 1, 1, tzinfo=UTC)


def mass(*names: str, wait_s: float | None = 30.0, since: float = 100.0) -> MassLoss:
    made = MassLoss(wait_s=wait_s)
    made.join({name: lost(since) for name in names})
    return made


def lost(since: float) -> LostSession:
    return LostSession(since, since - 1.0, SESSION)


def look(loss: MassLoss, name: str, *, at: float, held: bool = False, sessions: bool = False) -> None:
    loss.see(name, SESSION, is_held=held, has_sessions=sessions, at=at)


def over(loss: MassLoss, *names: str, at: float) -> list[str]:
    return [name for name in names if loss.is_over(name, at=at)]


def test_trees_away_for_the_whole_wait_of_a_mass_loss_count_as_dead() -> None:  # E14
    loss = mass("a", "b")
    look(loss, "a", at=120.0)
    assert over(loss, "a", "b", "somebody else", at=129.9) == []
    assert over(loss, "a", "b", "somebody else", at=130.0) == ["a", "b"]
    assert loss.next_in(120.0) == 10.0


def test_a_mass_loss_without_a_wait_is_left_to_age() -> None:
    loss = mass("a", "b", wait_s=None)
    assert over(loss, "a", "b", at=1e9) == []
    assert loss.next_in(120.0) is None


def test_the_first_return_of_each_tree_restarts_the_wait_of_a_mass_loss() -> None:  # E14
    loss = mass("a", "b", "c")
    look(loss, "a", at=129.0, held=True)
    assert "a" not in loss
    assert over(loss, "b", "c", at=158.9) == []
    loss.join({"a": lost(150.0)})
    look(loss, "a", at=151.0, held=True)
    assert over(loss, "b", "c", at=159.0) == ["b", "c"], (
        "a tree that returns repeatedly must not delay the others twice"
    )


def test_a_session_without_the_lock_restarts_only_the_wait_of_its_own_tree() -> None:
    loss = mass("a", "b")
    look(loss, "a", at=110.0, sessions=True)
    look(loss, "a", at=120.0, sessions=True)
    assert over(loss, "a", "b", at=140.0) == ["b"], (
        "a second sign of life of one tree does not count for the other"
    )
    assert over(loss, "a", "b", at=150.0) == ["a", "b"]


def test_a_tree_that_held_its_lock_between_two_checks_is_back() -> None:
    loss = mass("a")
    loss.see("a", SESSION + timedelta(seconds=1), is_held=False, has_sessions=False, at=110.0)
    assert "a" not in loss
    assert not loss


def test_later_losses_do_not_postpone_earlier_ones_of_a_mass_loss() -> None:
    """Trees that crash again and again would otherwise keep the first ones waiting for ever."""
    loss = mass("a", "b")
    loss.join({"c": lost(125.0), "d": lost(125.0)})
    assert over(loss, "a", "b", "c", "d", at=130.0) == ["a", "b"]


def test_a_disturbance_of_the_observer_restarts_the_wait_of_a_mass_loss() -> None:
    loss = mass("a")
    loss.disturbed(138.0)
    assert over(loss, "a", at=167.9) == []
    assert over(loss, "a", at=168.0) == ["a"]


def test_a_mass_loss_forgets_trees_that_were_ended() -> None:
    loss = mass("a", "b")
    loss.keep({"b"})
    assert set(loss.lost) == {"b"}
    loss.keep(set())
    assert not loss


def test_a_returned_tree_stays_part_of_a_mass_loss_while_others_are_away() -> None:
    loss = mass("a", "b")
    look(loss, "a", at=110.0, held=True)
    assert "a" not in loss
    assert loss.has_returned("a")
    loss.keep([])
    assert not loss.has_returned("a"), "the mass loss is over"
