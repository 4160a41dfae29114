"""Topics can't be broken by names, and each is recognised by exactly who owns it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt.client import topic_matches_sub

from edgeinfer.mqtt.topics import Topics, can_publish, is_word

TOPICS = Topics("edgeinfer", "plant", "cam-1")
HOSTILE = [
    "LightSensor#1",
    "a+b",
    "a/b",
    "$SYS",
    "",
    "x\0y",
    "x" * 65,
    "trailing ",
    " lead",
    "ü",
    ".",
    "-",
    "\n",
    "a\n",
]
words = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", fullmatch=True)


@pytest.mark.parametrize("name", HOSTILE)
def test_names_that_would_break_a_topic_are_refused(name: str) -> None:
    assert not is_word(name)
    for make in (
        lambda: Topics("edgeinfer", name, "cam"),
        lambda: Topics("edgeinfer", "plant", name),
        lambda: TOPICS.result(name),
        lambda: TOPICS.event(name),
        lambda: TOPICS.infer(name),
    ):
        with pytest.raises(ValueError, match="cannot be a level"):
            make()


def test_a_prefix_may_have_several_levels() -> None:
    assert Topics("acme/edge", "s", "d").status == "acme/edge/v1/s/d/status"


def test_everything_published_is_in_the_own_branch_but_requests_to_a_peer() -> None:
    own = "edgeinfer/v1/plant/cam-1/"
    for topic in (
        TOPICS.status, TOPICS.state, TOPICS.report, TOPICS.event("x"), TOPICS.result("loop"), TOPICS.command("go"),
        TOPICS.command_filter, TOPICS.offload_reply, TOPICS.infer_filter, TOPICS.advert("cam-1"),
    ):  # fmt: skip
        assert topic.startswith(own)
    assert TOPICS.infer("hall") == "edgeinfer/v1/plant/hall/infer/cam-1"


@given(words, words)
def test_what_one_side_sends_the_other_understands(device: str, peer: str) -> None:
    ours, theirs = Topics("p", "s", device), Topics("p", "s", peer)
    assert topic_matches_sub(theirs.infer_filter, ours.infer(peer))
    assert theirs.parse_infer(ours.infer(peer)) == device
    assert theirs.reply_of(device) == ours.offload_reply
    assert topic_matches_sub(ours.adverts_filter, theirs.advert(peer))
    assert ours.parse_advert(theirs.advert(peer)) == peer
    assert topic_matches_sub(ours.command_filter, ours.command("load"))
    assert ours.parse_command(ours.command("load")) == "load"


@given(st.text(max_size=60))
def test_foreign_topics_are_nobodys(topic: str) -> None:
    assert TOPICS.parse_infer(topic) is None
    assert TOPICS.parse_advert(topic) is None
    assert TOPICS.parse_command(topic) is None


@pytest.mark.parametrize(
    "topic",
    [
        "edgeinfer/v1/plant/cam-1/infer/a/b", "edgeinfer/v1/plant/cam-1/infer/", "edgeinfer/v1/plant/cam-2/infer/a",
        "x/edgeinfer/v1/plant/cam-1/infer/a", "edgeinfer/v1/plant/cam-1/infer/+", "edgeinfer/v1/plant/cam-1/infer/$a",
    ],
)  # fmt: skip
def test_near_misses_are_not_taken(topic: str) -> None:
    assert TOPICS.parse_infer(topic) is None


@pytest.mark.parametrize("topic", ["", "a/+/b", "a/#", "nul\0", "$SYS/x", "new\nline", "x" * 65_536])
def test_impossible_topics_are_known_before_they_are_sent(topic: str) -> None:
    assert not can_publish(topic)


def test_names_of_other_alphabets_can_be_published_to() -> None:
    assert can_publish("haus/küche/温度 1")
