"""What a probe on this device finds before a bundle is trusted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeinfer import oip
from edgeinfer.artifact.manifest import read_manifest
from edgeinfer.daemon.install import _older, install_bundle, probe_bundle
from edgeinfer.errors import ArtifactError, UnsupportedSchema
from tests.execution.local_rig import ECHO, request_of, variant, write_bundle
from tests.worker import graphs


def bundle(folder: Path, *, answer: float = 2.0, **options: object) -> Path:
    golden = (
        request_of(x=np.array([2.0], np.float32)),
        oip.encode_response([("y", "FP32", [1], np.float32(answer).tobytes())]),
    )
    return write_bundle(folder, "echo", graphs.identity(), ECHO, golden=golden, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("have", "need", "older"),
    [
        ("1.32.0", "1.32.0", False),
        ("1.9.0", "1.32.0", True),
        ("1.32.1", "1.32.0", False),
        ("2.0.0", "1.32.0", False),
        ("1.32.0+cu12", "1.32.0", False),
        ("1.31.9", "1.32", True),
    ],
)
def test_versions_are_compared_as_numbers(have: str, need: str, older: bool) -> None:
    assert _older(have, need) is older


@pytest.mark.system
@pytest.mark.slow
def test_only_what_this_cpu_can_run_is_tried(tmp_path: Path) -> None:
    variants = [variant("alien", instruction_sets=["quantum"]), variant("plain")]
    installed = install_bundle(bundle(tmp_path / "a", variants=variants), tmp_path / "state")
    assert [item.name for item in installed.manifest.variants] == ["alien", "plain"]
    only = bundle(tmp_path / "b", variants=variants[:1], version="1.1.0")
    with pytest.raises(
        ArtifactError, match=r"no variant of echo 1\.1\.0 can run on this device \(alien: .*lacks \(quantum\)"
    ):
        install_bundle(only, tmp_path / "state")


@pytest.mark.system
@pytest.mark.slow
def test_one_wrong_variant_refuses_the_whole_bundle(tmp_path: Path) -> None:
    wrong = bundle(tmp_path / "a", answer=9.0, variants=[variant("good", tolerance=100.0), variant("bad")])
    with pytest.raises(ArtifactError, match=r"echo 1\.0\.0 bad failed its probe on this device \(golden_mismatch\)"):
        install_bundle(wrong, tmp_path / "state")


@pytest.mark.system
@pytest.mark.slow
def test_a_bundle_for_a_newer_runtime_names_both(tmp_path: Path) -> None:
    folder = bundle(tmp_path / "a")
    manifest = (folder / "manifest.json").read_text().replace('"onnxruntime": "1.32.0"', '"onnxruntime": "99.1.0"')
    (folder / "manifest.json").write_text(manifest)
    with pytest.raises(UnsupportedSchema, match=r"needs onnxruntime 99\.1\.0 or newer, 1\.\d+\.\d+ is installed"):
        probe_bundle(folder, read_manifest(folder)[0])
