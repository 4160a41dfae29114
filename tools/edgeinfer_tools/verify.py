"""Read a finished bundle back and prove it with the device's own code: every byte, and every variant in a worker.

Runs on the staged directory before it is published, and on any bundle that `edgeinfer-tools inspect --verify` names.
A signature is checked with the device's own code, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from edgeinfer.artifact.bundle import verify_bundle
from edgeinfer.artifact.manifest import Manifest
from edgeinfer.errors import SessionError
from edgeinfer.worker.nursery import Nursery
from edgeinfer.worker.probe import probe


def prove(bundle: Path) -> tuple[Manifest, str]:
    """Return manifest and bundle digest of a bundle that holds what it promises.

    Raises:
        ArtifactError: the manifest or a file is not right.
        SessionError: a variant does not load within its own memory peak, does not run, or misses a golden answer.
    """
    manifest, digest = verify_bundle(bundle)
    asyncio.run(_probe_all(manifest, bundle))
    return manifest, digest


def prove_signature(bundle: Path, keys: Sequence[Path]) -> str:
    """Return the fingerprint of the one of these public keys that vouches for every byte of the bundle.

    Raises:
        ArtifactError: the bundle is not sound, or not signed by one of them.
        ConfigError: a key cannot be read.
    """
    from edgeinfer.artifact.signature import read_keys, verify_signature

    manifest, digest = verify_bundle(bundle)
    return verify_signature(bundle, manifest, digest, read_keys(keys)).fingerprint


async def _probe_all(manifest: Manifest, bundle: Path) -> None:
    nursery = Nursery()
    await nursery.start()
    try:
        for variant in manifest.variants:
            verdict = await probe(nursery, manifest, bundle, variant.name)
            if not verdict.accepted:
                raise SessionError(verdict.reason, f"{manifest.name}, variant {variant.name}: {verdict.detail}")
    finally:
        await nursery.close()
