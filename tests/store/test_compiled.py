"""Compiled forms: whole or not there, for exactly one key, within their bound, and gone with their bundle."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from edgeinfer.artifact.profile import Latency, OperatingCost
from edgeinfer.errors import ArtifactError
from edgeinfer.store import compiled
from edgeinfer.store.compiled import CompiledForm, CompiledStore, FormCost, FormKey, describe_files, new_record
from edgeinfer.store.durable import StorageError

KEY = FormKey("ab" * 32, "fp32", "1.32.0", "x86_64", frozenset({"avx2", "fma"}), ("CPUExecutionProvider",))
COST = FormCost(form="prepacked", steady_bytes=1, disk_bytes=1)
OPERATING = OperatingCost("fp32", "CPUExecutionProvider", 1, Latency(1, 1, 1, 1, 1), 1.0, 1, 1, form="prepacked")
Keep = Callable[..., CompiledForm]


@pytest.fixture
def store(tmp_path: Path) -> CompiledStore:
    return CompiledStore(tmp_path, max_bytes=1000)


@pytest.fixture
def keep(store: CompiledStore) -> Keep:
    def keep(key: FormKey = KEY, size: int = 100, cost: FormCost = COST) -> CompiledForm:
        with store.writing() as work:
            made = work / cost.form
            files = {}
            if cost.form != "plain":
                made.mkdir()
                (made / "model.onnx").write_bytes(b"m" * 10)
                (made / "model.weights").write_bytes(b"w" * (size - 10))
                files = describe_files(made)
            record = new_record(key, form=cost, why="it is lean", operating=OPERATING, costs=[cost], files=files)
            return store.commit(work, made if files else None, key, record)

    return keep


def test_what_was_kept_is_found_with_its_files(store: CompiledStore, keep: Keep, tmp_path: Path) -> None:
    kept = keep()
    found = store.find(KEY)
    assert found == kept
    assert found.record.cost == COST
    assert found.model_path.read_bytes() == b"m" * 10
    assert found.weights == [(found.folder / "model.weights", 90)]
    assert found.disk_bytes == store.total_bytes() == 100
    store.check(found)
    assert sorted(path.name for path in (tmp_path / "compiled").iterdir()) == [KEY.bundle_digest, "lock"]


@pytest.mark.parametrize(
    "other",
    [
        replace(KEY, onnxruntime="1.33.0"),
        replace(KEY, cpu_flags=frozenset({"avx2"})),
        replace(KEY, machine="aarch64"),
        replace(KEY, options=()),
        replace(KEY, variant="int8"),
        replace(KEY, bundle_digest="cd" * 32),
    ],
)
def test_another_cpu_runtime_variant_or_bundle_finds_nothing(store: CompiledStore, keep: Keep, other: FormKey) -> None:
    keep()
    assert store.find(other) is None


def test_rebuilt_form_replaces_the_stale_one(store: CompiledStore, keep: Keep) -> None:
    keep()
    newer = replace(KEY, onnxruntime="1.33.0")
    keep(newer)
    assert store.find(KEY) is None
    assert [form.record.onnxruntime for form in store.forms(KEY.bundle_digest)] == ["1.33.0"]
    keep(newer, size=50)
    assert store.total_bytes() == 50


def test_variants_lie_side_by_side_whatever_they_are_called(store: CompiledStore, keep: Keep) -> None:
    keep()
    keep(replace(KEY, variant="../../int8"))
    assert [form.record.variant for form in store.forms(KEY.bundle_digest)] == ["../../int8", "fp32"]
    assert store.find(replace(KEY, variant="../../int8")) is not None


def test_choice_of_plain_is_kept_without_files(store: CompiledStore, keep: Keep) -> None:
    keep(cost=FormCost(form="plain"))
    found = store.find(KEY)
    assert found is not None
    assert (found.record.form, found.disk_bytes, found.record.why) == ("plain", 0, "it is lean")


def test_least_recently_used_give_way_and_the_bound_holds(store: CompiledStore, keep: Keep) -> None:
    keys = [replace(KEY, bundle_digest=f"{number:064x}") for number in range(4)]
    for age, key in enumerate(keys[:3]):
        kept = keep(key, size=300)
        os.utime(kept.folder / "form.json", (age * 1e8, age * 1e8))
    store.find(keys[0])  # now it is the one that was used last
    keep(keys[3], size=300)
    assert [store.find(key) is not None for key in keys] == [True, False, True, True]
    assert store.total_bytes() <= 1000
    with pytest.raises(StorageError, match="all forms together may have"):
        keep(replace(KEY, variant="huge"), size=1001)
    assert store.find(keys[3]) is not None


def test_full_disk_leaves_what_there_was(
    store: CompiledStore, keep: Keep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = keep()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(compiled, "write_atomically", full)
        with pytest.raises(StorageError, match="disk is full"):
            keep(replace(KEY, onnxruntime="1.33.0"))
    assert store.find(KEY) == kept
    assert not list((tmp_path / "compiled").glob(".work-*"))


def test_what_a_crash_left_is_removed_by_the_next_writer(store: CompiledStore, keep: Keep, tmp_path: Path) -> None:
    left = tmp_path / "compiled" / ".work-old" / "prepacked"
    left.mkdir(parents=True)
    (left / "model.weights").write_bytes(b"half")
    assert store.find(KEY) is None
    keep()
    assert not left.exists()


def test_two_writers_exclude_each_other(store: CompiledStore, tmp_path: Path) -> None:
    (tmp_path / "compiled").mkdir()
    with (tmp_path / "compiled" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match="another process is making compiled forms"), store.writing():
            pytest.fail("it got in")


@pytest.mark.parametrize("damage", [b"", b"{}", b"\0" * 100])
def test_damaged_record_is_no_form(store: CompiledStore, keep: Keep, damage: bytes) -> None:
    (keep().folder / "form.json").write_bytes(damage)
    assert store.find(KEY) is None
    assert store.forms(KEY.bundle_digest) == []
    keep()
    assert store.find(KEY) is not None


def test_truncated_weights_are_no_form_and_a_flipped_bit_is_found(store: CompiledStore, keep: Keep) -> None:
    form = keep()
    weights = form.folder / "model.weights"
    weights.write_bytes(b"x" + weights.read_bytes()[1:])
    assert store.find(KEY) is not None
    with pytest.raises(ArtifactError, match="was changed"):
        store.check(form)
    weights.write_bytes(b"w")
    assert store.find(KEY) is None
    store.discard(form)
    with pytest.raises(ArtifactError, match="cannot be read"):
        store.check(form)


def test_forms_go_with_their_bundle(store: CompiledStore, keep: Keep) -> None:
    keep()
    other = replace(KEY, bundle_digest="cd" * 32)
    keep(other)
    store.remove(KEY.bundle_digest)
    assert store.find(KEY) is None
    store.prune([KEY.bundle_digest])
    assert store.find(other) is None
    store.remove("")
    store.remove("ef" * 32)
    keep()
    assert store.find(KEY) is not None


def test_room_is_what_the_disk_has_beyond_the_share_of_others_within_the_bound(tmp_path: Path) -> None:
    (tmp_path / "compiled").mkdir()
    assert CompiledStore(tmp_path, max_bytes=1000, keep_free_bytes=0).room_bytes() == 1000
    assert CompiledStore(tmp_path, keep_free_bytes=1 << 60).room_bytes() == 0
