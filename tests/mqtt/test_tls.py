"""A link over TLS: both sides prove who they are, and a wrong certificate is a reason, never a way round."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from edgeinfer.config import BrokerSection
from edgeinfer.mqtt.link import LinkState, Message
from tests.mqtt.links import Inbox, connected, running
from tests.nearby.rig import until
from tests.system.broker import Broker, free_port

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates"),
]


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def make_certificates(folder: Path) -> None:
    """A CA, a broker called 127.0.0.1 and localhost, and a client."""
    for ca in ("ca", "other"):
        openssl(
            folder, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{ca}.key", "-out", f"{ca}.crt",
            "-subj", f"/CN={ca}", "-days", "2",
        )  # fmt: skip
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    for name in ("broker", "client"):
        openssl(
            folder, "req", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.csr",
            "-subj", f"/CN={name}",
        )  # fmt: skip
        openssl(
            folder, "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial",
            "-out", f"{name}.crt", "-days", "2", *(["-extfile", "names"] if name == "broker" else []),
        )  # fmt: skip


async def test_mutual_tls(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    port = free_port()
    settings = [
        f"listener {port} 127.0.0.1", "require_certificate true", "use_identity_as_username true",
        *(f"{key} {tmp_path / name}" for key, name in
          (("cafile", "ca.crt"), ("certfile", "broker.crt"), ("keyfile", "broker.key"))),
    ]  # fmt: skip
    good = BrokerSection(
        "127.0.0.1", port, tls_ca=tmp_path / "ca.crt", tls_cert=tmp_path / "client.crt", tls_key=tmp_path / "client.key"
    )
    with Broker(tmp_path, settings) as broker:
        async with connected(good) as link:
            inbox = Inbox(link, "t")
            for size in (1, 100_000, 3_000_000):  # more than one TLS record, more than a socket buffer
                assert await link.publish(Message("t", b"x" * size), timeout_s=5) == 0
            await until(lambda: [len(payload) for payload in inbox.payloads] == [1, 100_000, 3_000_000])
        assert "u'client'" in broker.log()

        for section, reason in (
            (BrokerSection("127.0.0.1", port, tls_ca=tmp_path / "other.crt"), "certificate verify failed"),
            (BrokerSection("localhost", port, tls_ca=tmp_path / "ca.crt"), "localhost"),
            (BrokerSection("127.0.0.1", port, tls_ca=tmp_path / "absent.crt"), "absent.crt cannot be used for TLS"),
            (BrokerSection("127.0.0.1", broker.port, tls_ca=tmp_path / "ca.crt"), "cannot be reached"),
        ):
            async with running(section) as link:
                await until(lambda link=link: link.state is LinkState.UNREACHABLE)  # type: ignore[misc]
                assert reason in link.snapshot().reason

        without = BrokerSection("127.0.0.1", port, tls_ca=tmp_path / "ca.crt")
        async with running(without) as link:
            await until(lambda: link.state is LinkState.UNREACHABLE)
            assert link.snapshot().connects == 0
