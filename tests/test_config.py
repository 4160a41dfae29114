from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeinfer.artifact import manifest
from edgeinfer.config import (
    BrokerSection,
    CameraSource,
    CommandSource,
    DeviceConfig,
    DeviceSection,
    DirectorySource,
    JsonLinesSink,
    LoopSection,
    MemorySection,
    MicrophoneSource,
    ModelSection,
    MqttSection,
    MqttSink,
    NearbyConfig,
    OffloadSection,
    PathsSection,
    RtspSource,
    SchedulerSection,
    TelemetrySection,
    ThermalSection,
    WavSource,
    doubts,
    load_device_config,
    load_nearby_config,
)
from edgeinfer.config.bounds import BOUNDS
from edgeinfer.config.check import MODEL_NAME
from edgeinfer.errors import ConfigError, Problem
from edgeinfer.pipeline.frame import MAX_FRAME_BYTES
from edgeinfer.quantity import Bytes, Nanoseconds
from edgeinfer.request import DataScope
from edgeinfer.toml_file import make_converter

DOCUMENT = Path(__file__).parent.parent / "docs/configuration.md"

HEADINGS: dict[str, type[Any]] = {
    "Top level": DeviceConfig,
    "[device]": DeviceSection,
    "[paths]": PathsSection,
    "[memory]": MemorySection,
    "[thermal]": ThermalSection,
    "[scheduler]": SchedulerSection,
    "[mqtt]": MqttSection,
    "[mqtt.site] and [mqtt.fleet]": BrokerSection,
    "[offload]": OffloadSection,
    "[telemetry]": TelemetrySection,
    "[[model]]": ModelSection,
    "[[loop]]": LoopSection,
    '[loop.source] kind = "directory"': DirectorySource,
    '[loop.source] kind = "command"': CommandSource,
    '[loop.source] kind = "wav"': WavSource,
    '[loop.source] kind = "camera"': CameraSource,
    '[loop.source] kind = "rtsp"': RtspSource,
    '[loop.source] kind = "microphone"': MicrophoneSource,
    '[loop.sinks] kind = "mqtt"': MqttSink,
    '[loop.sinks] kind = "jsonl"': JsonLinesSink,
    "Top level of nearby.toml": NearbyConfig,
}


def _load(tmp_path: Path, text: str, *, nearby: bool = False) -> Any:
    path = tmp_path / ("nearby.toml" if nearby else "device.toml")
    path.write_text(text, encoding="utf-8")
    return load_nearby_config(path) if nearby else load_device_config(path)


def _problems(tmp_path: Path, text: str, *, nearby: bool = False) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, text, nearby=nearby)
    assert caught.value.exit_code == 78
    for problem in caught.value.problems:
        assert str(problem) in str(caught.value)
    return {problem.path: problem.message for problem in caught.value.problems}


# --- the documentation


def _documented() -> dict[str, dict[str, str]]:
    """Return key -> default column, by heading."""
    found: dict[str, dict[str, str]] = {}
    heading = ""
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        if line.startswith("### "):
            heading = line.removeprefix("### ")
            found[heading] = {}
        elif row := re.fullmatch(r"\| `(\w+)` \| (.*?) \| (.+) \|", line):
            assert row[1] not in found[heading], f"{heading} {row[1]} is described twice"
            found[heading][row[1]] = row[2]
    return found


def _sections(cls: type[Any]) -> Iterator[type[Any]]:
    """Yield every dataclass that a file can hold, by following the fields' types."""
    yield cls
    for hint in typing.get_type_hints(cls).values():
        stack = [hint]
        while stack:
            kind = stack.pop()
            stack += typing.get_args(kind)
            if dataclasses.is_dataclass(kind):
                yield from _sections(typing.cast("type[Any]", kind))


def test_every_key_is_documented_and_every_documented_key_exists() -> None:
    documented = _documented()
    assert set(documented) == set(HEADINGS)
    assert set(HEADINGS.values()) == set(_sections(DeviceConfig)) | set(_sections(NearbyConfig))
    for heading, cls in HEADINGS.items():
        assert set(documented[heading]) == {field.name for field in dataclasses.fields(cls)}, heading


def test_every_documented_default_is_the_real_one() -> None:
    converter = make_converter()
    for heading, cls in HEADINGS.items():
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            said = _documented()[heading][field.name]
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            where = f"{heading} {field.name}"
            if required:
                assert said in {"required", "section"}, where
            elif said.startswith("`"):
                value = tomllib.loads(f"x = {said.strip('`')}")["x"]
                default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
                assert (value if value == [] else converter.structure(value, hints[field.name])) == default, where
            else:
                default = None if field.default is dataclasses.MISSING else field.default
                assert default is None, where
                assert said in {"section", "none", "all", "board's", "small ones"}, where


def test_the_documents_example_is_a_sound_file(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    loop = _load(tmp_path, example).loop[0]
    assert (loop.model, loop.data_scope) == ("pp-ocr-det", DataScope.SITE)
    assert isinstance(loop.source, CommandSource)
    assert loop.sinks == [MqttSink()]


# --- what is read


def test_an_empty_file_is_a_device_on_its_own(tmp_path: Path) -> None:
    assert _load(tmp_path, "") == DeviceConfig()


def test_units_are_read(tmp_path: Path) -> None:
    config = _load(tmp_path, '[memory]\nceiling = "1.5 GiB"\nreserve = 1000\n[scheduler]\nkill_grace = "0.5 s"')
    assert (config.memory.ceiling, config.memory.reserve) == (1_610_612_736, 1000)
    assert config.scheduler.kill_grace == 500_000_000


def test_sources_and_sinks_are_told_apart_by_kind(tmp_path: Path) -> None:
    config = _load(
        tmp_path,
        """
        [[model]]
        name = "m"
        [[loop]]
        name = "a"
        model = "m"
        period = "1 s"
        deadline = "1 s"
        source = { kind = "directory", path = "/frames", mode = "watch" }
        sinks = [{ kind = "jsonl", path = "/x.jsonl", max_bytes = "1 MiB" }, { kind = "mqtt", qos = 1 }]
        [[loop]]
        name = "b"
        model = "m"
        period = "32 ms"
        deadline = "32 ms"
        source = { kind = "wav", path = "/x.wav", chunk_samples = 512 }
        """,
    )
    assert config.loop[0].source == DirectorySource(Path("/frames"), mode="watch")
    assert config.loop[0].sinks == [JsonLinesSink(Path("/x.jsonl"), max_bytes=1 << 20), MqttSink(qos=1)]  # type: ignore[arg-type]
    assert config.loop[1].source == WavSource(Path("/x.wav"), 512)


LOOP = """
[[model]]
name = "m"
[[loop]]
name = "l"
model = "m"
period = "1 s"
deadline = "1 s"
"""

WRONG: dict[str, tuple[str, str, str]] = {
    "an unknown key": ("colour = 1", "colour", "unknown key (known here: board, device"),
    "an unknown key deep inside": ("[mqtt.site]\nhost = 'x'\nprot = 1", "mqtt.site.prot", "unknown key"),
    "a text for a number": ("[scheduler]\nqueue_limit = '64'", "scheduler.queue_limit", "'64' is not a whole number"),
    "a boolean for a number": ("[scheduler]\nqueue_limit = true", "scheduler.queue_limit", "True is not a whole number"),
    "a number for a boolean": ("[thermal]\nenabled = 1", "thermal.enabled", "1 is neither true nor false"),
    "a duration without unit": ("[telemetry]\nreport_period = 10", "telemetry.report_period", "not a duration such as"),
    "a size without sense": ("[memory]\nceiling = '5 bananas'", "memory.ceiling", "not a size such as"),
    "no host": ("[mqtt.site]\nport = 1", "mqtt.site.host", "is required"),
    "an impossible port": ("[mqtt.site]\nhost = 'x'\nport = 0", "mqtt.site.port", "0 is not between 1 and 65535"),
    "half of a key pair": ("[mqtt.site]\nhost = 'x'\ntls_cert = 'c'", "mqtt.site.tls_cert", "belong together"),
    "a wildcard in a topic": ("[device]\nid = 'a/+'", "device.id", "becomes part of MQTT topics"),
    "a prefix that is none": ("[mqtt]\nprefix = 'a//b'", "mqtt.prefix", "becomes part of MQTT topics"),
    "no queue": ("[scheduler]\nqueue_limit = 0", "scheduler.queue_limit", "0 is not between 1 and"),
    "no CPUs": ("[scheduler]\ncpus = []", "scheduler.cpus", "at least one"),
    "a model twice": ("[[model]]\nname = 'm'\n[[model]]\nname = 'm'", "model[1].name", "'m' is the name of model[0] already"),
    "too many workers": ("[[model]]\nname = 'm'\nworkers = 17", "model[0].workers", "between 1 and 16"),
    "an unknown source": (LOOP + "source = { kind = 'tape' }", "loop[0].source.kind", "'tape' is not one of directory"),
    "a source without kind": (LOOP + "source = { path = '/' }", "loop[0].source.kind", "is required: one of directory"),
    "a source's unknown key": (
        LOOP + "source = { kind = 'directory', path = '/', modus = 1 }", "loop[0].source.modus", "unknown key",
    ),
    "a mode that is none": (LOOP + "source = { kind = 'directory', path = '/', mode = 'x' }", "loop[0].source.mode", "not replay"),
    "a framing that is none": (LOOP + "source = { kind = 'command', argv = ['x'], framing = 'x' }", "loop[0].source.framing", "not length"),
    "no program": (LOOP + "source = { kind = 'command', argv = [] }", "loop[0].source.argv", "must name a program"),
    "a fixed size that is none": (
        LOOP + "source = { kind = 'command', argv = ['x'], framing = 'fixed' }", "loop[0].source.frame_bytes", "is required with",
    ),
    "no samples": (LOOP + "source = { kind = 'wav', path = '/', chunk_samples = 0 }", "loop[0].source.chunk_samples", "0 is not between 1 and"),
    "no samples of a microphone": (LOOP + "source = { kind = 'microphone', chunk_samples = 0 }", "loop[0].source.chunk_samples", "0 is not between 1 and"),
    "a rate that is none": (LOOP + "source = { kind = 'wav', path = '/', chunk_samples = 1, sample_rate_hz = 0 }", "loop[0].source.sample_rate_hz", "0 is not between 1 and"),
    "half a size": (LOOP + "source = { kind = 'camera', width = 640 }", "loop[0].source.height", "belong together"),
    "a camera that is no path": (LOOP + "source = { kind = 'camera', device = 'video0' }", "loop[0].source.device", "not an absolute path"),
    "no stream": (LOOP + "source = { kind = 'rtsp', url = 'file:///etc/passwd' }", "loop[0].source.url", "is not an rtsp"),
    "a stream in quotes": (LOOP + 'source = { kind = "rtsp", url = "rtsp://h/\'x" }', "loop[0].source.url", "is not an rtsp"),
    "a password in sight": (LOOP + "source = { kind = 'rtsp', url = 'rtsp://joe:pa@h/1' }", "loop[0].source.url", "credentials_file"),
    "an unknown transport": (LOOP + "source = { kind = 'rtsp', url = 'rtsp://h/1', transport = 'x' }", "loop[0].source.transport", "not tcp or udp"),
    "a rate below nothing": (LOOP + "source = { kind = 'rtsp', url = 'rtsp://h/1', fps = -1 }", "loop[0].source.fps", "-1 is not between 0 and"),
    "an unknown scope": (LOOP + "source = { kind = 'directory', path = '/' }\nscope = 'world'", "loop[0].scope", "not device, site or any"),
    "an impossible qos": (
        LOOP + "source = { kind = 'directory', path = '/' }\nsinks = [{ kind = 'mqtt', qos = 2 }]", "loop[0].sinks[0].qos", "2 is not between 0 and 1",
    ),
    "a model that is not there": (
        LOOP.replace('model = "m"', 'model = "n"') + "source = { kind = 'directory', path = '/' }", "loop[0].model", "'n' is not a [[model]]",
    ),
    "a table for a list": (LOOP + "source = { kind = 'directory', path = '/' }\nsinks = { kind = 'mqtt' }", "loop[0].sinks", "must be a list: [{ kind = … }]"),
    "a section for a list": ("[model]\nname = 'm'", "model", "or a section in double brackets"),
    "a text for a list": (LOOP + "source = { kind = 'command', argv = 'cmd' }", "loop[0].source.argv", 'must be a list: ["cmd"]'),
    "a text for a section": ("mqtt.site = 'broker'", "mqtt.site", 'must be a section, or { key = value, … }; "broker" is none'),
    "a text for an element": ("model = ['m']", "model[0]", "must be a section"),
    "a text for a source": (LOOP + "source = 'camera'", "loop[0].source", "is not { kind = … }; kinds are directory"),
    "a slip of the pen": ("[scheduler]\nqueue_limt = 1", "scheduler.queue_limt", "unknown key; did you mean queue_limit? (known here: cpus"),
    "a slip in a section's name": ("[mqqt.site]\nhost = 'x'", "mqqt", "did you mean mqtt?"),
    "a key that belongs deeper": ("[mqtt]\nhost = 'x'", "mqtt.host", "it belongs in [mqtt.site] or [mqtt.fleet] (known here: fleet"),
    "a key that belongs elsewhere": ("state_dir = '/x'", "state_dir", "it belongs in [paths]"),
    "a key that belongs above": ("[device]\nboard = 'x'", "device.board", "it belongs in the top level"),
    "another section's key": (LOOP + "threads = 2", "loop[0].threads", "it belongs in [model]"),
    "a name that no bundle has": ("[[model]]\nname = 'Person_Detect'", "model[0].name", "no bundle can have this name"),
    "a flood": ("[telemetry]\nreport_period = '0 s'", "telemetry.report_period", "0 ms is not between 100 ms and 24 h"),
    "a period of ages": (LOOP.replace('period = "1 s"', "period = '999999999999 h'") + "source = { kind = 'directory', path = '/' }", "loop[0].period", "is not between 1 ms and 168 h"),
    "a duration of 200 digits": ("[scheduler]\nkill_grace = '" + "9" * 200 + " h'", "scheduler.kill_grace", "is not a duration such as"),
    "a size of 400 digits": ("[memory]\nceiling = '" + "9" * 400 + " GiB'", "memory.ceiling", "is not a size such as"),
    "a size of nothing": ("[memory]\nceiling = 0", "memory.ceiling", "0 B is not between 1 MiB and 1024 GiB"),
    "a queue of the world": ("[scheduler]\nqueue_limit = 99999999999999999999", "scheduler.queue_limit", "more than 64 bits"),
    "CPUs that no board has": ("[scheduler]\ncpus = [0, -1]", "scheduler.cpus[1]", "-1 is not between 0 and 4095"),
    "frames of terabytes": (LOOP + "source = { kind = 'command', argv = ['x'], framing = 'fixed', frame_bytes = 99999999999999 }", "loop[0].source.frame_bytes", "is not between 0 and"),
    "chunks of an age": (LOOP + "source = { kind = 'wav', path = '/', chunk_samples = 99999999999 }", "loop[0].source.chunk_samples", "is not between 1 and"),
    "a file of nothing": (LOOP + "source = { kind = 'directory', path = '/' }\nsinks = [{ kind = 'jsonl', path = '/x', max_bytes = 0 }]", "loop[0].sinks[0].max_bytes", "0 B is not between 1 KiB and"),
    "NUL in an argument": (LOOP + 'source = { kind = "command", argv = ["a\\u0000b"] }', "loop[0].source.argv[0]", "NUL"),
    "a program without a name": (LOOP + "source = { kind = 'command', argv = [''] }", "loop[0].source.argv", "must name a program"),
    "a host of nothing": ("[mqtt.site]\nhost = ''", "mqtt.site.host", "1 to 253 characters"),
    "NUL in a host": ('[mqtt.site]\nhost = "a\\u0000b"', "mqtt.site.host", "without blanks"),
    "a user name of 70 kB": ("[mqtt.site]\nhost = 'b'\nusername = '" + "u" * 70_000 + "'", "mqtt.site.username", "more than 1024"),
    "a user name that MQTT cannot carry": ("[mqtt.site]\nhost = 'b'\nusername = '" + "u" * 2000 + "'", "mqtt.site.username", "more than 1024"),
    "too many CPUs": (f"[scheduler]\ncpus = {list(range(1025))}", "scheduler.cpus", "has 1025 elements"),
    "too many models": ("".join(f"[[model]]\nname = 'm{number}'\n" for number in range(65)), "model", "has 65 elements, at most 64"),
    "no TOML": ("= =", "", "is not TOML"),
    "nested without end": ("a = " + "[" * 5000 + "]" * 5000, "", "nested too deeply"),
    "an integer without end": ("a = " + "9" * 5000, "", "is not TOML"),
    "a file without end": ("# " + "x" * (1 << 20), "", "has more than 1048576 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_refuses(what: str, tmp_path: Path) -> None:
    text, path, message = WRONG[what]
    problems = _problems(tmp_path, text)
    assert path in problems
    assert message in problems[path]


def test_every_number_has_bounds_that_allow_its_default() -> None:
    numbers = set()
    for cls in set(_sections(DeviceConfig)) | set(_sections(NearbyConfig)):
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            kinds = {hints[field.name], *typing.get_args(hints[field.name])}
            kinds |= {inner for kind in kinds for inner in typing.get_args(kind)}
            if not kinds & {int, float, Bytes, Nanoseconds}:
                continue
            numbers.add((cls, field.name))
            bound = BOUNDS[cls, field.name]
            assert bound.least <= bound.most
            if isinstance(field.default, int):
                assert bound.least <= field.default <= bound.most, (cls, field.name)
    assert numbers == set(BOUNDS)


def test_a_nearby_service_does_not_flood_the_broker(tmp_path: Path) -> None:
    text = "advert_period = '0 s'\nmax_per_device = 0\n[mqtt.site]\nhost = 'x'\n[[model]]\nname = 'm'\nthreads = 9999"
    assert set(_problems(tmp_path, text, nearby=True)) == {"advert_period", "max_per_device", "model[0].threads"}


def test_frames_are_bounded_as_loops_bound_them() -> None:
    assert BOUNDS[CommandSource, "frame_bytes"].most == MAX_FRAME_BYTES


def test_all_problems_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    problems = _problems(
        tmp_path, "colour = 1\n[scheduler]\nqueue_limit = 'x'\nkill_grace = 3\n[mqtt.site]\nport = 'x'"
    )
    assert set(problems) == {
        "colour",
        "scheduler.queue_limit",
        "scheduler.kill_grace",
        "mqtt.site.host",
        "mqtt.site.port",
    }


def test_wrong_types_hide_nothing_of_what_could_be_read(tmp_path: Path) -> None:
    problems = _problems(
        tmp_path,
        """
        colour = 1
        [scheduler]
        queue_limit = 0
        kill_grace = 3
        [offload]
        enabled = "yes"
        max_in_flight = 0
        [mqtt.site]
        host = "b"
        port = 0
        prot = 1
        [[model]]
        name = "m"
        workers = 17
        threads = "2"
        [[model]]
        name = "m"
        [[loop]]
        name = "half"
        [[loop]]
        name = "l"
        model = "n"
        period = "1 s"
        deadline = "1 s"
        priority = "high"
        scope = "world"
        source = { kind = "directory", path = "/", mode = "x" }
        sinks = [{ kind = "tape" }, { kind = "mqtt", qos = 2 }]
        """,
    )
    assert set(problems) == {
        "colour", "scheduler.queue_limit", "scheduler.kill_grace", "offload.enabled", "offload.max_in_flight",
        "mqtt.site.port", "mqtt.site.prot", "model[1].name", "model[0].workers", "model[0].threads",
        "loop[0].model", "loop[0].source", "loop[0].period", "loop[0].deadline",
        "loop[1].model", "loop[1].priority", "loop[1].scope", "loop[1].source.mode", "loop[1].sinks[0].kind",
        "loop[1].sinks[1].qos",
    }  # fmt: skip


def test_what_follows_from_a_wrong_type_is_not_told_too(tmp_path: Path) -> None:
    loop = LOOP.removeprefix('\n[[model]]\nname = "m"\n') + "source = { kind = 'directory', path = '/' }"
    assert set(_problems(tmp_path, "[[model]]\nname = 5\n" + loop)) == {"model[0].name"}
    assert set(_problems(tmp_path, "[model]\nname = 'm'\n" + loop)) == {"model"}
    nearby = "[[model]]\nname = 'm'\n[mqtt.site]\nport = 'x'"
    assert set(_problems(tmp_path, nearby, nearby=True)) == {"mqtt.site.host", "mqtt.site.port"}


def test_model_names_are_those_that_bundles_may_have() -> None:
    assert MODEL_NAME.pattern == manifest._NAME.pattern


def test_a_loop_without_a_way_out_is_doubted(tmp_path: Path) -> None:
    loop = LOOP + "source = { kind = 'directory', path = '/' }\nscope = 'site'\nsinks = [{ kind = 'mqtt' }]\n"
    found = {problem.path: problem.message for problem in doubts(_load(tmp_path, loop))}
    assert found.keys() == {"loop[0].sinks", "loop[0].scope"}
    assert all("add [mqtt.site]" in text for text in found.values())
    assert list(doubts(_load(tmp_path, loop + "[mqtt.site]\nhost = 'b'"))) == []
    assert list(doubts(_load(tmp_path, LOOP + "source = { kind = 'directory', path = '/' }"))) == []


def test_a_missing_and_an_unreadable_file_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_device_config(tmp_path / "none.toml")
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(ConfigError, match="cannot be read: it is a pipe"):
        load_device_config(tmp_path / "pipe.toml")
    with pytest.raises(ConfigError, match="cannot be read: it is a device"):
        load_device_config(Path("/dev/zero"))
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_device_config(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"x = '\xff'")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_device_config(tmp_path / "latin.toml")


def test_a_nearby_service_needs_a_broker_and_a_model(tmp_path: Path) -> None:
    assert set(_problems(tmp_path, "model = []\n[mqtt]", nearby=True)) == {"mqtt.site", "model"}
    assert set(_problems(tmp_path, "", nearby=True)) == {"mqtt", "model"}
    text = "[mqtt.site]\nhost = 'x'\n[[model]]\nname = 'm'\n"
    assert _load(tmp_path, text, nearby=True).max_per_device == 16
    assert set(_problems(tmp_path, "location = 'moon'\nmax_per_device = 0\n" + text, nearby=True)) == {
        "location", "max_per_device",
    }  # fmt: skip


# --- anything at all

toml_values = st.recursive(
    st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "x", "1 s", "5 ms", "4 MiB", "replay", "device", "mqtt"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["name", "kind", "path", "host", "model", "x"]), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
keys = st.sampled_from(sorted({field.name for cls in HEADINGS.values() for field in dataclasses.fields(cls)}))
tables = st.dictionaries(keys, toml_values | st.dictionaries(keys, toml_values, max_size=4), max_size=5)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return repr(value) if not isinstance(value, str) else f'"{value}"'


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tables, st.booleans())
def test_any_table_is_read_or_every_problem_has_a_path_and_words(
    tmp_path: Path, table: dict[str, Any], nearby: bool
) -> None:
    text = "\n".join(f"{key} = {_toml(value)}" for key, value in table.items())
    try:
        _load(tmp_path, text, nearby=nearby)
    except ConfigError as error:
        problems = error.problems
        assert problems and all(problem.message and isinstance(problem, Problem) for problem in problems)  # noqa: PT018


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(tmp_path: Path, text: str) -> None:
    with contextlib.suppress(ConfigError, UnicodeEncodeError):
        _load(tmp_path, text)


def test_a_socket_path_that_the_kernel_cannot_take_is_told_before_the_start(tmp_path: Path) -> None:
    file = tmp_path / "device.toml"
    for length, problems in ((107, 0), (108, 1)):
        file.write_text(f"[paths]\nsocket = '/{'s' * (length - 1)}'\n")
        if not problems:
            load_device_config(file)
            continue
        with pytest.raises(ConfigError, match=r"paths\.socket: has 108 bytes, a socket's path has at most 107"):
            load_device_config(file)
