"""Say how cameras, network cameras and microphones are read: which program, with which arguments. Pure.

What is common to all: one image or chunk is passed on as soon as it is there, nothing is buffered, repeated or held
back, and a child that falls silent is started again. Images leave as JPEGs. How children are kept running is `child`'s.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import quote, urlsplit

from edgeinfer.clock import NS_PER_S
from edgeinfer.config import CameraSource, MicrophoneSource, RtspSource
from edgeinfer.pipeline.child import Launch
from edgeinfer.pipeline.frame import SourceError

SILENCE_NS = 15 * NS_PER_S
"""Longer than a camera needs to begin, with key frames ten seconds apart."""
_JPEG_FORMATS = frozenset({"MJPG", "JPEG"})
_FFMPEG = ("ffmpeg", "-hide_banner", "-nostdin", "-nostats", "-loglevel", "error")
_LIVE = ("-fflags", "nobuffer", "-flags", "low_delay", "-analyzeduration", "500000")
"""low_delay: no decoding in threads by frame, which would hold back one frame for each."""
_COPY = ("-c:v", "copy")
_QUALITY = "3"
"""Of 2 (best) to 31: the artefacts of 3 do not change what detectors find."""
_OUTPUT = ("-flush_packets", "1", "-f", "mjpeg", "pipe:1")
_PROTOCOLS = {
    "rtsp": "rtsp,rtp,tcp,udp", "rtsps": "rtsp,rtsps,rtp,tcp,udp,tls,crypto", "http": "http,tcp",
    "https": "http,https,tcp,tls,crypto", "tcp": "tcp", "udp": "udp",
}  # fmt: skip
"""What a stream may make ffmpeg open: a camera must not have it read files of this device."""
_OPTIONS_IN_LISTS = 5
"""The first ffmpeg whose concat lists know `option`."""
_FATAL_SOUND = (
    ("rate is not accurate", "the device has not this rate; name it with plughw: instead of hw:, which resamples"),
    ("Channels count non available", "name the device with plughw: instead of hw:"),
)


def camera(section: CameraSource, formats: Collection[str]) -> Launch:
    """Return how to read a V4L2 camera that gives images in these formats (four-letter codes)."""
    taken, passed = section.format, section.format in {"mjpeg", "jpeg"}
    if section.format == "auto":
        passed = not _JPEG_FORMATS.isdisjoint(formats)
        taken = "mjpeg" if passed else ""
    argv = [*_FFMPEG, *_LIVE, "-f", "v4l2"]
    if taken:
        argv += ["-input_format", taken]
    if section.width:
        argv += ["-video_size", f"{section.width}x{section.height}"]
    if section.fps:
        argv += ["-framerate", str(section.fps)]
    argv += ["-i", str(section.device), "-an", *(_COPY if passed else _encoded()), *_OUTPUT]
    return Launch(tuple(argv), package="ffmpeg", silence_ns=SILENCE_NS)


def network_camera(section: RtspSource, credentials: str, ffmpeg_major: int) -> Launch:
    """Return how to read a network camera; `credentials` is `user:password`, or empty.

    With credentials, the URL goes in a list over ffmpeg's standard input: its arguments are for everyone to see.

    Raises:
        SourceError: the credentials are none.
    """
    scheme = urlsplit(section.url).scheme
    options = ["rtsp_transport", section.transport] if scheme in {"rtsp", "rtsps"} else []
    output = ["-an", *_encoded(width=section.width, fps=section.fps), *_OUTPUT]
    allowed = _PROTOCOLS[scheme]
    if not credentials:
        given = ["-rtsp_transport", section.transport] if options else []
        argv = [*_FFMPEG, *_LIVE, "-protocol_whitelist", allowed, *given, "-i", section.url, *output]
        return Launch(tuple(argv), package="ffmpeg", silence_ns=SILENCE_NS)
    user, colon, password = credentials.partition(":")
    if not user or not colon:
        raise SourceError(f"{section.credentials_file} does not hold user:password in one line")
    address = section.url.partition("://")[2]
    said = f"{quote(user, safe='')}:{quote(password, safe='')}"
    lines = ["ffconcat version 1.0", f"file '{scheme}://{said}@{address}'"]
    if ffmpeg_major >= _OPTIONS_IN_LISTS:
        lines += ["option fflags nobuffer", "option analyzeduration 500000"]
        lines += [f"option {options[0]} {options[1]}"] if options else []
    argv = [*_FFMPEG, *_LIVE, "-f", "concat", "-safe", "0", "-protocol_whitelist", f"pipe,{allowed}", "-i", "pipe:0"]
    secrets = tuple(text for text in (f"{said}@", quote(password, safe=""), password) if text)
    stdin = "\n".join([*lines, ""]).encode()
    return Launch((*argv, *output), stdin, secrets, package="ffmpeg", silence_ns=SILENCE_NS)


def microphone(section: MicrophoneSource, programs: Collection[str]) -> Launch:
    """Return how to record from an ALSA device with one of the programs that are installed.

    Raises:
        SourceError: neither arecord nor ffmpeg is.
    """
    rate = str(section.sample_rate_hz)
    if "arecord" in programs:
        period_us = min(100_000, section.chunk_samples * 1_000_000 // section.sample_rate_hz)
        argv = ["arecord", "-q", "-D", section.device, "-t", "raw", "-f", "S16_LE", "-c", "1", "-r", rate]
        argv += ["-F", str(period_us), "-B", "500000", "--fatal-errors"]  # lost samples end it: a gap is told
    elif "ffmpeg" in programs:
        argv = [*_FFMPEG, "-f", "alsa", "-channels", "1", "-sample_rate", rate, "-i", section.device]
        argv += ["-c:a", "pcm_s16le", "-flush_packets", "1", "-f", "s16le", "pipe:1"]
    else:
        raise SourceError("neither arecord nor ffmpeg is installed; install one: apt-get install alsa-utils")
    return Launch(tuple(argv), package="alsa-utils", silence_ns=SILENCE_NS, fatal=_FATAL_SOUND)


def _encoded(*, width: int = 0, fps: int = 0) -> list[str]:
    """Return the arguments that make a JPEG of every image, each once."""
    filters = []
    if fps:  # a clock that goes back (the camera was restarted) must not stop the stream
        due = f"isnan(prev_selected_t)+gte(t-prev_selected_t,{0.95 / fps:.4f})+lt(t,prev_selected_t)"
        filters.append(f"select='{due}'")
    if width:
        filters.append(f"scale={width}:-2")
    filters.append("setpts=N/25/TB")  # at a constant rate of 25, ffmpeg repeats and drops nothing
    encoder = ["-c:v", "mjpeg", "-pix_fmt", "yuvj420p", "-q:v", _QUALITY, "-threads", "1"]
    return ["-vf", ",".join(filters), "-r", "25", *encoder]
