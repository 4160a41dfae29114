from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edgeinfer_bench.alone import alone_bytes, file_pages

MIB = 1 << 20

HOLD = """
import mmap, os, sys
file = open(sys.argv[1], "rb")
held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
sum(held[at] for at in range(0, int(sys.argv[2]), 4096))
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def holding(file: Path, touched_bytes: int) -> Iterator[int]:
    argv = [sys.executable, "-c", HOLD, str(file), str(touched_bytes)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process.pid
        process.stdin.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(8 * MIB))
    return path


@pytest.mark.slow
def test_a_file_counts_in_full_whoever_else_has_mapped_it(file: Path) -> None:
    with holding(file, 8 * MIB) as ours:
        before = alone_bytes([ours])
        with holding(file, 8 * MIB), holding(file, 8 * MIB):
            assert abs(alone_bytes([ours]) - before) < MIB // 4
        assert before > 8 * MIB


@pytest.mark.slow
def test_a_file_that_several_of_ours_have_mapped_counts_once(file: Path) -> None:
    with holding(file, 8 * MIB) as one, holding(file, 8 * MIB) as two:
        together, apart = alone_bytes([one, two]), alone_bytes([one]) + alone_bytes([two])
        assert apart - together > 8 * MIB


def test_only_pages_that_are_in_memory_count(file: Path) -> None:
    before = len(file_pages(os.getpid()))
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as held:
        held.madvise(mmap.MADV_RANDOM)  # no reading ahead: what is not touched is not mapped
        untouched = len(file_pages(os.getpid())) - before
        sum(held[at] for at in range(0, MIB, mmap.PAGESIZE))
        touched = len(file_pages(os.getpid())) - before
    assert untouched < 16
    assert touched >= MIB // mmap.PAGESIZE
