"""The limit of open files: raised as far as we may, and told when that is not enough."""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable

import pytest

from edgeinfer.daemon import descriptors

Limits = tuple[int, int]


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[Limits], list[Limits]]:
    """Pretend that the process's limits are so."""

    def pretend(limits: Limits) -> list[Limits]:
        asked: list[Limits] = []
        monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
        monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: asked.append(wanted))
        return asked

    return pretend


@pytest.mark.parametrize(
    ("limits", "asked"),
    [
        ((256, 1024), [(1024, 1024)]),
        ((256, resource.RLIM_INFINITY), [(4096, resource.RLIM_INFINITY)]),
        ((65536, 1 << 20), []),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), []),
    ],
)
def test_it_is_raised_as_far_as_we_may(
    limit: Callable[[Limits], list[Limits]], limits: Limits, asked: list[Limits], caplog: pytest.LogCaptureFixture
) -> None:
    seen = limit(limits)
    descriptors.raise_limit(workers=2, loops=2)
    assert seen == asked
    assert not caplog.records


def test_one_that_is_too_low_for_the_configuration_is_told_with_the_remedy(
    limit: Callable[[Limits], list[Limits]], caplog: pytest.LogCaptureFixture
) -> None:
    limit((40, 40))
    with caplog.at_level(logging.WARNING):
        assert descriptors.raise_limit(workers=1, loops=0) == 40
    assert "limit=40 needed=476 workers=1 loops=0" in caplog.text
    assert "LimitNOFILE" in caplog.text
