"""Ask a Raspberry Pi's `vcgencmd` for the throttle flags, where the kernel does not show them in sysfs.

Owns one child at most: it has a second to answer, is killed then, and while a killed one has not ended (its firmware
hangs, and no signal reaches it) no other is started. It may be missing, may not be allowed to open the mailbox, or
belong to another kernel: each is an `OSError` with its own words, and the answer is unknown, never "all is well".
"""

from __future__ import annotations

import errno
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

_TIMEOUT_S = 1.0
_MOST_BYTES = 4096
_COMMAND = "vcgencmd"


class Vcgencmd:
    """The program, and the child that may still be running. Owned by one thread."""

    def __init__(self, argv: Sequence[str] = (_COMMAND, "get_throttled"), *, timeout_s: float = _TIMEOUT_S) -> None:
        self._argv = list(argv)
        self._timeout_s = timeout_s
        self._stuck: subprocess.Popen[bytes] | None = None

    def ask(self) -> str:
        """Return what it prints.

        Raises:
            PermissionError: it may not open the firmware's mailbox (`/dev/vcio`, group video).
            OSError: it is missing, fails, says nothing, or does not end.
        """
        if self._stuck is not None and self._stuck.poll() is None:
            raise TimeoutError(errno.ETIMEDOUT, f"{self._argv[0]} hangs since an earlier call")
        self._stuck = None
        if shutil.which(self._argv[0]) is None:
            raise FileNotFoundError(errno.ENOENT, f"{self._argv[0]} is not installed")
        child = subprocess.Popen(
            self._argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # nobody who reaps our process group takes its exit status
        )
        try:
            output, _ = child.communicate(timeout=self._timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
            assert child.stdout is not None
            child.stdout.close()
            self._stuck = child
            raise TimeoutError(errno.ETIMEDOUT, f"{self._argv[0]} did not answer for {self._timeout_s:g} s") from None
        text = output[:_MOST_BYTES].decode("ascii", "replace").strip()
        if child.returncode:
            words = text.splitlines()[0][:120] if text else "no words"
            denied = any(word in text.lower() for word in ("permission", "can't open device", "can't open /dev/v"))
            kind = PermissionError if denied else OSError
            raise kind(errno.EACCES if denied else errno.EIO, f"{self._argv[0]} ended with {child.returncode}: {words}")
        return text


def is_raspberry(proc_root: Path) -> bool:
    """Return whether the device tree says that this is a Raspberry Pi."""
    try:
        raw = (proc_root / "device-tree" / "compatible").read_bytes()
    except OSError:
        return False
    return any(item.startswith(b"raspberrypi,") for item in raw.split(b"\0"))
