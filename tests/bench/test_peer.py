from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgeinfer_bench.asking import Answers, Server, Stream
from edgeinfer_bench.peer import PeerMissing, environment, last_words, request, server_settings
from edgeinfer_bench.player import CHAINS
from edgeinfer_bench.rivals import Rivals, warm_up


@pytest.mark.slow
def test_what_cannot_be_installed_is_missing_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(PeerMissing, match=r"could not be installed: .*nowhere"):
        environment(tmp_path / "venv", (str(tmp_path / "nowhere-1.0-py3-none-any.whl"),))


def test_an_environment_that_is_there_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "installed").write_text("a==1\nb==2", encoding="utf-8")
    assert environment(tmp_path, ("a==1", "b==2")) == tmp_path


def test_a_request_is_one_whole_http_message_in_json_tensors() -> None:
    head, body = request("m", {"x": ("float32", (2, 3)), "n": ("int64", (1,))}).split(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert json.loads(body) == {
        "inputs": [
            {"name": "x", "shape": [2, 3], "datatype": "FP32", "data": [0] * 6},
            {"name": "n", "shape": [1], "datatype": "INT64", "data": [0]},
        ]
    }


def test_the_peer_has_nothing_to_do_but_to_answer() -> None:
    settings = server_settings(1, 2, 1)
    assert settings["parallel_workers"] == 1
    assert not any(settings[key] for key in ("debug", "metrics_endpoint", "gzip_enabled"))


def test_the_reason_is_the_last_line_that_names_an_error() -> None:
    assert last_words("INFO up\nImportError: no x\n  INFO stopped \n") == "ImportError: no x"
    assert last_words("one\ntwo\n\n") == "two"
    assert last_words("") == "it said nothing"


async def refuse() -> Stream:
    raise ConnectionRefusedError("nobody listens")


async def test_a_peer_that_is_missing_or_dies_makes_the_figure_null_and_says_why() -> None:
    nobody = Server(refuse, lambda *_: (), 1)
    missing = Rivals(nobody, {}, {0: "no index"}).figure()
    assert missing.value is None
    assert "no index" in missing.note
    rivals = Rivals(nobody, {0: nobody})
    await rivals.try_settings([warm_up()[:1]])
    figure = rivals.figure()
    assert figure.value is None
    assert "nobody listens" in figure.note


def test_warm_up_asks_for_every_model() -> None:
    assert {job.size_us for job in warm_up()} == set(CHAINS)
    assert Answers().note == "0 in time, 0 late, 0 refused, 0 not sent"
