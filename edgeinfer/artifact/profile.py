"""What a bundle costs on one machine: measured there, or estimated for it and marked so.

The toolchain writes one beside its report, a device writes its own into the store (never into the bundle's folder),
and `edgeinfer-tools --profile-from` reads a device's back. One schema for all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from edgeinfer.errors import ManifestInvalid, UnsupportedSchema
from edgeinfer.plain_file import read_plain

SCHEMA = 1
MAX_PROFILE_BYTES = 4 << 20


class Latency(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Distribution of the time of one run, in microseconds."""

    p50_us: int
    p90_us: int
    p99_us: int
    mean_us: int
    runs: int


class OperatingCost(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What one variant costs with one provider and one thread count."""

    variant: str
    provider: str
    threads: int
    latency: Latency
    load_ms: float
    load_peak_bytes: int
    """Anonymous memory at the peak of loading and running."""
    steady_bytes: int
    """Anonymous memory between runs."""
    mapped_bytes: int = 0
    """Hot set of mapped weight files; charged once however many workers map it."""
    cpu_us_per_run: int = 0
    """CPU time over all threads: the proxy of its heat."""
    clock_slope: float | None = None
    """d log(latency) / d log(clock period): 1.0 is compute-bound, 0.0 memory-bound; None when not measured."""
    clock_hz: int | None = None
    """Clock at which the latency holds."""
    energy_uj_per_run: int | None = None
    """Microjoules of one run, where the machine has a readable power rail."""
    form: Literal["plain", "prepacked", "mapped"] = "plain"
    """Which compiled form was measured."""
    covers_largest: bool = False
    """Whether a request of the largest declared shape was among the runs: else the peak is that of smaller ones."""


class Profile(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """All costs of one bundle on one machine."""

    schema: int
    model: str
    version: str
    bundle_digest: str
    board: str
    """Name of the board file that describes the machine."""
    machine: str
    """CPU model, for people."""
    cpu_flags: list[str]
    onnxruntime: str
    origin: Literal["measured", "estimated"]
    """Measured on that machine, or scaled to it by a stated model."""
    costs: list[OperatingCost]
    estimate_model: str = ""
    """How an estimate was scaled, in words."""
    recorded_at: str = ""
    """Wall time of the measurement: a label, it decides nothing."""

    def cost(self, variant: str, *, provider: str, threads: int) -> OperatingCost | None:
        """Return the cost measured for exactly this operating point, if there is one."""
        for cost in self.costs:
            if (cost.variant, cost.provider, cost.threads) == (variant, provider, threads):
                return cost
        return None

    def peak_bytes(self, variant: str, *, provider: str, threads: int) -> tuple[int, bool] | None:
        """Return the most that a worker took with the model as it came, and whether the largest shape was run.

        Of the same thread count where it was measured, else of the one that took most: threads matter little to memory.
        None when that variant was not measured with that provider.
        """
        costs = [
            cost for cost in self.costs if (cost.variant, cost.provider, cost.form) == (variant, provider, "plain")
        ]
        cost = max(costs, key=lambda cost: (cost.threads == threads, cost.load_peak_bytes), default=None)
        return None if cost is None else (cost.load_peak_bytes, cost.covers_largest)


def encode_profile(profile: Profile) -> bytes:
    """Return the bytes of a profile file: sorted keys, indented, one newline at the end."""
    return msgspec.json.format(msgspec.json.encode(profile, order="sorted"), indent=2) + b"\n"


def read_profile(path: Path) -> Profile:
    """Read a profile file.

    Raises:
        ManifestInvalid: missing or not a profile.
        UnsupportedSchema: made for another version of the format.
    """
    try:
        profile = msgspec.json.decode(read_plain(path, MAX_PROFILE_BYTES), type=Profile)
    except OSError as error:
        raise ManifestInvalid(f"{path}: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ManifestInvalid(f"{path} is not a profile: {error}") from error
    if profile.schema != SCHEMA:
        raise UnsupportedSchema(f"{path} has schema {profile.schema}, this edgeinfer reads {SCHEMA}")
    return profile
