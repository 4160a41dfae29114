"""Who a device is when nobody named it: stable, and not shared by clones."""

from __future__ import annotations

import re
from pathlib import Path

from edgeinfer.daemon.identity import default_id


def root(folder: Path, **files: bytes) -> Path:
    places = {
        "serial": "proc/device-tree/serial-number",
        "machine": "etc/machine-id",
        "dbus": "var/lib/dbus/machine-id",
    }
    for name, content in files.items():
        path = folder / places[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def test_it_can_be_a_topic_level_and_a_client_id(tmp_path: Path) -> None:
    assert re.fullmatch(r"[A-Za-z0-9-]{1,41}", default_id(root(tmp_path, machine=b"x\n")))
    assert re.fullmatch(r"[A-Za-z0-9-]{1,41}", default_id(tmp_path / "empty")), "also when the machine has no id"


def test_cloned_cards_differ_where_the_board_has_a_serial_number(tmp_path: Path) -> None:
    image = b"0123456789abcdef0123456789abcdef\n"
    one = default_id(root(tmp_path / "1", machine=image, serial=b"10000000aaaa\0"))
    two = default_id(root(tmp_path / "2", machine=image, serial=b"10000000bbbb\0"))
    assert one != two
    assert one == default_id(root(tmp_path / "3", machine=b"reinstalled\n", serial=b"10000000aaaa\0"))


def test_an_empty_file_is_no_identity(tmp_path: Path) -> None:
    """Images are often shipped with an empty machine-id, to be filled at first boot."""
    one = default_id(root(tmp_path / "1", machine=b"\n", dbus=b"a"))
    two = default_id(root(tmp_path / "2", machine=b"", dbus=b"b"))
    assert one != two


def test_it_tells_nobody_the_machine_id(tmp_path: Path) -> None:
    secret = b"0123456789abcdef0123456789abcdef"
    assert secret[:8].decode() not in default_id(root(tmp_path, machine=secret))


def test_an_id_file_that_never_ends_is_passed_over(tmp_path: Path) -> None:
    folder = root(tmp_path / "a", dbus=b"id\n")
    (folder / "etc").mkdir()
    (folder / "etc/machine-id").symlink_to("/dev/zero")
    assert default_id(folder) == default_id(root(tmp_path / "b", machine=b"id\n"))
