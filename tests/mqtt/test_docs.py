"""docs/mqtt.md and the code tell the same: every topic, record, field, property, kind, verb, state and counter."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from edgeinfer.clock import MonotonicClock
from edgeinfer.control.commands import VERBS
from edgeinfer.errors import LinkError
from edgeinfer.mqtt import envelope
from edgeinfer.mqtt.backoff import SHORT_NS, STABLE_NS, WAITS, LinkState
from edgeinfer.mqtt.exchange import ANSWER_PROPERTIES, ASK_PROPERTIES
from edgeinfer.mqtt.link import Message, MqttLink
from edgeinfer.mqtt.topics import Topics
from edgeinfer.telemetry.events import KINDS
from tests.nearby.rig import until
from tests.system.broker import Broker

PAGE = (Path(__file__).parents[2] / "docs/mqtt.md").read_text()
OPERATIONS = (Path(__file__).parents[2] / "docs/operations.md").read_text()
STRUCTS: dict[str, type[msgspec.Struct]] = {
    name: value
    for name, value in vars(envelope).items()
    if isinstance(value, type) and issubclass(value, msgspec.Struct) and value is not msgspec.Struct
}


def section(title: str) -> str:
    """The text under a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/mqtt.md has no section {title!r}"
    return found[1]


def words(text: str) -> set[str]:
    """Everything in code font."""
    return set(re.findall(r"`([^`\n]+)`", text))


def first_column(table: str) -> list[str]:
    rows = re.findall(r"^\| (.+?) \|", table, re.MULTILINE)
    return [word for row in rows for word in re.findall(r"`([^`]+)`", row)]


def record_fields(name: str) -> list[str]:
    """The first column of a record's table: under its own heading, or after its name and a comma or colon."""
    if re.search(rf"^### {name}\n", PAGE, re.MULTILINE):
        text = section(name)
    else:
        found = re.search(rf"^{name}[,:].*", PAGE, re.MULTILINE | re.DOTALL)
        assert found, f"docs/mqtt.md has no table of {name}"
        text = found[0]
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert table, f"docs/mqtt.md has no table of {name}"
    return re.findall(r"^\| `(\w+)` ", table[0], re.MULTILINE)


def test_every_topic_is_in_the_table() -> None:
    topics = Topics("PREFIX", "SITE", "DEVICE")
    said = first_column(section("Topics"))
    made = {
        topics.status, topics.state, topics.report, topics.event("KIND"), topics.result("LOOP"), topics.reply,
        topics.command("VERB"), topics.advert("PEER"), topics.infer("PEER"), topics.offload_reply,
    }  # fmt: skip
    documented = {re.sub(r"\{(\w+)\}", lambda word: word[1].upper(), topic) for topic in said}
    assert documented == made
    members = {name for name in vars(Topics) if not name.startswith(("_", "parse_"))}
    assert members == {
        "prefix", "site", "device", "status", "state", "report", "event", "result", "command", "command_filter",
        "reply", "offload_reply", "reply_of", "advert", "adverts_filter", "infer", "infer_filter",
    }, "a new topic needs a row in docs/mqtt.md and a place in this test"  # fmt: skip


@pytest.mark.parametrize("name", [name for name in STRUCTS if name != "RecentReport"])
def test_every_field_is_in_its_records_table_in_order(name: str) -> None:
    assert record_fields(name) == list(STRUCTS[name].__struct_fields__)


def test_the_fields_of_recent_reports_are_told() -> None:
    line = next(line for line in PAGE.splitlines() if line.startswith("RecentReport has"))
    assert set(STRUCTS["RecentReport"].__struct_fields__) <= words(line)


def test_every_record_type_is_one_of_the_union_or_part_of_one() -> None:
    assert {kind.__name__ for kind in get_args(envelope.Record)} == {
        "Status", "State", "Report", "Event", "Command", "Reply", "Advert",
    }  # fmt: skip


def offload_tables() -> tuple[str, str]:
    text = section("Offloading")
    return text.partition("\nRequest:\n")[2].partition("\nAnswer:\n")[0], text.partition("\nAnswer:\n")[2].partition(
        "\nWhat the device does:\n"
    )[0]


def test_every_property_of_the_offload_conversation_is_told_and_no_other() -> None:
    request, answer = offload_tables()
    assert _rows(request) == set(ASK_PROPERTIES)
    assert _rows(answer) == set(ANSWER_PROPERTIES)


def _rows(table: str) -> set[str]:
    return set(re.findall(r"^\| `([\w-]+)` ", table, re.MULTILINE))


def test_event_kinds_and_verbs_are_the_codes() -> None:
    kinds = section("Event").partition("Kinds:")[2]
    assert words(kinds) == set(KINDS)
    verbs = next(line for line in PAGE.splitlines() if line.startswith("Verbs:"))
    assert set(VERBS) <= words(verbs)
    for verb in VERBS.values():
        assert set(verb.arguments.__struct_fields__) <= words(verbs)


def test_link_states_and_their_waits_are_the_codes() -> None:
    text = section("What a link does when things go wrong")
    assert re.findall(r"^\| `(\w+)` ", text, re.MULTILINE) == [state.value for state in LinkState]
    for state, told in (
        (LinkState.UNREACHABLE, "0.25 s, growing by a fifth each time up to 30 s"),
        (LinkState.AUTH_FAILED, "10 s, doubling up to 5 min"),
        (LinkState.TAKEN_OVER, "5 s, doubling up to 5 min"),
    ):
        row = next(line for line in text.splitlines() if line.startswith(f"| `{state.value}`"))
        assert told in row
    second = 1_000_000_000
    assert (WAITS[LinkState.UNREACHABLE].first_ns, WAITS[LinkState.UNREACHABLE].growth) == (second // 4, 1.2)
    assert (WAITS[LinkState.AUTH_FAILED].first_ns, WAITS[LinkState.AUTH_FAILED].growth) == (10 * second, 2)
    assert (WAITS[LinkState.TAKEN_OVER].first_ns, WAITS[LinkState.TAKEN_OVER].growth) == (5 * second, 2)
    assert [waits.cap_ns // second for waits in WAITS.values()] == [30, 300, 300]
    assert (10 * second, 30 * second) == (SHORT_NS, STABLE_NS)


def _counter_names() -> Iterable[str]:
    """Every counter that the sources of links and offloading write."""
    root = Path(envelope.__file__).parents[1]
    for path in [
        *(root / "mqtt").glob("*.py"),
        *(root / "execution" / name for name in ("offload.py", "conversation.py", "peers.py")),
    ]:
        source = path.read_text()
        yield from re.findall(r'ounters\["([a-z_.]+)"\]', source)
        yield from (f"dropped.{cause}" for cause in re.findall(r'dropped\["([a-z]+)"', source))
        yield from (f"dropped.{cause}" for cause in re.findall(r'_(?:drop|forget)\((?:[\w.()]+, )?"([a-z]+)"', source))


def test_every_counter_is_told() -> None:
    names = set(_counter_names())
    assert {"sent", "answer_late", "dropped.overflow", "dropped.unsendable", "dropped.replaced"} <= names
    assert names <= words(section("Counters"))


def test_the_examples_are_records() -> None:
    kinds: list[tuple[str, type[Any]]] = [("Status", envelope.Status), ("Advert", envelope.Advert)]
    for title, kind in kinds:
        example = re.search(r"```json\n(.*?)```", section(title), re.DOTALL)
        assert example, title
        record = envelope.decode(example[1].encode(), kind)
        assert json.loads(example[1]) == json.loads(envelope.encode(record))


@pytest.mark.system
async def test_the_broker_example_keeps_everyone_to_its_own(tmp_path: Path) -> None:
    """The configuration and the access list of the page, on a real mosquitto; replies go where its examples ask for."""
    [inbox] = re.findall(r"-e (\S+)", section("Command"))
    [ops] = re.findall(r"-e (\S+)", OPERATIONS)
    assert inbox == "edgeinfer/v1/plant-3/operator/inbox/cam-1"
    assert ops == inbox.replace("plant-3", "default"), "the other page's example is for the same access list"
    config, acl = re.findall(r"```\n(# mosquitto.conf.*?|# acl.*?)```", PAGE, re.DOTALL)
    (tmp_path / "acl").write_text(acl)
    passwords = tmp_path / "passwords"
    passwords.touch(mode=0o600)
    for user in ("cam-1", "cam-2", "hall", "operator"):
        subprocess.run(["mosquitto_passwd", "-b", str(passwords), user, user], check=True, capture_output=True)
        (tmp_path / user).write_text(user)
    settings = [
        line.replace("/etc/mosquitto", str(tmp_path))
        for line in config.splitlines()
        if line and not line.startswith(("#", "listener", "allow_anonymous", "set_tcp_nodelay"))
    ]
    with Broker(tmp_path, settings, anonymous=False) as broker:
        names = ("cam-1", "cam-2", "hall", "operator")
        links = {
            user: MqttLink(
                broker.section(username=user, password_file=tmp_path / user),
                name=user,
                client_id=user,
                clock=MonotonicClock(),
            )
            for user in names
        }
        seen: list[tuple[str, str]] = []
        for user, link in links.items():
            link.subscribe("edgeinfer/#", lambda message, user=user: seen.append((user, message.topic)))  # type: ignore[misc]
        tasks = [asyncio.create_task(link.run(), name=link.name) for link in links.values()]
        await until(lambda: all(link.connected for link in links.values()))
        own = {user: Topics("edgeinfer", "plant-3", user) for user in names}
        tried = {
            ("cam-1", own["cam-1"].report): {"cam-1", "operator"},
            ("cam-1", own["cam-1"].infer("hall")): {"hall", "operator"},
            ("cam-2", own["cam-1"].infer("hall")): set(),
            ("cam-2", own["cam-1"].status): set(),
            ("cam-2", own["cam-1"].command("load")): set(),
            ("cam-2", own["cam-1"].offload_reply): set(),
            ("hall", own["cam-1"].offload_reply): {"cam-1", "operator"},
            ("hall", own["hall"].advert("hall")): {"cam-1", "cam-2", "hall", "operator"},
            ("operator", own["cam-1"].command("load")): {"cam-1", "operator"},
            ("operator", own["cam-1"].report): set(),
            ("cam-1", inbox): {"operator"},
            ("cam-2", inbox): set(),
            ("cam-1", own["operator"].command("load")): set(),
        }
        for (user, topic), allowed in tried.items():
            seen.clear()
            with contextlib.suppress(LinkError):  # refused by the broker
                await links[user].publish(Message(topic, b"x"), timeout_s=2)
            await asyncio.sleep(0.1)
            assert {reader for reader, _ in seen} == allowed, (user, topic)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
