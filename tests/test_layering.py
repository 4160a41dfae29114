"""The layers of docs/architecture.md, held by reading every import there is, at module level or inside a function.

A module imports strictly lower layers or its own room, never sideways. Only the worker side touches numbers.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LAYERS: dict[str, int] = {
    # 0 vocabulary
    "errors": 0, "clock": 0, "request": 0, "limits": 0, "datatype": 0, "quantity": 0, "plain_file": 0, "toml_file": 0,
    # 1 contracts
    "artifact": 1, "oip": 1, "config": 1, "metrics": 1,
    # 2 edges
    "sensors": 2, "mqtt": 2, "worker": 2, "store": 2, "client": 2,
    # 3 mechanisms
    "execution": 3, "governor": 3,
    # 4 decisions
    "scheduling": 4,
    # 5 flows
    "pipeline": 5, "gateway": 5, "telemetry": 5, "nearby": 5,
    # 6 control
    "control": 6,
    # 7 assembly
    "daemon": 7, "fleet": 7,
    # 8 the command
    "cli": 8, "__main__": 9,
}  # fmt: skip
"""Every room of edgeinfer. A room that isn't here doesn't exist."""

VOCABULARY_ORDER = ("errors", "clock", "datatype", "limits", "quantity", "request", "plain_file", "toml_file")
"""Layer 0 is one vocabulary in eight files: each may use those before it."""

WORKER_SIDE = frozenset({"compile", "decode", "feed", "main", "providers", "sequence", "session", "zygote"})
"""Modules of `edgeinfer.worker` that run in the zygote and in workers, never in the daemon."""
NUMBERS = frozenset({"numpy", "onnxruntime", "onnx", "PIL", "torch", "optimum", "transformers", "scipy", "cv2"})
TOOLS_MAY_USE = frozenset(
    {"artifact", "oip", "errors", "plain_file", "toml_file", "datatype", "worker", "clock", "request"}
)
"""What `edgeinfer_tools` may import of edgeinfer: contracts, and the worker to measure with."""
DEMO_AND_BENCH = ("edgeinfer_demo", "edgeinfer_bench")


@dataclass(frozen=True, slots=True)
class Import:
    """One import of one module."""

    path: Path
    line: int
    module: str
    type_only: bool
    """Below `if TYPE_CHECKING:`: it never runs."""

    @property
    def top(self) -> str:
        return self.module.split(".")[0]

    @property
    def room(self) -> str:
        """The room of edgeinfer that is imported."""
        parts = self.module.split(".")
        return parts[1] if len(parts) > 1 else ""

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.module}"


def imports_of(path: Path) -> Iterator[Import]:
    """Yield every import of a file, also those inside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    type_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}
        for statement in block.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Import(path, node.lineno, name.name, id(node) in type_only)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative imports hide the layer"
            assert node.module is not None
            if node.module == "edgeinfer":  # from edgeinfer import room
                for name in node.names:
                    yield Import(path, node.lineno, f"edgeinfer.{name.name}", id(node) in type_only)
            else:
                yield Import(path, node.lineno, node.module, id(node) in type_only)


def room_of(path: Path) -> str:
    """Return the room that a module of edgeinfer belongs to; empty for the package itself."""
    relative = path.relative_to(ROOT / "edgeinfer")
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem if relative.stem != "__init__" else ""


def modules(folder: str) -> list[Path]:
    """Return the Python files of a package of this repository."""
    return sorted((ROOT / folder).rglob("*.py"))


RUNTIME = modules("edgeinfer")


def test_the_reader_sees_every_way_to_import(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "import edgeinfer.daemon.device as d\n"
        "from edgeinfer import fleet\n"
        "from edgeinfer.control import plane\n"
        "def late():\n    from numpy import array\n"
        "if TYPE_CHECKING:\n    import onnx\n"
    )
    found = [(item.module, item.type_only) for item in sorted(imports_of(file), key=lambda item: item.line)]
    assert found == [
        ("edgeinfer.daemon.device", False), ("edgeinfer.fleet", False), ("edgeinfer.control", False),
        ("numpy", False), ("onnx", True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("room", "imported", "fine"),
    [
        ("scheduling", "execution", True),
        ("scheduling", "scheduling", True),
        ("execution", "governor", False),
        ("execution", "scheduling", False),
        ("telemetry", "pipeline", False),
        ("control", "telemetry", True),
        ("clock", "errors", True),
        ("errors", "clock", False),
    ],
)
def test_down_and_within_but_never_sideways(room: str, imported: str, fine: bool) -> None:
    assert allowed(room, imported) is fine


def test_the_worker_side_is_there() -> None:
    assert {path.stem for path in modules("edgeinfer/worker")} >= WORKER_SIDE


def test_every_room_has_a_layer() -> None:
    rooms = {room_of(path) for path in RUNTIME} - {""}
    assert rooms - LAYERS.keys() == set()


def test_every_package_is_declared_as_one() -> None:
    folders = {path.parent for path in RUNTIME}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def allowed(room: str, imported: str) -> bool:
    if room == imported:
        return True
    if room in VOCABULARY_ORDER and imported in VOCABULARY_ORDER:
        return VOCABULARY_ORDER.index(imported) < VOCABULARY_ORDER.index(room)
    return LAYERS[imported] < LAYERS[room]


@pytest.mark.parametrize(
    "path", [path for path in RUNTIME if room_of(path)], ids=lambda path: str(path.relative_to(ROOT))
)
def test_imports_go_strictly_down(path: Path) -> None:
    room = room_of(path)
    wrong = [
        str(item)
        for item in imports_of(path)
        if item.top == "edgeinfer"
        and item.room not in {"", "__version__", "Client"}
        and not (item.room in LAYERS and allowed(room, item.room))
    ]
    assert wrong == []


def test_the_package_itself_imports_nothing_until_asked() -> None:
    loaded = [item for item in imports_of(ROOT / "edgeinfer" / "__init__.py") if item.top == "edgeinfer"]
    assert {item.module for item in loaded} <= {"edgeinfer.client"}


def test_only_the_worker_side_touches_numbers() -> None:
    wrong = [
        str(item)
        for path in RUNTIME
        if not (room_of(path) == "worker" and path.stem in WORKER_SIDE)
        for item in imports_of(path)
        if item.top in NUMBERS and not item.type_only
    ]
    assert wrong == []


def test_nobody_but_the_worker_side_imports_the_worker_side() -> None:
    wrong = [
        str(item)
        for path in RUNTIME
        if not (room_of(path) == "worker" and path.stem in WORKER_SIDE)
        for item in imports_of(path)
        if item.module.startswith("edgeinfer.worker.") and item.module.split(".")[2] in WORKER_SIDE
    ]
    assert wrong == []


def test_the_runtime_does_not_know_the_toolchain() -> None:
    known = {"edgeinfer_tools", *DEMO_AND_BENCH, "tests"}
    assert [str(item) for path in RUNTIME for item in imports_of(path) if item.top in known] == []


def test_the_toolchain_uses_contracts_and_the_worker_only() -> None:
    wrong = [
        str(item)
        for path in modules("tools/edgeinfer_tools")
        for item in imports_of(path)
        if item.top == "edgeinfer" and item.room not in {"", "__version__", *TOOLS_MAY_USE}
    ]
    assert wrong == []


def test_the_toolchain_does_not_know_demo_and_benchmarks() -> None:
    wrong = [
        str(item)
        for path in modules("tools/edgeinfer_tools")
        for item in imports_of(path)
        if item.top in DEMO_AND_BENCH
    ]
    assert wrong == []


FORBIDDEN_NAMES = frozenset(
    {"utils", "helpers", "common", "misc", "base", "core", "types", "constants", "util", "helper"}
)


def test_no_module_is_named_after_nothing() -> None:
    every = [*RUNTIME, *modules("tools")]
    assert [str(path.relative_to(ROOT)) for path in every if path.stem in FORBIDDEN_NAMES] == []


def test_modules_say_what_they_own() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in RUNTIME
        if path.stem != "__init__" and ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert silent == []
