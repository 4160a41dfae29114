"""The ledger's promise: what is reserved never passes the ceiling by a reservation, and nothing is given back twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.errors import BudgetExceeded, InternalError
from edgeinfer.execution.ledger import MemoryLedger, Reservation, SharedReservation, budget_bytes

_SIZE = st.integers(0, 120)
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), st.sampled_from("abc"), _SIZE),
        st.tuples(st.just("share"), st.sampled_from("xy"), st.just(30)),
        st.tuples(st.just("release"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("resize"), st.integers(0, 20), _SIZE),
        st.tuples(st.just("follow"), st.integers(0, 20), _SIZE),
        st.tuples(st.just("ceiling"), st.just(0), st.integers(-10, 200)),
    ),
    max_size=60,
)


@given(_STEPS)
def test_reservations_never_pass_the_ceiling_and_always_add_up(steps: list[tuple[str, int | str, int]]) -> None:
    ledger = MemoryLedger(100)
    held: list[Reservation | SharedReservation] = []
    plain: dict[Reservation, int] = {}
    shared: list[SharedReservation] = []
    for action, who, size in steps:
        before, refusal = ledger.snapshot(), None
        try:
            if action == "reserve":
                reservation = ledger.reserve(str(who), size)
                held.append(reservation)
                plain[reservation] = size
            elif action == "share":
                part = ledger.share(str(who), size)
                held.append(part)
                shared.append(part)
            elif action == "release" and held:
                gone = held[int(who) % len(held)]
                gone.release()
                if isinstance(gone, Reservation):
                    plain.pop(gone, None)
                elif gone in shared:
                    shared.remove(gone)
            elif action == "resize" and plain:
                reservation = list(plain)[int(who) % len(plain)]
                reservation.resize(size)
                plain[reservation] = size
            elif action == "follow" and plain:
                reservation = list(plain)[int(who) % len(plain)]
                reservation.follow(size)
                plain[reservation] = size
            elif action == "ceiling":
                ledger.set_ceiling(size)
        except BudgetExceeded as error:
            refusal = error
        after = ledger.snapshot()
        if refusal is not None:
            assert (after.reserved_bytes, after.by_owner) == (before.reserved_bytes, before.by_owner)
            assert refusal.needed_bytes > refusal.free_bytes, "it would have fitted"
        expected = sum(plain.values()) + 30 * len({part.what for part in shared})
        assert after.reserved_bytes == expected == sum(after.by_owner.values())
        assert after.peak_reserved_bytes >= after.reserved_bytes
        assert ledger.overdrawn_bytes == max(0, after.reserved_bytes - after.ceiling_bytes)
        assert action != "follow" or refusal is None, "a fact was refused"
        if after.reserved_bytes > before.reserved_bytes and action != "follow":
            assert after.reserved_bytes <= after.ceiling_bytes, "a reservation passed the ceiling"
    for part_or_whole in held:
        part_or_whole.release()
        part_or_whole.release()
    assert ledger.snapshot().reserved_bytes == 0
    assert ledger.snapshot().by_owner == {}


def test_lowering_the_ceiling_evicts_nothing_and_refuses_what_comes() -> None:
    ledger = MemoryLedger(100)
    big = ledger.reserve("person-detect", 80)
    ledger.set_ceiling(50)
    assert ledger.snapshot().reserved_bytes == 80
    assert (ledger.free_bytes, ledger.overdrawn_bytes) == (0, 30)
    with pytest.raises(BudgetExceeded, match="voice-activity needs"):
        ledger.reserve("voice-activity", 1)
    big.resize(60)  # shrinking is possible above the ceiling
    assert ledger.overdrawn_bytes == 10
    big.release()
    ledger.reserve("voice-activity", 50)


def test_what_is_in_use_already_is_charged_although_it_does_not_fit() -> None:
    ledger = MemoryLedger(100)
    ours = ledger.reserve("edgeinfer itself", 50)
    model = ledger.reserve("person-detect", 40)
    with pytest.raises(BudgetExceeded):
        ours.resize(70)
    ours.follow(70)
    assert (ours.size_bytes, ledger.overdrawn_bytes, ledger.free_bytes) == (70, 10, 0)
    model.release()  # what eviction does about it
    assert (ledger.overdrawn_bytes, ledger.free_bytes) == (0, 30)
    ours.follow(20)
    assert ledger.free_bytes == 80
    ours.release()
    with pytest.raises(InternalError):
        ours.follow(1)


def test_a_refusal_under_pressure_says_that_it_is_pressure() -> None:
    ledger = MemoryLedger(100 << 20)
    ledger.set_ceiling(20 << 20)
    ledger.explain("memory pressure (refaults of 9.0 MB/s) lowers the budget")
    with pytest.raises(BudgetExceeded, match=r"refaults of 9\.0 MB/s"):
        ledger.reserve("b", 50 << 20)
    assert "refaults" in ledger.snapshot().why_lowered


def test_a_refusal_carries_the_numbers() -> None:
    ledger = MemoryLedger(100 << 20)
    ledger.reserve("a", 60 << 20)
    with pytest.raises(BudgetExceeded) as refused:
        ledger.reserve("b", 50 << 20)
    error = refused.value
    assert (error.needed_bytes, error.free_bytes, error.ceiling_bytes) == (50 << 20, 40 << 20, 100 << 20)
    assert "b needs 50 MiB, 40 MiB free of 100 MiB (a 60 MiB); unload a model or raise memory.ceiling" in str(error)
    assert ledger.snapshot().refusals == 1


def test_growing_from_zero_every_step_is_refused_until_it_fits() -> None:
    """Load a model in three charges (file, peak, slots) under every ceiling from nothing up: no step leaks."""
    charges = {"weights": 7, "peak": 13, "slots": 3}

    def load(ledger: MemoryLedger) -> list[Reservation]:
        held: list[Reservation] = []
        try:
            for owner, size in charges.items():
                held.append(ledger.reserve(owner, size))
        except BudgetExceeded:
            for reservation in held:
                reservation.release()
            raise
        return held

    refused_at = set()
    for ceiling in range(sum(charges.values())):
        ledger = MemoryLedger(ceiling)
        with pytest.raises(BudgetExceeded) as refused:
            load(ledger)
        refused_at.add(refused.value.what)
        assert ledger.snapshot().reserved_bytes == 0
    assert refused_at == set(charges), "a refusal path was never taken"
    assert len(load(MemoryLedger(sum(charges.values())))) == 3


def test_shared_bytes_are_charged_once_and_stay_until_the_last_holder_lets_go() -> None:
    ledger = MemoryLedger(100)
    first, second = ledger.share("weights.bin", 70), ledger.share("weights.bin", 70)
    assert ledger.snapshot().reserved_bytes == 70
    first.release()
    first.release()
    assert ledger.snapshot().reserved_bytes == 70
    second.release()
    assert ledger.snapshot().reserved_bytes == 0
    with pytest.raises(BudgetExceeded):
        ledger.share("huge.bin", 101)
    ledger.share("huge.bin", 100)


def test_misuse_is_a_bug() -> None:
    ledger = MemoryLedger(10)
    with pytest.raises(InternalError):
        ledger.reserve("a", -1)
    gone = ledger.reserve("a", 5)
    gone.release()
    with pytest.raises(InternalError):
        gone.resize(3)
    assert ledger.snapshot().reserved_bytes == 0


@pytest.mark.parametrize(
    ("configured", "own", "available", "headrooms", "reserve", "budget"),
    [
        (None, 0, 500, [], 100, 400),
        (300, 0, 500, [], 100, 300),
        (300, 50, 200, [], 100, 150),  # what we hold already is part of the budget
        (None, 50, 900, [(512, 400), (256, 200)], 20, 86),  # the tightest ancestor: 256 - 200 + 50 - 20
        (None, 0, 50, [], 100, 0),
        (None, 10, 900, [(100, 400)], 0, 0),  # an ancestor above its limit
        (0, 10, 900, [], 0, 0),
    ],
)
def test_the_budget_is_the_least_of_all_bounds(
    configured: int | None, own: int, available: int, headrooms: list[tuple[int, int]], reserve: int, budget: int
) -> None:
    assert (
        budget_bytes(
            configured_ceiling=configured,
            own_bytes=own,
            available_bytes=available,
            cgroup_headrooms=headrooms,
            reserve=reserve,
        )
        == budget
    )


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 300))
def test_the_budget_does_not_depend_on_how_much_of_it_we_use(ceiling: int, total: int, own: int, reserve: int) -> None:
    """Loading a model moves bytes from available to own: the budget must not shrink by it."""
    own = min(own, total)
    before = budget_bytes(
        configured_ceiling=ceiling, own_bytes=0, available_bytes=total, cgroup_headrooms=[], reserve=reserve
    )
    after = budget_bytes(
        configured_ceiling=ceiling, own_bytes=own, available_bytes=total - own, cgroup_headrooms=[], reserve=reserve
    )
    assert before == after


def test_a_refusal_names_the_remedy_that_helps() -> None:
    ledger = MemoryLedger(256 << 20)
    ledger.reserve("edgeinfer itself", 36 << 20, standing=True)
    buffers = ledger.reserve("gateway", 64 << 20, standing=True)
    ledger.reserve("small", 22 << 20)
    with pytest.raises(BudgetExceeded, match=r"unload a model or raise memory\.ceiling$"):
        ledger.reserve("large", 156 << 20)
    with pytest.raises(
        BudgetExceeded, match=r"raise memory.ceiling by 23 MiB, .* \(unloading the other models is not en"
    ):
        ledger.reserve("large", 157 << 20)
    ledger.explain("the machine has 10 MiB left")
    with pytest.raises(BudgetExceeded, match=r"has 10 MiB left; unloading models is not enough$"):
        ledger.reserve("large", 157 << 20)
    with pytest.raises(BudgetExceeded, match=r"has 10 MiB left; unload a model$"):
        ledger.reserve("large", 156 << 20)
    buffers.release()
    assert ledger.standing_bytes == 36 << 20
