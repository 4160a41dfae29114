from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from edgeinfer.artifact.bundle import verify_bundle
from edgeinfer_bench.models import SHORT, SWAPPED, Chain, build_chain, build_one_operator, digest_of, model_file

TINY = Chain("bench-tiny", rows=2, width=16, layers=3, nominal_us=10)
TINY_SHA256 = "f29e76ea14db2fdd7971a201b247e3895af8735ae8a46c60fb067b84dc48ad32"


def test_the_same_sizes_give_the_same_digest_everywhere(tmp_path: Path) -> None:
    assert digest_of(build_chain(TINY, tmp_path / "a")) == digest_of(build_chain(TINY, tmp_path / "b"))
    graph = model_file(build_chain(TINY, tmp_path / "a")).read_bytes()
    assert hashlib.sha256(graph).hexdigest() == TINY_SHA256, "other models void earlier figures"


def test_versions_of_a_model_differ_in_their_weights(tmp_path: Path) -> None:
    one, other = (build_chain(chain, tmp_path) for chain in SWAPPED)
    assert verify_bundle(one)[0].name == verify_bundle(other)[0].name
    assert model_file(one).read_bytes() != model_file(other).read_bytes()


@pytest.mark.slow
def test_activations_keep_their_magnitude_through_the_chain(tmp_path: Path) -> None:
    session = ort.InferenceSession(str(model_file(build_chain(SHORT, tmp_path))))
    x = np.random.default_rng(0).standard_normal((SHORT.rows, SHORT.width)).astype(np.float32)
    (y,) = session.run(None, {"x": x})
    assert 0.3 < float(np.std(y)) < 3


def test_the_long_operator_answers_what_its_size_says(tmp_path: Path) -> None:
    bundle = build_one_operator(tmp_path, 64)
    verify_bundle(bundle)
    session = ort.InferenceSession(str(model_file(bundle)))
    (y,) = session.run(None, {"n": np.array([64, 64])})
    assert y.tolist() == [16.0]  # 64 products of a half by a half
