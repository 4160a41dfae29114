"""Commands: obeyed once, answered once, refused with the reason; whatever comes."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from edgeinfer.clock import NS_PER_MS
from edgeinfer.control.commands import VERBS
from edgeinfer.control.journal import MAX_REPLY_BYTES
from edgeinfer.control.judge import MAX_COMMAND_BYTES
from edgeinfer.control.plane import MAX_WAITING
from edgeinfer.mqtt.message import Keep
from tests.control.plane_fixture import REPLY_TO, TOPICS, Bench, with_bench
from tests.virtual_time import run_virtual

T = TypeVar("T")
SET = {"id": "a1", "args": {"loop": "camera", "enabled": False}}


def run(test: Callable[[Bench], Awaitable[T]], journal: Path | None = None, *, synced: bool = True) -> T:
    return run_virtual(with_bench(test, journal, synced=synced)())  # type: ignore[arg-type]


def issued(age_s: int, ttl_s: float = 60) -> dict[str, Any]:
    minute, second = divmod(3600 - age_s, 60)
    return {**SET, "issued_at": f"2026-05-01T11:{minute:02}:{second:02}Z" if minute < 60 else "2026-05-01T12:00:00Z",
            "ttl_s": ttl_s}  # fmt: skip


# Obeyed and answered

ORDERS = {
    "get-state": ({}, ("get-state",)),
    "set-loop": (
        {"loop": "camera", "enabled": True, "period_ms": 40, "deadline_ms": 33.5},
        ("set-loop", "camera", True, 40 * NS_PER_MS, 33_500_000),
    ),
    "load": ({"model": "m", "version": "1.2"}, ("load", "m", "1.2")),
    "unload": ({"model": "m"}, ("unload", "m")),
}


def test_every_verb_has_a_row_here() -> None:
    assert ORDERS.keys() == VERBS.keys()


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_is_carried_out_and_answered_with_its_correlation(verb: str) -> None:
    args, done = ORDERS[verb]

    async def test(bench: Bench) -> None:
        bench.deliver(verb, {"id": "x", "args": args}, correlation=b"\x00\xff")
        await bench.settle()
        [(message, keep)] = bench.link.sent
        assert (message.topic, message.correlation, message.qos, message.retain) == (REPLY_TO, b"\x00\xff", 1, False)
        assert keep is Keep.FIFO
        reply = json.loads(message.payload)
        assert (reply["id"], reply["verb"], reply["outcome"]) == ("x", verb, "ok")
        assert reply["stamp"].keys() == {"at", "clock_synced", "boot", "mono_ns"}
        assert bench.daemon.done == [done]

    run(test)


def test_nan_in_a_result_is_null() -> None:
    async def test(bench: Bench) -> None:
        assert (await bench.ask("get-state", {"id": "x"}))["result"] == {"p99_ms": None}

    run(test)


def test_a_result_that_is_too_long_to_send_is_left_out_and_said_so() -> None:
    async def test(bench: Bench) -> None:
        bench.daemon.state = {"text": "x" * MAX_REPLY_BYTES}
        reply = await bench.ask("get-state", {"id": "x"})
        assert reply["outcome"] == "ok"
        assert "too long" in reply["detail"]
        assert "result" not in reply

    run(test)


@pytest.mark.parametrize(
    ("verb", "args", "outcome", "reason", "words"),
    [
        ("set-loop", {"loop": "nope", "enabled": True}, "refused", "unknown_loop", "there are camera"),
        ("load", {"model": "big"}, "refused", "memory", "2.0 MiB"),
        ("load", {"model": "bug"}, "failed", "internal", "KeyError"),
        ("load", {"model": "endless"}, "failed", "timeout", "300 s"),
    ],
)
def test_what_goes_wrong_is_answered_and_the_next_command_works(
    verb: str, args: dict[str, Any], outcome: str, reason: str, words: str
) -> None:
    async def test(bench: Bench) -> None:
        bench.deliver(verb, {"id": "x", "args": args})
        await bench.settle(301)
        [reply] = bench.take()
        assert (reply["outcome"], reply["reason"]) == (outcome, reason)
        assert words in reply["detail"]
        assert (await bench.ask("set-loop", SET))["outcome"] == "ok"

    run(test)


# Nonsense: E7, E13

NONSENSE: dict[str, bytes] = {
    "no utf-8": b"\xff\xfe{",
    "empty": b"",
    "a list": b"[]",
    "null": b"null",
    "no id": b'{"args":{}}',
    "id null": b'{"id":null}',
    "id a number": b'{"id":7}',
    "id empty": b'{"id":""}',
    "id unprintable": b'{"id":"a\\u0000"}',
    "id long": json.dumps({"id": "x" * 200}).encode(),
    "nan": b'{"id":"x","ttl_s":NaN}',
    "infinite": b'{"id":"x","ttl_s":1e999}',
    "deep": b'{"id":"x","args":' + b"[" * 30_000,
    "deep object": b'{"id":"x","args":' + b'{"a":' * 10_000,
    "huge": b"[" * 10_000_000,
    "a name twice": b'{"id":"x","id":"y"}',
    "a misspelt field": b'{"id":"x","arg":{}}',
    "long, though in order": b'{"id":"x","args":{"loop":"camera","enabled":true}}' + b" " * MAX_COMMAND_BYTES,
    "two values": b'{"id":"x"}{"id":"y"}',
    "args a list": b'{"id":"x","args":[]}',
}


@pytest.mark.parametrize("payload", NONSENSE.values(), ids=NONSENSE.keys())
def test_nonsense_is_answered_invalid_and_the_next_command_works(payload: bytes) -> None:
    async def test(bench: Bench) -> None:
        reply = await bench.ask("set-loop", payload)
        assert (reply["outcome"], reply["reason"]) == ("refused", "invalid")
        assert reply["detail"]
        assert bench.daemon.done == []
        assert (await bench.ask("set-loop", SET))["outcome"] == "ok"

    run(test)


@pytest.mark.parametrize(
    ("verb", "args", "field"),
    [
        ("set-loop", {"loop": 7, "enabled": True}, "args.loop"),
        ("set-loop", {"enabled": True}, "loop"),
        ("set-loop", {"loop": "camera", "enabled": "yes"}, "args.enabled"),
        ("set-loop", {"loop": "camera", "period_ms": 0}, "args.period_ms"),
        ("set-loop", {"loop": "camera", "period_ms": -1}, "args.period_ms"),
        ("set-loop", {"loop": "camera", "deadline_ms": 1e12}, "args.deadline_ms"),
        ("set-loop", {"loop": "camera", "period_ms": True}, "args.period_ms"),
        ("set-loop", {"loop": "camera", "period": 40}, "period"),
        ("set-loop", {"loop": "camera"}, "period_ms"),
        ("load", {"model": ""}, "args.model"),
        ("load", {"model": "x" * 65}, "args.model"),
        ("load", {"model": "m", "version": 2}, "args.version"),
        ("unload", {}, "model"),
        ("get-state", {"loop": "camera"}, "loop"),
    ],
)
def test_wrong_arguments_are_refused_by_name(verb: str, args: dict[str, Any], field: str) -> None:
    async def test(bench: Bench) -> None:
        reply = await bench.ask(verb, {"id": "x", "args": args})
        assert (reply["outcome"], reply["reason"], reply["id"]) == ("refused", "invalid", "x")
        assert field in reply["detail"]
        assert bench.daemon.done == []

    run(test)


def test_an_unknown_verb_is_answered_with_those_there_are() -> None:
    async def test(bench: Bench) -> None:
        reply = await bench.ask("reboot", {"id": "x"})
        assert reply["reason"] == "unknown_verb"
        assert all(verb in reply["detail"] for verb in VERBS)

    run(test)


# Retained: F1


def test_a_retained_command_is_refused_once_however_often_it_comes() -> None:
    async def test(bench: Bench) -> None:
        for _ in range(3):
            bench.deliver("set-loop", SET, retain=True)
            bench.deliver("load", b"rubbish", retain=True)
        await bench.settle()
        replies = bench.take()
        assert [(reply["verb"], reply["outcome"], reply["reason"]) for reply in replies] == [
            ("set-loop", "refused", "retained"),
            ("load", "refused", "retained"),
        ]
        assert bench.daemon.done == []
        assert (await bench.ask("set-loop", SET))["outcome"] == "ok"  # the same order, sent properly

    run(test)


def test_a_command_that_was_obeyed_is_not_also_refused_when_it_turns_out_to_be_retained() -> None:
    async def test(bench: Bench) -> None:
        assert (await bench.ask("set-loop", SET))["outcome"] == "ok"
        bench.deliver("set-loop", SET, retain=True)  # the next connect
        await bench.settle()
        assert bench.take() == []

    run(test)


# Expired: F2


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (issued(0), "ok"),
        (issued(59), "ok"),
        (issued(61), "expired"),
        (issued(600), "expired"),
        (issued(-3600) | {"issued_at": "2026-05-01T13:00:00Z"}, "clock_skew"),
        (issued(0) | {"issued_at": "2026-05-01T12:04:00Z"}, "ok"),
        (issued(0) | {"issued_at": "2026-05-01T14:00:00+02:00"}, "ok"),
        (issued(0) | {"issued_at": "2026-05-01T12:00:00"}, "invalid"),
        (issued(0) | {"issued_at": "yesterday"}, "invalid"),
        (SET | {"ttl_s": 60}, "invalid"),
        (issued(0) | {"ttl_s": 0}, "invalid"),
        (issued(0) | {"ttl_s": -5}, "invalid"),
        (issued(0) | {"ttl_s": 1e300}, "ok"),
        (SET | {"issued_at": "2020-01-01T00:00:00Z"}, "ok"),
    ],
)
def test_validity_by_the_wall_clock_while_it_is_synchronized(command: dict[str, Any], expected: str) -> None:
    async def test(bench: Bench) -> None:
        reply = await bench.ask("set-loop", command)
        assert (reply["outcome"] if reply["outcome"] == "ok" else reply["reason"]) == expected
        assert len(bench.daemon.done) == (expected == "ok")

    run(test)


@pytest.mark.parametrize(
    ("command", "expiry_s", "expected"),
    [
        (issued(600), None, "clock_unsynced"),
        (issued(0), None, "clock_unsynced"),
        (issued(600), 30, "ok"),  # the broker, whose clock needs no wall time, says that it is fresh
        (SET, None, "ok"),
    ],
)
def test_without_a_synchronized_clock_only_the_brokers_expiry_counts(
    command: dict[str, Any], expiry_s: int | None, expected: str
) -> None:
    async def test(bench: Bench) -> None:
        reply = await bench.ask("set-loop", command, expiry_s=expiry_s)
        assert (reply["outcome"] if reply["outcome"] == "ok" else reply["reason"]) == expected

    run(test, synced=False)


@pytest.mark.parametrize("how", ["ttl", "message expiry", "both, the shorter counts"])
def test_time_spent_waiting_in_the_device_counts(how: str) -> None:
    async def test(bench: Bench) -> None:
        bench.deliver("load", {"id": "slow", "args": {"model": "slow"}})
        if how == "ttl":
            bench.deliver("set-loop", issued(0, ttl_s=20))
        elif how == "message expiry":
            bench.deliver("set-loop", SET, expiry_s=20)
        else:
            bench.deliver("set-loop", issued(0, ttl_s=3600), expiry_s=20)
        await bench.settle(31)
        assert [(reply["id"], reply.get("reason", "")) for reply in bench.take()] == [("slow", ""), ("a1", "expired")]
        assert bench.daemon.done == [("load", "slow", "")]

    run(test)


# Duplicates: F3


def test_the_same_id_twice_is_carried_out_once_and_answered_the_same(tmp_path: Path) -> None:
    async def first(bench: Bench) -> dict[str, Any]:
        reply = await bench.ask("set-loop", SET)
        assert await bench.ask("set-loop", SET) == reply
        assert len(bench.daemon.done) == 1
        return reply

    async def after_restart(bench: Bench) -> dict[str, Any]:
        reply = await bench.ask("set-loop", SET, correlation=b"other")
        assert bench.daemon.done == []
        return reply

    journal = tmp_path / "commands.json"
    assert run(first, journal) == run(after_restart, journal)


def test_a_duplicate_of_a_running_command_waits_for_its_one_result() -> None:
    async def test(bench: Bench) -> None:
        load = {"id": "l", "args": {"model": "slow"}}
        bench.deliver("load", load)
        await bench.settle(1)
        bench.deliver("load", load)  # redelivered by the broker
        bench.deliver("load", load, correlation=b"c2")  # sent again by an impatient caller
        for number in range(100):
            bench.deliver("load", load, correlation=b"flood%d" % number)
        await bench.settle(30)
        assert len(bench.link.sent) == 4  # bounded
        assert {message.correlation for message, _ in bench.link.sent} >= {b"c1", b"c2"}
        assert len({message.payload for message, _ in bench.link.sent}) == 1
        assert bench.daemon.done == [("load", "slow", "")]

    run(test)


def test_another_command_under_the_same_id_is_a_mistake_of_the_sender() -> None:
    async def test(bench: Bench) -> None:
        await bench.ask("set-loop", SET)
        reply = await bench.ask("set-loop", {"id": "a1", "args": {"loop": "camera", "enabled": True}})
        assert (reply["outcome"], reply["reason"]) == ("refused", "id_reused")
        assert len(bench.daemon.done) == 1

    run(test)


def test_a_question_asked_twice_is_answered_twice_without_touching_the_disk(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        assert await bench.ask("get-state", {"id": "q"}) == await bench.ask("get-state", {"id": "q"})
        assert bench.daemon.done == [("get-state",)]

    run(test, tmp_path / "commands.json")
    assert not (tmp_path / "commands.json").exists()


def test_a_command_cut_off_by_a_stop_is_answered_and_not_carried_out_again(tmp_path: Path) -> None:
    load = {"id": "l", "args": {"model": "slow"}}
    journal = tmp_path / "commands.json"

    async def stopped(bench: Bench) -> None:
        bench.deliver("load", load)
        bench.deliver("unload", {"id": "u", "args": {"model": "m"}})
        await bench.settle(1)
        await bench.stop()
        assert {(reply["id"], reply["outcome"], reply["reason"]) for reply in bench.take()} == {
            ("l", "failed", "interrupted"),
            ("u", "refused", "stopping"),
        }

    async def again(bench: Bench) -> None:
        assert bench.take() == []
        assert (await bench.ask("load", load))["reason"] == "interrupted"
        assert bench.daemon.done == []
        assert (await bench.ask("unload", {"id": "u", "args": {"model": "m"}}))["outcome"] == "ok"

    run(stopped, journal)
    run(again, journal)


def test_a_command_cut_off_by_a_power_cut_is_answered_after_the_restart(tmp_path: Path) -> None:
    journal = tmp_path / "commands.json"
    before_the_cut = b""

    async def power_cut(bench: Bench) -> None:
        nonlocal before_the_cut
        bench.deliver("load", {"id": "l", "args": {"model": "slow"}})
        await bench.settle(1)
        before_the_cut = journal.read_bytes()

    async def after(bench: Bench) -> None:
        [(message, _)] = bench.link.sent
        assert (message.topic, message.correlation) == (REPLY_TO, b"c1")
        assert json.loads(message.payload)["reason"] == "interrupted"

    run(power_cut, journal)
    journal.write_bytes(before_the_cut)
    run(after, journal)


# Bounded: E6, F5


def test_a_question_is_answered_while_a_load_takes_its_time() -> None:
    async def test(bench: Bench) -> None:
        bench.deliver("load", {"id": "l", "args": {"model": "slow"}})
        await bench.settle(1)
        assert (await bench.ask("get-state", {"id": "q"}))["outcome"] == "ok"

    run(test)


def test_a_flood_is_refused_with_busy_and_may_be_sent_again() -> None:
    async def test(bench: Bench) -> None:
        bench.deliver("load", {"id": "slow", "args": {"model": "slow"}})
        await bench.settle(1)
        for number in range(MAX_WAITING + 10):
            bench.deliver("unload", {"id": f"u{number}", "args": {"model": "m"}})
        await bench.settle(1)
        refused = bench.take()
        assert [reply["reason"] for reply in refused] == ["busy"] * 10
        await bench.settle(30)
        assert len(bench.take()) == MAX_WAITING + 1
        assert (await bench.ask("unload", {"id": refused[0]["id"], "args": {"model": "m"}}))["outcome"] == "ok"

    run(test)


def test_without_a_reply_address_nothing_is_ever_held_for_one() -> None:
    async def test(bench: Bench) -> None:
        for number in range(1000):
            bench.deliver("set-loop", SET | {"id": f"n{number}"}, reply_to=None, correlation=None)
            await bench.settle()
        assert len(bench.link.sent) == 1000
        assert {(message.topic, message.qos, keep) for message, keep in bench.link.sent} == {
            (TOPICS.reply, 0, Keep.NEVER)
        }

    run(test)


@pytest.mark.parametrize(
    "topic",
    [
        "elsewhere/reply",
        "edgeinfer/v1/lab/cam2/command/unload",
        "edgeinfer/v1/lab/peer/infer/cam1",
        "edgeinfer/v1/lab/peer/advert",
        "edgeinfer/v1/lab/cam1/status",
        "edgeinfer/v1/lab/operator",
        "edgeinfer/v1/lab/op/#",
        "edgeinfer/v1/+/op/reply",
        "$SYS/x",
        "",
    ],
)
def test_a_reply_address_outside_our_branch_or_with_a_meaning_is_refused(topic: str) -> None:
    async def test(bench: Bench) -> None:
        bench.deliver("set-loop", SET, reply_to=topic)
        await bench.settle()
        [(message, keep)] = bench.link.sent
        assert (message.topic, keep) == (TOPICS.reply, Keep.NEVER)
        assert json.loads(message.payload)["reason"] == "reply_address"
        assert bench.daemon.done == []

    run(test)


def test_a_flood_of_refusals_is_a_line_a_minute_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def test(bench: Bench) -> None:
        for _ in range(3600):
            bench.deliver("set-loop", b"rubbish")
            await bench.settle(1)

    with caplog.at_level(logging.INFO):
        run(test)
    assert 50 <= len(caplog.records) <= 61
    assert "unlogged=59" in caplog.text


def test_counters_tell_what_happened() -> None:
    async def test(bench: Bench) -> None:
        await bench.ask("set-loop", SET)
        await bench.ask("set-loop", SET)
        await bench.ask("set-loop", b"rubbish")
        assert dict(bench.plane.counters) == {"received": 3, "ok": 1, "duplicate": 1, "refused.invalid": 1}

    run(test)
