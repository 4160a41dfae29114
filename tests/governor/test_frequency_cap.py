from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.governor.frequency_cap import FLOOR, CapState, FrequencyCap, duty_under_cap, split
from edgeinfer.sensors.cpufreq import FrequencyPolicy, read_policies
from edgeinfer.sensors.probe import InlineProbe

S = 1_000_000_000


def tree(root: Path, *clusters: int) -> Path:
    for index, max_khz in enumerate(clusters):
        folder = root / f"devices/system/cpu/cpufreq/policy{index * 4}"
        folder.mkdir(parents=True)
        for name, value in {
            "affected_cpus": f"{index * 4} {index * 4 + 1}", "cpuinfo_min_freq": 600_000, "cpuinfo_max_freq": max_khz,
            "scaling_max_freq": max_khz, "scaling_cur_freq": max_khz, "scaling_governor": "schedutil",
            "scaling_driver": "fake",
        }.items():  # fmt: skip
            (folder / name).write_text(f"{value}\n")
    return root


def inline(name: str, read: Callable[[], float]) -> InlineProbe[float]:
    return InlineProbe(name, read)


def shown(root: Path) -> list[int]:
    return [int(path.read_text()) for path in sorted(root.glob("devices/system/cpu/cpufreq/*/scaling_max_freq"))]


def test_cap_is_written_to_every_cluster_and_put_back(tmp_path: Path) -> None:
    cap = FrequencyCap(tree(tmp_path, 1_800_000, 2_400_000), make_probe=inline)
    assert cap.ask(1.0, read_policies(tmp_path), 0) is None
    assert shown(tmp_path) == [1_800_000, 2_400_000]
    assert cap.ask(0.5, read_policies(tmp_path), S) == 1_200_000_000
    assert shown(tmp_path) == [900_000, 1_200_000]
    assert cap.ask(0.1, read_policies(tmp_path), 2 * S) == 600_000_000  # what the hardware can do at least
    assert shown(tmp_path) == [600_000, 600_000]
    cap.ask(1.0, read_policies(tmp_path), 3 * S)
    assert shown(tmp_path) == [1_800_000, 2_400_000]
    cap.ask(0.5, read_policies(tmp_path), 4 * S)
    cap.close()
    assert shown(tmp_path) == [1_800_000, 2_400_000]


def test_never_more_than_what_was_there_before(tmp_path: Path) -> None:
    tree(tmp_path, 2_000_000)
    path = tmp_path / "devices/system/cpu/cpufreq/policy0/scaling_max_freq"
    path.write_text("1200000\n")  # the administrator's
    cap = FrequencyCap(tmp_path, make_probe=inline)
    for index, share in enumerate((0.9, 0.5, 0.8, 1.0)):
        cap.ask(share, read_policies(tmp_path), index * S)
        assert shown(tmp_path)[0] <= 1_200_000
    cap.close()
    assert shown(tmp_path) == [1_200_000]


def test_nothing_is_written_where_it_is_not_permitted(tmp_path: Path) -> None:
    policies = tuple(
        FrequencyPolicy(item.name, item.cpus, item.now_hz, item.min_hz, item.max_hz, item.cap_hz, "x", "y", False)
        for item in read_policies(tree(tmp_path, 2_000_000))
    )
    cap = FrequencyCap(tmp_path, make_probe=inline)
    assert cap.ask(0.5, policies, 0) is None
    assert shown(tmp_path) == [2_000_000]


def test_a_driver_that_refuses_is_told_once_and_work_is_paused_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policies = read_policies(tree(tmp_path, 2_000_000))
    (tmp_path / "devices/system/cpu/cpufreq/policy0/scaling_max_freq").unlink()
    cap = FrequencyCap(tmp_path, make_probe=inline)
    caplog.set_level(logging.WARNING)
    for index in range(5):
        cap.ask(0.5, policies, index * S)
    assert len(caplog.records) == 1
    assert duty_under_cap(0.5, 0.5, policies) == 0.5
    assert not (tmp_path / "devices/system/cpu/cpufreq/policy0/scaling_max_freq").exists()


SPLITS = [
    # duty, cap before, seconds it has held; cap after
    (1.0, 1.0, None, 1.0),
    (0.75, 1.0, None, 0.8),
    (0.8, 1.0, None, 0.8),
    (0.2, 1.0, None, FLOOR),
    (0.0, 1.0, None, FLOOR),
    (0.55, 0.8, 0, 0.6),  # lowered at once
    (0.75, 0.6, 9, 0.6),  # raised after a dwell
    (0.75, 0.6, 10, 0.8),
    (1.0, 0.6, 10, 1.0),
]


@pytest.mark.parametrize(("duty", "before", "held_s", "expected"), SPLITS)
def test_split(duty: float, before: float, held_s: int | None, expected: float) -> None:
    state = CapState(before, None if held_s is None else 0)
    assert split(duty, state, (held_s or 0) * S).share == pytest.approx(expected)


def policy(cap: float, *, cpus: frozenset[int] = frozenset({0})) -> FrequencyPolicy:
    return FrequencyPolicy("policy0", cpus, None, None, 1_000_000_000, round(cap * 1e9), "", "", cap_writable=True)


@pytest.mark.parametrize(
    ("duty", "asked", "caps", "expected"),
    [
        (0.4, 0.5, [0.5], 0.8),
        (0.5, 0.5, [0.5], 1.0),
        (0.4, 0.5, [1.0], 0.4),  # not in force
        (0.4, 0.5, [0.5, 1.0], 0.4),  # not everywhere
        (0.4, 1.0, [0.5], 0.4),  # somebody else's
        (0.4, 0.5, [0.8], 0.5),
        (0.4, 0.5, [], 0.4),
        (0.0, 0.5, [0.5], 0.0),
    ],
)
def test_duty_under_cap(duty: float, asked: float, caps: list[float], expected: float) -> None:
    assert duty_under_cap(duty, asked, [policy(cap) for cap in caps]) == expected


@given(st.floats(0, 1), st.floats(0.1, 1), st.lists(st.floats(0.1, 1), max_size=4))
def test_clock_times_duty_is_never_more_than_the_duty_alone(duty: float, asked: float, caps: list[float]) -> None:
    left = duty_under_cap(duty, asked, [policy(cap) for cap in caps])
    assert left * max(caps, default=1.0) <= duty + 1e-6
