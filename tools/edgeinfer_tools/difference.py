"""Say in what two bundles differ, in the terms of those who have to choose between them.

What matters to a caller (the contract), to a device (variants, what they cost and need) and to a fleet (versions,
files) is compared; the report's prose is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from edgeinfer.artifact.manifest import Manifest, Variant, read_manifest

_CONTRACT = ("task", "inputs", "outputs", "state", "classes", "deadline_ms")
"""What a caller relies on: with any of it changed, a loop or an app may have to change too."""
_ABOUT = ("version", "description", "provenance", "runtime")


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that is not the same."""

    where: str
    """Dotted path, such as `variants.int8.quality`."""
    before: Any
    """None when it was not there."""
    after: Any
    """None when it is gone."""
    breaking: bool = False
    """A caller of the first one may not work with the second."""

    def __str__(self) -> str:
        if self.before is None:
            text = f"{self.where}: added {_shown(self.after)}"
        elif self.after is None:
            text = f"{self.where}: removed (was {_shown(self.before)})"
        else:
            text = f"{self.where}: {_shown(self.before)} -> {_shown(self.after)}{_relative(self.before, self.after)}"
        return f"! {text}" if self.breaking else f"  {text}"


def difference(before: Path, after: Path) -> list[Change]:
    """Return what differs between two bundle folders, the breaking changes first. Empty for the same bundle.

    Raises:
        ArtifactError: one of them is no bundle.
    """
    (old, old_digest), (new, new_digest) = read_manifest(before), read_manifest(after)
    if old_digest == new_digest:
        return []
    changes = [
        *_fields(old, new, ("name", *_CONTRACT), breaking=True),
        *_fields(old, new, _ABOUT, breaking=False),
        *_variants(old, new),
        *_files(old, new),
    ]
    return sorted(changes, key=lambda change: not change.breaking)


def as_text(changes: list[Change]) -> str:
    """Return the changes for people."""
    if not changes:
        return "the same bundle"
    lines = [str(change) for change in changes]
    if any(change.breaking for change in changes):
        lines.append("! the contract differs: what calls the first one may not work with the second")
    return "\n".join(lines)


def as_json(changes: list[Change]) -> list[dict[str, Any]]:
    """Return the changes for scripts."""
    return [msgspec.to_builtins(change) for change in changes]


def _fields(old: Manifest, new: Manifest, names: tuple[str, ...], *, breaking: bool) -> Iterator[Change]:
    for name in names:
        yield from _compare(
            name, msgspec.to_builtins(getattr(old, name)), msgspec.to_builtins(getattr(new, name)), breaking
        )


def _compare(where: str, old: Any, new: Any, breaking: bool) -> Iterator[Change]:
    """Go down as far as both sides are built alike, and name the leaf."""
    if old == new:
        return
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from _compare(f"{where}.{key}", old.get(key), new.get(key), breaking)
    elif _named(old) and _named(new):
        yield from _compare(where, {item["name"]: item for item in old}, {item["name"]: item for item in new}, breaking)
    else:
        yield Change(where, old, new, breaking and not where.endswith(".description"))


def _named(items: Any) -> bool:
    return isinstance(items, list) and all(isinstance(item, dict) and "name" in item for item in items)


def _variants(old: Manifest, new: Manifest) -> Iterator[Change]:
    before = {variant.name: _described(old, variant) for variant in old.variants}
    after = {variant.name: _described(new, variant) for variant in new.variants}
    yield from _compare("variants", before, after, breaking=False)
    if before.keys() == after.keys() and list(before) != list(after):
        yield Change("variants", ", ".join(before), ", ".join(after))


def _described(manifest: Manifest, variant: Variant) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(variant)
    found.pop("name")
    file = manifest.files[variant.file]
    return {**found, "size_bytes": file.size_bytes, "sha256": file.sha256[:12]}


def _files(old: Manifest, new: Manifest) -> Iterator[Change]:
    """The files that no variant is made of; those are told with their variants."""
    models = {variant.file for manifest in (old, new) for variant in manifest.variants}
    for name in sorted((old.files.keys() | new.files.keys()) - models):
        before, after = old.files.get(name), new.files.get(name)
        if before != after:
            yield Change(f"files.{name}", before and before.sha256[:12], after and after.sha256[:12])


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items() if item not in ({}, [], "", None))
    return str(value)


def _relative(before: Any, after: Any) -> str:
    numbers = [value for value in (before, after) if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if len(numbers) < 2 or not before:
        return ""
    return f" ({after / before - 1:+.1%})"
