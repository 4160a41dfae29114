"""A variant names only providers that are known, with options that cannot reach outside of the worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from edgeinfer.artifact.manifest import encode_manifest, parse_manifest
from edgeinfer.artifact.provider import PROVIDERS, check_providers, missing_providers
from edgeinfer.errors import ManifestInvalid
from tests.artifact.making import make_bundle

OPENVINO = "OpenVINOExecutionProvider"
CPU = "CPUExecutionProvider"


@pytest.mark.parametrize(
    ("providers", "options"),
    [
        ([CPU], {}),
        ([OPENVINO], {}),
        ([OPENVINO, CPU], {OPENVINO: {"device": "GPU", "precision": "f16"}}),
        (["TensorrtExecutionProvider", "CUDAExecutionProvider", CPU], {"CUDAExecutionProvider": {"device_id": "0"}}),
    ],
)
def test_takes(providers: list[str], options: dict[str, dict[str, str]]) -> None:
    assert check_providers(providers, options) == []


@pytest.mark.parametrize(
    ("providers", "options", "problem"),
    [
        ([], {}, "no provider"),
        ([CPU] * 5, {}, "at most 4"),
        (["NvTensorRTRTX"], {}, "does not know; it knows CPUExecutionProvider, OpenVINO"),
        ([OPENVINO, OPENVINO], {}, "twice"),
        ([CPU, OPENVINO], {}, "must come last"),
        ([CPU], {OPENVINO: {}}, "not among its providers"),
        ([OPENVINO], {OPENVINO: {"load_config": "/etc/passwd"}}, "which takes device, precision"),
        ([OPENVINO], {OPENVINO: {"cache_dir": "/var"}}, "which takes device, precision"),
        ([OPENVINO], {OPENVINO: {"device": "AUTO:GPU,CPU"}}, "is not CPU|GPU|NPU"),
        (["QNNExecutionProvider"], {"QNNExecutionProvider": {"backend_path": "/tmp/evil.so"}}, "which takes device"),
        (["CUDAExecutionProvider"], {"CUDAExecutionProvider": {"device_id": "0\n"}}, "is not"),
        ([CPU], {CPU: {"x": "y"}}, "which takes none"),
    ],
)
def test_refuses(providers: list[str], options: dict[str, dict[str, str]], problem: str) -> None:
    problems = check_providers(providers, options)
    assert len(problems) >= 1
    assert any(problem in text for text in problems), problems


def test_no_option_of_any_provider_takes_a_path() -> None:
    for provider in PROVIDERS.values():
        for key in provider.patterns:
            for value in ("/tmp/x", "..", "x.so", "lib/x"):
                assert check_providers([provider.name], {provider.name: {key: value}}), (provider.name, key, value)


def test_what_is_missing_is_named_with_its_remedy() -> None:
    assert missing_providers([CPU], [CPU]) == []
    (reason,) = missing_providers([OPENVINO, CPU], [CPU])
    remedy = "install edgeinfer with its extra `openvino` (docs/accelerators.md)"
    assert reason == f"OpenVINOExecutionProvider is not installed here; {remedy}"


def changed(folder: Path, **fields: Any) -> bytes:
    manifest = make_bundle(folder)
    return encode_manifest(replace(manifest, variants=[replace(manifest.variants[0], **fields)]))


def test_a_manifest_keeps_providers_and_options(tmp_path: Path) -> None:
    raw = changed(tmp_path, providers=[OPENVINO, CPU], provider_options={OPENVINO: {"precision": "f16"}})
    variant = parse_manifest(raw, "m").variants[0]
    assert variant.providers == [OPENVINO, CPU]
    assert variant.provider_options == {OPENVINO: {"precision": "f16"}}


def test_a_manifest_with_an_unknown_provider_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestInvalid, match="variant 'fp32' names provider 'XnnpackExecutionProvider'"):
        changed(tmp_path, providers=["XnnpackExecutionProvider"])


def test_a_manifest_without_options_has_the_bytes_it_always_had(tmp_path: Path) -> None:
    assert b"provider_options" not in changed(tmp_path)
