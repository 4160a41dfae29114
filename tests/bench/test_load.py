from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgeinfer.artifact.bundle import read_golden, verify_bundle
from edgeinfer_bench.load import Side, figures_of
from edgeinfer_bench.models import Chain, build_chain
from edgeinfer_bench.tight import forget, own_group

MS = 1_000_000
MIB = 1 << 20


def test_ratios_say_what_the_chosen_form_gains() -> None:
    chosen = Side([10 * MS, 20 * MS, 30 * MS], [9 * MS], {1: 10 * MIB, 2: 15 * MIB})
    plain = Side([100 * MS, 50 * MS, 40 * MS], [10 * MS], {1: 100 * MIB, 2: 150 * MIB})
    found = {figure.id: figure for figure in figures_of("load", chosen, plain, None, speedup_goal=2.0)}
    assert {key.removeprefix("load."): figure.value for key, figure in found.items()} == pytest.approx(
        {"speedup": 2.5, "anon_ratio": 0.1, "anon_ratio_two_workers": 0.1, "latency_ratio": 0.9}
    )
    assert {figure.verdict for figure in found.values()} == {"met", "-"}
    assert "2 workers: 15.0 instead of 150.0 MiB" in found["load.anon_ratio"].note


def test_the_golden_answer_is_in_the_bundle_only_when_asked_for(tmp_path: Path) -> None:
    tiny = Chain("bench-tiny", rows=2, width=16, layers=3, nominal_us=10)
    assert verify_bundle(build_chain(tiny, tmp_path / "a"))[0].golden == []
    bundle = build_chain(tiny, tmp_path / "b", golden=True)
    manifest, _ = verify_bundle(bundle)
    request, response = read_golden(bundle, manifest.golden_for("fp32")[0])
    assert [len(bytes(payload.tensors[0])) for payload in (request, response)] == [2 * 16 * 4, 2 * 8 * 4]


@pytest.mark.parametrize("listing", ["4:memory:/a/b\n1:cpu:/\n", "0::/\n7:hugetlb,memory:/a/b\n"])
def test_the_memory_group_is_found_whatever_it_shares_its_hierarchy_with(listing: str) -> None:
    assert own_group(listing) == "/a/b"


def test_without_groups_of_version_1_it_says_so() -> None:
    with pytest.raises(OSError, match="version 1"):
        own_group("0::/user.slice\n")


def test_forgetting_a_file_leaves_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(data := os.urandom(MIB))
    forget([path])
    assert path.read_bytes() == data
