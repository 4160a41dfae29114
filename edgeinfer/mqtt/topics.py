"""Name every MQTT topic, once: `{prefix}/v1/{site}/{id}/…`, where `id` is a device or a nearby service.

Everything that one participant publishes lies under its own branch, but for requests and commands to others: so a
broker's access list needs one rule for the own branch and one for each of these. docs/mqtt.md describes them for
people. What the messages contain is `envelope`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_MAX_TOPIC_BYTES = 65_535


def is_word(value: str) -> bool:
    """Whether `value` can be one level of a topic: 1 to 64 letters, digits, `_ . -`, no sign in front."""
    return _WORD.fullmatch(value) is not None


def can_publish(topic: str) -> bool:
    """Whether a message can be published to `topic` at all: MQTT forbids wildcards, NUL and the empty topic."""
    return (
        bool(topic)
        and not any(character in topic for character in "+#\0")
        and not topic.startswith("$")
        and len(topic.encode("utf-8", "surrogatepass")) <= _MAX_TOPIC_BYTES
        and topic.isprintable()
    )


@dataclass(frozen=True, slots=True)
class Topics:
    """All topics as one participant sees them; its own name is `device`, also when it is a nearby service."""

    prefix: str
    site: str
    device: str

    def __post_init__(self) -> None:
        for value in (*self.prefix.split("/"), self.site, self.device):
            _check(value)

    @property
    def status(self) -> str:
        """Birth and will: retained, `online` true or false."""
        return self._own("status")

    @property
    def state(self) -> str:
        """What it is and how it stands: retained, published at connect and at every change."""
        return self._own("state")

    @property
    def report(self) -> str:
        """Counters and percentiles, periodically."""
        return self._own("report")

    def event(self, kind: str) -> str:
        """Something that happened, told once."""
        return self._own(f"event/{_check(kind)}")

    def result(self, loop: str) -> str:
        """Results of one inference loop."""
        return self._own(f"result/{_check(loop)}")

    def command(self, verb: str) -> str:
        """Where this device takes commands of one verb."""
        return self._own(f"command/{_check(verb)}")

    @property
    def command_filter(self) -> str:
        """All commands to this device."""
        return self._own("command/+")

    def parse_command(self, topic: str) -> str | None:
        """Return the verb of a command topic of this device, None when it is another topic."""
        return _last_word(topic, self._own("command"))

    @property
    def reply(self) -> str:
        """Answers to commands whose sender named no response topic."""
        return self._own("reply")

    @property
    def offload_reply(self) -> str:
        """Where this device takes the answers to its offloaded requests."""
        return self._own("offload/reply")

    def reply_of(self, device: str) -> str:
        """Return the only topic that the offload answers of `device` may go to."""
        return self._branch(device, "offload/reply")

    def advert(self, peer: str) -> str:
        """What a nearby service serves: retained, with a will."""
        return self._branch(peer, "advert")

    @property
    def adverts_filter(self) -> str:
        """The adverts of every nearby service of the site."""
        return f"{self.prefix}/v1/{self.site}/+/advert"

    def parse_advert(self, topic: str) -> str | None:
        """Return whose advert topic this is, None when it is another topic."""
        head, tail = f"{self.prefix}/v1/{self.site}/", "/advert"
        peer = topic.removeprefix(head).removesuffix(tail)
        return peer if is_word(peer) and topic == f"{head}{peer}{tail}" else None

    def infer(self, peer: str) -> str:
        """Where this device sends a request that `peer` shall answer; it ends with the sender's own name.

        So an access list can vouch for the sender, and quotas and answers go by it.
        """
        return self._branch(peer, f"infer/{self.device}")

    @property
    def infer_filter(self) -> str:
        """The requests of every device to this nearby service."""
        return self._own("infer/+")

    def parse_infer(self, topic: str) -> str | None:
        """Return the device that sent a request to this nearby service, None when it is another topic."""
        return _last_word(topic, self._own("infer"))

    def _own(self, rest: str) -> str:
        return self._branch(self.device, rest)

    def _branch(self, owner: str, rest: str) -> str:
        return f"{self.prefix}/v1/{self.site}/{_check(owner)}/{rest}"


def _check(value: str) -> str:
    if not is_word(value):
        raise ValueError(f"{value!r} cannot be a level of an MQTT topic: 1 to 64 letters, digits, _ . - are")
    return value


def _last_word(topic: str, branch: str) -> str | None:
    word = topic.removeprefix(f"{branch}/")
    return word if is_word(word) and topic == f"{branch}/{word}" else None
