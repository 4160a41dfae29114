"""A process that has let go of its libraries' pages is smaller, and works as before."""

from __future__ import annotations

import subprocess
import sys

import pytest

LETS_GO = """
import gc, hashlib, json, re, sys
{imports}
from edgeinfer.worker.pages import let_go_of_files

def files_kib():
    rollup = open("/proc/self/smaps_rollup", "rb").read()
    pss = {{key: int(value) for key, value in re.findall(rb"(\\w+): +(\\d+) kB", rollup)}}
    return pss[b"Rss"] - pss[b"Anonymous"], pss[b"Anonymous"]

before = files_kib()
let_go_of_files()
after = files_kib()
{work}
gc.collect()
assert json.loads(json.dumps([hashlib.sha256(b"abc").hexdigest()[:8]])) == ["ba7816bf"]
print(before[0], after[0], before[1], after[1])
"""


RUNS = """
session = ort.InferenceSession(zygote._SMALLEST_MODEL, providers=["CPUExecutionProvider"])
assert session.run(None, {"x": np.ones(1, np.float32)})[0].tolist() == [1]
assert np.linalg.inv(np.eye(64)).sum() == 64
"""


@pytest.mark.parametrize(
    ("imports", "work"),
    [
        ("", ""),
        ("import numpy as np, onnxruntime as ort; from edgeinfer.worker import zygote", RUNS),
    ],
    ids=["python", "onnxruntime"],
)
def test_files_go_and_come_back_and_our_own_pages_stay(imports: str, work: str) -> None:
    code = LETS_GO.format(imports=imports, work=work)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    before, after, own_before, own_after = (int(word) for word in done.stdout.split())
    assert after < before / 2
    assert abs(own_after - own_before) < 1024, "nothing that was written to is lost"
