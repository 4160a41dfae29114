"""What the artefacts of one recipe mean: figures with goals, and a table for people."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from edgeinfer_bench.record import Figure
from edgeinfer_bench.toolchain.judging import Quality
from edgeinfer_bench.toolchain.rivals import PEERS, TITLES, Attempt

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One artefact of a recipe, or why there is none."""

    attempt: Attempt
    size_bytes: int | None = None
    quality: Quality | None = None
    p50_ms: dict[int, float] | None = None

    @property
    def stands(self) -> bool:
        """It exists, runs and passes every gate: so it counts as of equal quality."""
        return self.quality is not None and self.quality.passed and self.p50_ms is not None


def figures_of(name: str, rows: dict[str, Row], preferred: str, allowed_drop: float) -> list[Figure]:
    """Return one recipe's figures.

    `rows` have `float`, a row per peer, and `ours VARIANT` per other variant of our bundle, which holds the float model
    too; `preferred` is the row that the bundle's report prefers.
    """
    ours, base = rows[preferred], rows["float"]
    if ours.quality is None or ours.p50_ms is None or ours.size_bytes is None:
        return [Figure(f"tools.{name}.{key}", None, "ratio", 1.0, "lower", note=ours.attempt.reason) for key in KEYS]
    assert base.quality is not None
    assert base.p50_ms is not None
    assert base.size_bytes is not None
    standing = {key: rows[key] for key in PEERS if rows[key].stands}
    mine = {key: row for key, row in rows.items() if key not in PEERS and row.stands}
    out = "; ".join(f"{key}: {_why(rows[key])}" for key in PEERS if key not in standing)
    drop = max(0.0, base.quality.value - ours.quality.value)
    # Never below the bar: a miss of any gate is a miss here, whatever the first gate says.
    goal = allowed_drop if ours.quality.passed else -1.0
    two = f"at 2 threads {ours.p50_ms[2] / base.p50_ms[2]:.2f}"
    found = [
        Figure(f"tools.{name}.size_ratio", ours.size_bytes / base.size_bytes, "ratio", 1.0, "lower", "float"),
        Figure(f"tools.{name}.quality_drop", drop, "of 1", goal, "lower", "float", note=ours.quality.text),
        Figure(f"tools.{name}.p50_ratio", ours.p50_ms[1] / base.p50_ms[1], "ratio", 1.0, "lower", "float", note=two),
    ]
    if not standing or not mine:
        why = f"no peer passes the gates ({out})"
        return [*found, *(Figure(f"tools.{name}.{key}", None, "ratio", 1.0, "lower", note=why) for key in KEYS[3:])]
    for key, measure in zip(KEYS[3:], (_p50, _size), strict=True):
        best = min(standing, key=lambda peer: measure(standing[peer]))
        own = min(mine, key=lambda variant: measure(mine[variant]))
        ratio = measure(mine[own]) / measure(standing[best])
        note = f"our {own.removeprefix('ours ')}" + (f"; {out}" if out else "")
        found.append(Figure(f"tools.{name}.{key}", ratio, "ratio", 1.0, "lower", TITLES[best], note=note))
    return found


KEYS = ("size_ratio", "quality_drop", "p50_ratio", "vs_best_peer_p50_ratio", "vs_best_peer_size_ratio")


def _p50(row: Row) -> float:
    assert row.p50_ms is not None
    return row.p50_ms[1]


def _size(row: Row) -> float:
    assert row.size_bytes is not None
    return row.size_bytes


def _why(row: Row) -> str:
    """Return why a peer's artefact does not stand."""
    if row.attempt.path is None:
        return row.attempt.reason
    if row.quality is not None and not row.quality.passed:
        return row.quality.text
    return "does not run"


def show_rows(name: str, rows: dict[str, Row]) -> None:
    """Print a recipe's table."""
    console = Console()
    if not console.is_terminal:
        console.width = 160
    table = Table(title=name, title_justify="left")
    for column in ("artefact", "MiB", "first gate", "gates", "p50 ms, 1 thread", "2 threads", "made in s", "peak MiB"):
        table.add_column(column, justify="left" if column in {"artefact", "gates"} else "right")
    for key, row in rows.items():
        peak, seconds = row.attempt.peak_bytes, row.attempt.seconds
        table.add_row(
            TITLES.get(key, key.replace("ours", "edgeinfer-tools", 1)),
            "-" if row.size_bytes is None else f"{row.size_bytes / MIB:.2f}",
            "-" if row.quality is None else f"{row.quality.value:.4f}",
            "pass" if row.stands else _why(row),
            *("-" if row.p50_ms is None else f"{row.p50_ms[threads]:.2f}" for threads in (1, 2)),
            "-" if seconds is None else f"{seconds:.1f}",
            "-" if peak is None else f"{peak / MIB:.0f}",
        )
    console.print(table)
