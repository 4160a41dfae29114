"""Ask a V4L2 device which formats it gives, without any library.

One ioctl, asked again and again: VIDIOC_ENUM_FMT of include/uapi/linux/videodev2.h. A device that cannot be asked is a
`SourceError` that says what to do about it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path

from edgeinfer.pipeline.frame import SourceError

_VIDIOC_ENUM_FMT = 0xC0405602
"""_IOWR('V', 2, struct v4l2_fmtdesc), 64 bytes."""
_FMTDESC = struct.Struct("=III32s4sI12x")
"""index, type, flags, description, pixelformat, mbus_code, reserved."""
_CAPTURE_TYPES = (1, 9)
"""V4L2_BUF_TYPE_VIDEO_CAPTURE, and its multi-planar form."""
_MOST_FORMATS = 64


def pixel_formats(device: Path) -> frozenset[str]:
    """Return the four-letter codes of the formats that a camera gives, `MJPG` say. May block while it wakes up.

    Raises:
        SourceError: there is no such camera, or it may not be used.
    """
    try:
        fd = os.open(device, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        others = ", ".join(sorted(str(path) for path in Path("/dev").glob("video*"))) or "none"
        raise SourceError(f"there is no camera {device} (there are: {others}); is it plugged in?") from error
    except PermissionError as error:
        raise SourceError(f"{device} may not be used: add the service's user to the group video") from error
    except OSError as error:
        raise SourceError(f"{device} cannot be opened: {error.strerror}") from error
    try:
        formats = frozenset(code for kind in _CAPTURE_TYPES for code in _formats(fd, kind))
    except OSError as error:
        raise SourceError(f"{device} is not a V4L2 camera: {error.strerror}") from error
    finally:
        os.close(fd)
    if not formats:
        raise SourceError(f"{device} gives no images; cameras often have a second device, for metadata")
    return formats


def _formats(fd: int, kind: int) -> list[str]:
    """Return the formats of one type of buffer.

    Raises:
        OSError: the device knows no formats at all.
    """
    found: list[str] = []
    for index in range(_MOST_FORMATS):
        room = bytearray(_FMTDESC.pack(index, kind, 0, b"", b"", 0))
        try:
            fcntl.ioctl(fd, _VIDIOC_ENUM_FMT, room)
        except OSError as error:
            if error.errno == errno.EINVAL:  # no more, or none of this type
                break
            raise
        found.append(_FMTDESC.unpack(room)[4].decode("ascii", "replace"))
    return found
