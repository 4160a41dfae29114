"""What a run is taken to last before one was seen here: measured on this device, or what the bundle says.

Pure. What was seen replaces it after a few runs (`edgeinfer.scheduling.estimator`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgeinfer.artifact.manifest import Manifest, Variant
from edgeinfer.artifact.profile import Latency
from edgeinfer.clock import NS_PER_MS, NS_PER_S, NS_PER_US


@dataclass(frozen=True, slots=True)
class Seed:
    """How long a run is taken to last."""

    p50_ns: int
    p99_ns: int


UNKNOWN = Seed(100 * NS_PER_MS, 100 * NS_PER_MS)
"""When nobody has ever said."""
_LOAD_LEAST_NS = 50 * NS_PER_MS
"""A process, a session and the first look at the bundle."""
_LOAD_BYTES_PER_S = 100_000_000
"""What a slow card reads, and a small core hashes and parses meanwhile."""


def seed_of(variant: Variant, threads: int, measured: Latency | None = None) -> Seed:
    """Return this device's own figures for so many threads; else the bundle's, which has a p99 only.

    For other thread counts the bundle's figure of fewer threads, which is pessimistic, else of the fewest there is.
    """
    if measured is not None:
        p50_ns = max(1, measured.p50_us * NS_PER_US)
        return Seed(p50_ns, max(p50_ns, measured.p99_us * NS_PER_US))
    known = {int(count): latency_us for count, latency_us in variant.latency_us.items()}
    if not known:
        return UNKNOWN
    fewer = [count for count in known if count <= threads]
    p99_ns = known[max(fewer) if fewer else min(known)] * NS_PER_US
    return Seed(p99_ns, p99_ns)


def seed_before_loading(manifest: Manifest, variant: str, threads: int) -> Seed:
    """Return what is known of a model that isn't in memory: of the variant that is named, else of the slowest."""
    variants = [candidate for candidate in manifest.variants if candidate.name == variant] or manifest.variants
    seeds = [seed_of(candidate, threads) for candidate in variants]
    return max(seeds, key=lambda seed: seed.p99_ns, default=UNKNOWN)


def load_guess_ns(manifest: Manifest, variant: str, measured_ms: Sequence[float] = ()) -> int:
    """Return how long a load is taken to last before the first was seen.

    `measured_ms` is what this device's profile says of the variants in question: the longest counts, for the form
    that will be loaded isn't known yet. Without one it goes by the size of the files.
    """
    if measured_ms:
        return _LOAD_LEAST_NS + round(max(measured_ms) * NS_PER_MS)
    asked = [candidate.file for candidate in manifest.variants if candidate.name == variant or not variant]
    shared_bytes = sum(file.size_bytes for path, file in manifest.files.items() if not path.endswith(".onnx"))
    graph_bytes = max((manifest.files[path].size_bytes for path in asked if path in manifest.files), default=0)
    return _LOAD_LEAST_NS + (shared_bytes + graph_bytes) * NS_PER_S // _LOAD_BYTES_PER_S
