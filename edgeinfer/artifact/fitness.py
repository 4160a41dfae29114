"""Say why a variant cannot run on a device: the CPU's instructions that it needs, and its execution providers.

Pure: what the device has is told by the caller. Whether it runs *right* there is for the probe and its golden answers.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Set as AbstractSet

from edgeinfer.artifact.manifest import Variant
from edgeinfer.artifact.provider import missing_providers


def unfit(variant: Variant, *, cpu_flags: AbstractSet[str], providers: Collection[str]) -> str:
    """Return why the variant cannot run here, with the remedy; empty when it may.

    `providers` are those that the runtime has, empty while that isn't known: then they are not judged.
    """
    if lacking := sorted(set(variant.instruction_sets) - cpu_flags):
        return f"it needs instructions that this CPU lacks ({', '.join(lacking)}); rebuild it for this board"
    if providers and (missing := missing_providers(variant.providers, providers)):
        return missing[0]
    return ""
