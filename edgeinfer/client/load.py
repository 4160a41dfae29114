"""Put load on a running daemon, and say honestly what came of it: `edgeinfer bench`.

Open loop (a rate is given): arrivals are planned ahead, Poisson or evenly spaced, and every latency counts from its
*planned* time. A caller who found no free connection waited like any other, so a daemon that stalls cannot hide it
by being asked less. Closed loop (no rate): each connection asks again as soon as it was answered. Uses nothing but the
blocking client, one thread and one connection for each place.
"""

from __future__ import annotations

import itertools
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeinfer.client.answer import DeadlineExpired, Inference, Rejected
from edgeinfer.client.sync import Client
from edgeinfer.client.values import MAX_MEDIUM_BYTES, TEXT_TYPE, Media, Specs, Tensor, Value, media_of_file, only_input
from edgeinfer.clock import NS_PER_MS, NS_PER_S
from edgeinfer.datatype import ITEM_BYTES
from edgeinfer.errors import LinkError, ProtocolError, SessionError, mib

PHASES = ("unsent", "transport", "wait", "decode", "run", "post", "network")
"""`unsent`: from the planned time to the sending. `transport`: socket and client. The others are the daemon's own."""
PERCENTS = (50, 90, 99)
UNSENT = "unsent"
"""Planned, but no connection came free before the time was over."""
MAX_REQUESTS = 1_000_000
"""So many are planned or kept: each is remembered, with its phases in some 700 bytes."""


@dataclass(frozen=True, slots=True)
class Load:
    """What to ask, how often, for how long."""

    model: str
    inputs: Mapping[str, Value]
    seconds: float
    rate_hz: float | None = None
    """Arrivals a second; None: closed loop."""
    concurrency: int = 1
    """Connections."""
    evenly: bool = False
    """Arrivals are evenly spaced instead of Poisson."""
    seed: int = 0
    deadline_ms: float | None = None
    model_deadline_ms: float | None = None
    """What applies when the load has none of its own, where that is known."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of `Client.infer`."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request and what became of it. Times are monotonic."""

    planned_ns: int
    sent_ns: int
    ended_ns: int
    outcome: str
    """`ok`, `late`, or an ending with its reason, such as `rejected(queue_full)`."""
    phases_ns: Mapping[str, int] = field(default_factory=dict)

    @property
    def latency_ns(self) -> int:
        """From the planned time to the ending."""
        return self.ended_ns - self.planned_ns


def arrivals(load: Load) -> Iterator[int]:
    """Yield when each request is due, in nanoseconds after the start, for as long as the load lasts.

    Closed loop: all are due at once. The same seed gives the same arrivals.
    """
    if load.rate_hz is None:
        yield from itertools.repeat(0)
        return
    dice = random.Random(load.seed)  # noqa: S311 - a plan that can be repeated
    at_s = 0.0
    while True:
        at_s += 1 / load.rate_hz if load.evenly else dice.expovariate(load.rate_hz)
        if at_s >= load.seconds:
            return
        yield round(at_s * NS_PER_S)


def choose_inputs(specs: Specs, model: str, *, file: Path | None = None, text: str | None = None) -> dict[str, Value]:
    """Return the inputs of every request: the file or the text for the model's only input, else zeros for all.

    Raises:
        Rejected: a file or text for a model with several inputs, or zeros that no request has room for.
        OSError: the file cannot be read.
    """
    if file is not None:
        return {only_input(model, specs): media_of_file(file)}
    if text is not None:
        return {only_input(model, specs): Media(text.encode(), TEXT_TYPE)}
    return {str(spec["name"]): _zeros(spec) for spec in specs}


def _zeros(spec: Mapping[str, Any]) -> Tensor:
    """Return a tensor of zeros (or empty texts) of the smallest shape that is not empty."""
    shape = [max(1, dim) for dim in spec["shape"]]
    size_bytes = math.prod(shape) * ITEM_BYTES.get(spec["datatype"], 4)
    if size_bytes > MAX_MEDIUM_BYTES:
        text = f"input {spec['name']!r} {spec['datatype']} {shape} has {mib(size_bytes)}, at most "
        raise Rejected("input_invalid", f"{text}{mib(MAX_MEDIUM_BYTES)} are sent")
    return Tensor(spec["datatype"], shape, bytes(size_bytes))


def run_load(load: Load, socket: Path | None = None) -> list[Call]:
    """Put the load on the daemon; return every call, those that were not sent included.

    Takes `load.seconds`, and until the last of the calls that were sent has ended. At most `MAX_REQUESTS` are planned;
    a closed loop ends when it has sent so many.

    Raises:
        LinkError: nobody answers on the socket.
        Rejected: there is no such model.
    """
    with Client(socket) as client:
        client.model(load.model)
    plan = _Plan(load)
    threads = [
        threading.Thread(target=plan.follow, args=(socket,), name=f"bench-{place}", daemon=True)
        for place in range(load.concurrency)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return plan.finish()


class _Plan:
    """What is to be sent, shared by the threads that send it."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._arrivals = arrivals(load)
        self._lock = threading.Lock()
        self._calls: list[Call] = []
        self._began_ns = time.monotonic_ns()
        self._end_ns = self._began_ns + round(load.seconds * NS_PER_S)

    def follow(self, socket: Path | None) -> None:
        """Send one planned request after the other until there are no more, none is kept any more, or time is over."""
        with Client(socket) as client:
            while True:
                with self._lock:
                    after_ns = next(self._arrivals, None) if len(self._calls) < MAX_REQUESTS else None
                if after_ns is None:
                    return
                planned_ns = self._began_ns + after_ns
                if (left_ns := planned_ns - time.monotonic_ns()) > 0:
                    time.sleep(left_ns / NS_PER_S)
                sent_ns = time.monotonic_ns()
                if self._load.rate_hz is None:
                    planned_ns = sent_ns
                if sent_ns >= self._end_ns:
                    if self._load.rate_hz is not None:
                        self._note(Call(planned_ns, sent_ns, sent_ns, UNSENT))
                    return
                self._note(_call(client, self._load, planned_ns, sent_ns))

    def finish(self) -> list[Call]:
        """Return all calls, with what nobody got round to sending."""
        if self._load.rate_hz is not None:
            now_ns = time.monotonic_ns()
            for after_ns in itertools.islice(self._arrivals, MAX_REQUESTS - len(self._calls)):
                self._calls.append(Call(self._began_ns + after_ns, now_ns, now_ns, UNSENT))
        return sorted(self._calls, key=lambda call: call.planned_ns)

    def _note(self, call: Call) -> None:
        with self._lock:
            self._calls.append(call)


def _call(client: Client, load: Load, planned_ns: int, sent_ns: int) -> Call:
    try:
        answer = client.infer(load.model, load.inputs, deadline_ms=load.deadline_ms, **load.options)
    except Rejected as refused:
        return Call(planned_ns, sent_ns, time.monotonic_ns(), f"rejected({refused.reason})")
    except DeadlineExpired as expired:
        return Call(planned_ns, sent_ns, time.monotonic_ns(), f"expired({expired.phase})")
    except SessionError as failed:
        return Call(planned_ns, sent_ns, time.monotonic_ns(), f"failed({failed.reason})")
    except (LinkError, ProtocolError) as error:
        time.sleep(0.01)  # a daemon that is gone is not asked a million times
        return Call(planned_ns, sent_ns, time.monotonic_ns(), f"unanswered({type(error).__name__})")
    ended_ns = time.monotonic_ns()
    outcome = "late" if answer.late else "ok"
    return Call(planned_ns, sent_ns, ended_ns, outcome, _phases(answer, planned_ns, sent_ns, ended_ns))


def _phases(answer: Inference, planned_ns: int, sent_ns: int, ended_ns: int) -> dict[str, int]:
    inside_ns = round(answer.latency_ms * NS_PER_MS)
    phases = {"unsent": sent_ns - planned_ns, "transport": max(0, ended_ns - sent_ns - inside_ns)}
    for phase in PHASES:
        if isinstance(value := answer.parameters.get(f"{phase}_ms"), int | float):
            phases[phase] = round(value * NS_PER_MS)
    return phases


def summarize(load: Load, calls: Sequence[Call]) -> dict[str, Any]:
    """Return the report, fit for JSON. Latencies are those of answers, in milliseconds from the planned time."""
    answered = [call for call in calls if call.outcome in {"ok", "late"}]
    deadline_ms = load.model_deadline_ms if load.deadline_ms is None else load.deadline_ms
    in_time = sum(
        call.outcome == "ok" and (deadline_ms is None or call.latency_ns <= deadline_ms * NS_PER_MS) for call in calls
    )
    began_ns = min((call.planned_ns for call in calls), default=0)
    took_s = (max((call.ended_ns for call in calls), default=0) - began_ns) / NS_PER_S
    if len(calls) < MAX_REQUESTS:
        took_s = max(load.seconds, took_s)
    phases = {
        phase: _spread([call.phases_ns[phase] for call in answered if phase in call.phases_ns]) for phase in PHASES
    }
    return {
        "model": load.model,
        "loop": "closed" if load.rate_hz is None else "open",
        "arrivals": None if load.rate_hz is None else "even" if load.evenly else "poisson",
        "seconds": load.seconds,
        "concurrency": load.concurrency,
        "deadline_ms": deadline_ms,
        "deadline_from": None if deadline_ms is None else "model" if load.deadline_ms is None else "option",
        "requests": len(calls),
        "sent": sum(call.outcome != UNSENT for call in calls),
        "offered_per_s": None if load.rate_hz is None else round(len(calls) / load.seconds, 3),
        "answered_per_s": round(len(answered) / took_s, 3),
        "in_time": in_time,
        "in_time_share": round(in_time / len(calls), 6) if calls else None,
        "outcomes": dict(Counter(call.outcome for call in calls).most_common()),
        "latency_ms": _spread([call.latency_ns for call in answered]),
        "phases_ms": {phase: spread for phase, spread in phases.items() if spread is not None},
    }


def describe(report: Mapping[str, Any]) -> str:
    """Return the report for people."""
    how = "closed loop"
    if report["loop"] == "open":
        how = f"{report['offered_per_s']:g} requests/s offered ({report['arrivals']})"
    lines = [
        f"{report['model']}: {how}, {report['concurrency']} connections, {report['seconds']:g} s",
        f"  answered     {report['answered_per_s']:g}/s",
    ]
    if report["sent"] < report["requests"]:
        late = "no connection was free for the others: more --concurrency, or what answers or this machine is too slow"
        lines.append(f"  sent         {report['sent']} of {report['requests']} planned; {late}")
    if report["requests"]:
        within = "" if report["deadline_ms"] is None else f" within {report['deadline_ms']:g} ms"
        within += ", the model's deadline" if report["deadline_from"] == "model" else ""
        count = f"{report['in_time']} of {report['requests']}"
        lines.append(f"  in time      {report['in_time_share']:.2%} ({count}){within}")
    lines += [f"  {outcome:<24} {count}" for outcome, count in report["outcomes"].items()]
    if report["latency_ms"] is not None:
        rows = {"total": report["latency_ms"], **report["phases_ms"]}
        lines.append(f"  {'ms':<12}{''.join(f'{name:>10}' for name in report['latency_ms'])}")
        lines += [f"  {name:<12}{''.join(f'{value:>10.3f}' for value in row.values())}" for name, row in rows.items()]
    return "\n".join(lines)


def _spread(values_ns: list[int]) -> dict[str, float] | None:
    """Return percentiles by nearest rank, and the largest, in milliseconds; None of nothing."""
    if not values_ns:
        return None
    ordered = sorted(values_ns)
    ranks = {f"p{percent}": ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] for percent in PERCENTS}
    return {name: round(value / NS_PER_MS, 3) for name, value in {**ranks, "max": ordered[-1]}.items()}
