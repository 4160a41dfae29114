"""The largest request reaches every bound with elements that any model can take."""

from __future__ import annotations

import numpy as np
from msgspec import structs

from edgeinfer import oip
from edgeinfer.artifact.manifest import Manifest, Runtime, TensorSpec
from edgeinfer.worker.largest import has_one_shape, largest_request

EMPTY = Manifest(
    schema=1,
    name="e",
    version="1.0.0",
    task="t",
    inputs=[],
    outputs=[],
    variants=[],
    runtime=Runtime("1.32.0", 17, 8),
    files={},
)


def test_largest_request_has_every_bound_and_valid_elements() -> None:
    specs = [TensorSpec("ids", "INT64", [-1, 2], [3, 2]), TensorSpec("x", "FP16", [1])]
    manifest = structs.replace(EMPTY, inputs=specs)
    request = largest_request(manifest)
    assert request is not None
    assert [tensor.shape for tensor in oip.request_header(request).inputs] == [[3, 2], [1]]
    assert np.frombuffer(request.tensors[0], np.int64).tolist() == [1] * 6
    assert np.frombuffer(request.tensors[1], np.float16).tolist() == [1.0]
    assert not has_one_shape(manifest)
    assert has_one_shape(structs.replace(EMPTY, inputs=specs[1:]))
    text = structs.replace(EMPTY, inputs=[TensorSpec("t", "BYTES", [1])])
    assert (largest_request(text), has_one_shape(text)) == (None, False)
    huge = structs.replace(EMPTY, inputs=[TensorSpec("x", "FP32", [-1], [1 << 30])])
    assert largest_request(huge) is None
