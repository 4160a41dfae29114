"""Compiled code from elsewhere is refused, wherever it hides, and looking for it takes bounded time."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import AttributeProto, NodeProto, TensorProto, helper

from edgeinfer.artifact.bundle import verify_bundle
from edgeinfer.artifact.epcontext import CompiledContext, UnsignedContext, compiled_contexts, refuse_compiled_contexts
from edgeinfer.errors import ManifestInvalid
from tests.artifact.making import make_bundle

VALUE = helper.make_tensor_value_info


def context(*, embedded: bool = True) -> NodeProto:
    return helper.make_node(
        "EPContext",
        ["x"],
        ["y"],
        name="compiled",
        domain="com.microsoft",
        main_context=1,
        embed_mode=int(embedded),
        ep_cache_context=b"\x7fELF\x00code" if embedded else "../blobs/model.bin",
        source="OpenVINOExecutionProvider",
    )


def model(where: str, node: NodeProto) -> bytes:
    """Return a model that hides `node` in one of the places that can hold one."""
    inside = helper.make_graph([node], "inner", [], [VALUE("y", TensorProto.FLOAT, [4])])
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    functions = []
    if where == "graph":
        nodes = [node]
    elif where == "subgraph":
        nodes.append(helper.make_node("If", ["c"], ["z"], then_branch=inside, else_branch=inside))
    elif where == "subgraph of a subgraph":
        loop = helper.make_node("If", ["c"], ["y"], then_branch=inside, else_branch=inside)
        outer = helper.make_graph([loop], "outer", [], [VALUE("y", TensorProto.FLOAT, [4])])
        nodes.append(helper.make_node("Scan", ["x"], ["z"], body=outer, num_scan_inputs=1))
    elif where == "list of graphs":
        odd = helper.make_node("Odd", [], ["o"])
        odd.attribute.append(AttributeProto(name="several", type=AttributeProto.GRAPHS, graphs=[inside, inside]))
        nodes.append(odd)
    elif where == "function":
        functions = [helper.make_function("d", "f", ["x"], ["y"], [node], [helper.make_opsetid("", 17)])]
    graph = helper.make_graph(nodes, "g", [VALUE("x", TensorProto.FLOAT, [4])], [VALUE("y", TensorProto.FLOAT, [4])])
    made = helper.make_model(graph, functions=functions, opset_imports=[helper.make_opsetid("", 17)])
    if where == "training":
        made.training_info.add().algorithm.CopyFrom(inside)
    return bytes(made.SerializeToString())


def wrap(tag: int, body: bytes) -> bytes:
    length, size = len(body), b""
    while length > 0x7F:
        size += bytes([length & 0x7F | 0x80])
        length >>= 7
    return bytes([tag << 3 | 2]) + size + bytes([length]) + body


def written(folder: Path, data: bytes) -> Path:
    path = folder / "m.onnx"
    path.write_bytes(data)
    return path


PLACES = ["graph", "subgraph", "subgraph of a subgraph", "list of graphs", "function", "training"]


@pytest.mark.parametrize("where", PLACES)
def test_finds_compiled_code_in(where: str, tmp_path: Path) -> None:
    path = written(tmp_path, model(where, context()))
    assert next(compiled_contexts(path)).source == "OpenVINOExecutionProvider"
    with pytest.raises(
        UnsignedContext, match=r"EPContext node 'compiled' made by OpenVINO.* signed bundle.*plain ONNX"
    ):
        refuse_compiled_contexts(path)


def test_finds_code_in_a_file_beside_the_model(tmp_path: Path) -> None:
    path = written(tmp_path, model("graph", context(embedded=False)))
    assert list(compiled_contexts(path)) == [
        CompiledContext("compiled", "OpenVINOExecutionProvider", "../blobs/model.bin")
    ]


def test_a_bundle_with_compiled_code_is_not_sound(tmp_path: Path) -> None:
    make_bundle(tmp_path / "b", model=model("subgraph", context()))
    with pytest.raises(UnsignedContext, match="signed bundle"):
        verify_bundle(tmp_path / "b")


def test_the_word_alone_is_no_compiled_code(tmp_path: Path) -> None:
    node = helper.make_node("Identity", ["x"], ["y"], name="EPContext", doc_string="not an EPContext")
    refuse_compiled_contexts(written(tmp_path, model("graph", node)))


def test_the_first_of_two_operator_names_counts_as_well(tmp_path: Path) -> None:
    twice = wrap(4, b"EPContext") + wrap(4, b"Identity")
    with pytest.raises(UnsignedContext):
        refuse_compiled_contexts(written(tmp_path, wrap(7, wrap(1, twice))))


def test_a_name_across_two_chunks_is_found(tmp_path: Path) -> None:
    """The file is read by the megabyte; the name may begin in one and end in the next."""
    node = wrap(7, wrap(1, wrap(4, b"EPContext")))
    for shift in range(12):
        filler = (1 << 20) - len(node) - 4 - 12 + shift
        path = written(tmp_path, wrap(9, b"x" * filler) + node)
        assert [str(found) for found in compiled_contexts(path)] == ["EPContext node ''"]


def test_a_field_number_that_others_cut_short_hides_nothing(tmp_path: Path) -> None:
    """Parsers that keep 32 bits of a tag see field 1 here."""
    node = wrap(4, b"EPContext")
    tag = bytes([1 << 3 | 2 | 0x80, 0x80, 0x80, 0x80, 0x10])
    with pytest.raises(ManifestInvalid, match="32 bits"):
        refuse_compiled_contexts(written(tmp_path, wrap(7, tag + bytes([len(node)]) + node)))


def test_ort_format_is_judged_by_the_word(tmp_path: Path) -> None:
    head = b"\x20\x00\x00\x00ORTM"
    refuse_compiled_contexts(written(tmp_path, head + b"\x00" * 64 + b"Identity"))
    with pytest.raises(UnsignedContext, match="ORT format"):
        refuse_compiled_contexts(written(tmp_path, head + b"\x00" * 64 + b"EPContext\x00"))


def test_what_a_file_says_of_itself_is_shown_short_and_printable(tmp_path: Path) -> None:
    node = helper.make_node("EPContext", [], ["y"], name="a\n\x1b[31m" + "b" * 5000, domain="com.microsoft")
    with pytest.raises(UnsignedContext) as caught:
        refuse_compiled_contexts(written(tmp_path, model("graph", node)))
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_truncated_model_that_may_hold_some_is_refused(tmp_path: Path) -> None:
    whole = model("graph", context())
    for length in range(whole.index(b"EPContext") + 9, len(whole)):
        with pytest.raises((ManifestInvalid, UnsignedContext)):
            refuse_compiled_contexts(written(tmp_path, whole[:length]))


def test_nesting_is_bounded(tmp_path: Path) -> None:
    graph = wrap(1, wrap(4, b"EPContext"))
    for _ in range(200):
        graph = wrap(1, wrap(5, wrap(6, graph)))
    with pytest.raises(ManifestInvalid, match="nested deeper"):
        refuse_compiled_contexts(written(tmp_path, wrap(7, graph)))


@pytest.mark.slow
def test_a_file_of_nothing_but_fields_is_given_up_in_bounded_time(tmp_path: Path) -> None:
    """Twenty million empty fields: the walk stops at its limit, not at the end of the file."""
    path = written(tmp_path, wrap(9, b"EPContext") + b"\x4a\x00" * 20_000_000)
    began = time.process_time()
    with pytest.raises(ManifestInvalid, match="more than 5000000 fields"):
        refuse_compiled_contexts(path)
    assert (
        time.process_time() - began < 30
    )  # 5 s on the slowest machine seen; the whole file would take four times that


@pytest.mark.parametrize("hidden", [False, True])
def test_large_weights_are_skipped(tmp_path: Path, hidden: bool) -> None:
    weights = onnx.helper.make_tensor("w", TensorProto.UINT8, [64 << 20], bytes(64 << 20), raw=True)
    graph = helper.make_graph([context()] if hidden else [], "g", [], [], [weights])
    path = written(tmp_path, helper.make_model(graph).SerializeToString())
    began = time.process_time()
    assert bool(list(compiled_contexts(path))) is hidden
    assert time.process_time() - began < 0.1  # reading it takes longer


@given(st.binary(max_size=300))
def test_any_bytes_are_judged_without_a_crash(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz-context.onnx"
    path.write_bytes(data + b"EPContext")
    with contextlib.suppress(ManifestInvalid, UnsignedContext):
        list(compiled_contexts(path))
