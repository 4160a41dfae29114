"""The outbox never outgrows its bounds, loses nothing without counting it, and keeps order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.mqtt.message import Keep, Message
from edgeinfer.mqtt.outbox import Outbox, Waiting

MAX_MESSAGES, MAX_BYTES = 5, 100


def message(topic: str, size: int = 1, label: int = 0) -> Message:
    return Message(topic, b"x" * size, user=(("label", str(label)),))


def drain(outbox: Outbox) -> list[Message]:
    taken = []
    while (waiting := outbox.take()) is not None:
        taken.append(waiting.message)
    return taken


steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "take", "return", "pass"]),
        st.sampled_from("abcdefgh"),
        st.integers(0, 120),
        st.sampled_from([Keep.FIFO, Keep.LATEST]),
    ),
    max_size=60,
)


@given(steps)
def test_bounds_hold_and_every_loss_is_counted(script: list[tuple[str, str, int, Keep]]) -> None:
    outbox, held_out = Outbox(max_messages=MAX_MESSAGES, max_bytes=MAX_BYTES), list[Waiting]()
    put = taken = passed = 0
    for step, topic, size, keep in script:
        if step == "put":
            outbox.put(message(topic, size, put), keep)
            put += 1
        elif step == "take" and (waiting := outbox.take()) is not None:
            taken += 1
            held_out.append(waiting)
        elif step == "return" and held_out:
            outbox.put_back(held_out.pop())
            taken -= 1
        elif step == "pass":
            passed += outbox.lets_pass(message(topic, size), keep)
        waiting_messages = len(outbox)
        assert outbox.size_bytes <= MAX_BYTES
        assert waiting_messages <= 2 * MAX_MESSAGES
        assert put == waiting_messages + taken + outbox.dropped.total(), outbox.dropped
    assert outbox.size_bytes == sum(len(each.payload) for each in drain(outbox))


def test_fifo_keeps_order_and_drops_the_oldest() -> None:
    outbox = Outbox(max_messages=3, max_bytes=1000)
    for label in range(5):
        outbox.put(message("event", label=label), Keep.FIFO)
    assert [each.user_value("label") for each in drain(outbox)] == ["2", "3", "4"]
    assert outbox.dropped == {"overflow": 2}


def test_latest_keeps_one_per_topic() -> None:
    outbox = Outbox()
    for label in range(3):
        outbox.put(message("report", label=label), Keep.LATEST)
        outbox.put(message("state", label=label), Keep.LATEST)
    assert [each.user_value("label") for each in drain(outbox)] == ["2", "2"]
    assert outbox.dropped == {"replaced": 4}


def test_news_leaves_before_pictures() -> None:
    outbox = Outbox()
    outbox.put(message("report"), Keep.LATEST)
    outbox.put(message("event"), Keep.FIFO)
    assert [each.topic for each in drain(outbox)] == ["event", "report"]


def test_what_comes_back_goes_in_front_unless_it_is_old_news() -> None:
    outbox = Outbox()
    outbox.put(message("event", label=2), Keep.FIFO)
    outbox.put_back(Waiting(message("event", label=1), Keep.FIFO))
    outbox.put(message("state", label=2), Keep.LATEST)
    outbox.put_back(Waiting(message("state", label=1), Keep.LATEST))
    assert [(each.topic, each.user_value("label")) for each in drain(outbox)] == [
        ("event", "1"),
        ("event", "2"),
        ("state", "2"),
    ]


def test_a_newer_picture_that_passes_takes_the_older_with_it() -> None:
    outbox = Outbox()
    outbox.put(message("state", label=1), Keep.LATEST)
    assert outbox.lets_pass(message("state", label=2), Keep.LATEST)
    assert drain(outbox) == []


def test_events_queue_up_behind_each_other() -> None:
    outbox = Outbox()
    outbox.put(message("event"), Keep.FIFO)
    assert not outbox.lets_pass(message("event"), Keep.FIFO)
    assert outbox.lets_pass(message("result"), Keep.NEVER)
