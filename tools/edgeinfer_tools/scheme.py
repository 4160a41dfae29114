"""Name one way to quantize a model, completely: a frozen value whose text is the same on every machine.

Owns the parameters, which of them contradict each other, and what is sensible on a target. What they do to a graph is
`quantize`'s business; which of many is the best is a search's.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

import msgspec

from edgeinfer.errors import ConfigError, Problem
from edgeinfer_tools.targets import Target

Method = Literal["keep", "dynamic", "static", "weights", "fp16"]
Activations = Literal["u8", "s8", "u16", "s16"]
Calibrator = Literal["minmax", "entropy", "percentile"]
Algorithm = Literal["rtn", "hqq", "gptq"]

METHODS: tuple[str, ...] = get_args(Method)
CLIPPING = ("Relu", "Clip")
"""Quantized together with what they follow: else the range of a convolution is that *before* it is clipped, and most of
the 8 bits are spent on values that the next operator throws away."""
STATIC_OPERATORS = ("Conv", "ConvTranspose", "MatMul", "Gemm", *CLIPPING)
"""Where the time goes, and what belongs to it; pre- and post-processing stays as it is."""
DYNAMIC_OPERATORS = ("MatMul", "Gemm", "Gather")
"""Gather: tables of embeddings are half of a small language model. Not Conv: ConvInteger is slow, and older runtimes
cannot load it."""
WEIGHT_OPERATORS = ("MatMul", "Gemm")
_OPERATORS = {"static": STATIC_OPERATORS, "dynamic": DYNAMIC_OPERATORS, "weights": WEIGHT_OPERATORS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How to quantize. Fields that a method does not use keep their defaults, so that equal schemes are equal."""

    method: Method
    """`keep` (float), `dynamic` (8 bits, activations measured at run time), `static` (QDQ, activations calibrated),
    `weights` (only weights, in blocks; activations stay float) or `fp16`."""
    weight_bits: int = 8
    """`weights`: 8 or 4. Else 8."""
    unsigned_weights: bool = False
    """`static`, `dynamic`: weights as u8 with a zero point. U8U8 kernels never saturate, and are slower."""
    activations: Activations = "u8"
    """`static`. 16 bits are exact where 8 are not, and as slow as float on a CPU."""
    symmetric: bool = False
    """`static`: zero points of activations are 0. `weights`: no zero points."""
    per_channel: bool = False
    reduced_range: bool = False
    """`static`, `dynamic`: weights of 7 bits."""
    calibrator: Calibrator = "minmax"
    percentile: float = 99.99
    """`percentile`: share of the values, in percent, that the range holds."""
    algorithm: Algorithm = "rtn"
    """`weights`: round to nearest, half-quadratic (no data), or GPTQ (calibration data)."""
    block_size: int = 32
    """`weights`: how many weights share a scale: 16, 32, 64, 128 or 256."""
    int8_compute: bool = False
    """`weights`: the device may compute in 8 bits (accuracy level 4): faster, and activations are rounded."""
    operators: tuple[str, ...] = ()
    """Types of operators to quantize; empty: what the method does by default."""
    exclude: tuple[str, ...] = ()
    """Names of nodes that stay float, sorted."""

    @property
    def op_types(self) -> tuple[str, ...]:
        """The operator types that this scheme quantizes."""
        return self.operators or _OPERATORS.get(self.method, ())

    @property
    def quantized(self) -> bool:
        """Whether integers take part: such artefacts may differ from CPU to CPU by more than rounding."""
        return self.method in {"dynamic", "static", "weights"}

    @property
    def calibrated(self) -> bool:
        """Whether it needs calibration data."""
        return self.method == "static" or (self.method == "weights" and self.algorithm == "gptq")

    def text(self) -> str:
        """Return the canonical text: JSON of what is not the default, keys sorted. Fit for keys of caches."""
        defaults = asdict(Scheme(method=self.method))
        found = {key: value for key, value in asdict(self).items() if key == "method" or value != defaults[key]}
        return json.dumps(found, sort_keys=True, separators=(",", ":"))

    @property
    def title(self) -> str:
        """A short name for people: `static u8s8 per-channel 7-bit percentile 99.99`."""
        kept = f", {len(self.exclude)} nodes float" if self.exclude else ""
        match self.method:
            case "keep" | "fp16":
                return ("float32" if self.method == "keep" else "float16") + kept
            case "weights":
                extra = " int8-compute" if self.int8_compute else ""
                return f"weights int{self.weight_bits} {self.algorithm} block {self.block_size}{extra}{kept}"
        words = [self.method, f"{self.activations}{'u8' if self.unsigned_weights else 's8'}"]
        words.append("per-channel" if self.per_channel else "per-tensor")
        if self.reduced_range:
            words.append("7-bit")
        if self.method == "static":
            words.append(self.calibrator + (f" {self.percentile:g}" if self.calibrator == "percentile" else ""))
        return " ".join(words) + kept

    def without(self, *nodes: str) -> Scheme:
        """Return the scheme with these nodes kept in float too."""
        return replace(self, exclude=tuple(sorted({*self.exclude, *nodes})))

    def check(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            ConfigError: with every problem.
        """
        problems = [Problem(key, text) for key, text in self._contradictions()]
        if problems:
            raise ConfigError(f"scheme {self.title}", tuple(problems))

    def _contradictions(self) -> list[tuple[str, str]]:
        found = []
        bits = (8, 4) if self.method == "weights" else (8,)
        if self.weight_bits not in bits:
            found.append(("weight_bits", f"{self.weight_bits} is not {' or '.join(map(str, bits))} with {self.method}"))
        if self.method == "weights" and self.block_size not in {16, 32, 64, 128, 256}:
            found.append(("block_size", f"{self.block_size} is not 16, 32, 64, 128 or 256"))
        if self.unsigned_weights and (self.reduced_range or self.activations != "u8"):
            found.append(("unsigned_weights", "are for full-range weights beside u8 activations"))
        if not 50 < self.percentile <= 100:
            found.append(("percentile", f"{self.percentile:g} is not between 50 and 100"))
        if tuple(sorted(set(self.exclude))) != self.exclude:
            found.append(("exclude", "must be sorted, each node once"))
        used = _USED[self.method]
        defaults = Scheme(method=self.method)
        found += [
            (item.name, f"means nothing with {self.method}")
            for item in fields(self)
            if item.name not in used and getattr(self, item.name) != getattr(defaults, item.name)
        ]
        return found


_USED: dict[str, set[str]] = {
    "keep": {"method"},
    "fp16": {"method", "operators", "exclude"},
    "dynamic": {"method", "unsigned_weights", "per_channel", "reduced_range", "operators", "exclude", "weight_bits"},
    "static": {
        "method", "unsigned_weights", "activations", "symmetric", "per_channel", "reduced_range", "calibrator",
        "percentile", "operators", "exclude", "weight_bits",
    },
    "weights": {
        "method", "weight_bits", "symmetric", "algorithm", "block_size", "int8_compute", "operators", "exclude",
    },
}  # fmt: skip


def parse_scheme(text: str) -> Scheme:
    """Return the scheme that `Scheme.text` wrote.

    Raises:
        ConfigError: it is not one.
    """
    try:
        found: Any = msgspec.json.decode(text.encode(), type=Scheme)
        known = {item.name for item in fields(Scheme)}
        if unknown := sorted(set(json.loads(text)) - known):
            raise ConfigError("scheme", tuple(Problem(key, "is not a parameter of schemes") for key in unknown))
    except (msgspec.DecodeError, TypeError) as error:
        raise ConfigError("scheme", (Problem("", str(error)),)) from error
    assert isinstance(found, Scheme)
    found.check()
    return found


def default_scheme(method: Method, target: Target) -> Scheme:
    """Return what is right on the target without any search: never a range that saturates there."""
    match method:
        case "static":
            kernels = target.kernels
            return Scheme(
                method="static",
                per_channel=True,
                reduced_range=target.weights.reduced,
                activations="s8" if kernels.activations == "s8" else "u8",
                symmetric=kernels.activations == "s8",
            )
        case "dynamic":
            return Scheme(method="dynamic", per_channel=True, reduced_range=target.weights.reduced)
        case "weights":
            return Scheme(method="weights", int8_compute=target.kernels.quick)
        case _:
            return Scheme(method=method)


def recipe_scheme(method: str, operators: list[str], parameters: dict[str, Any], target: Target) -> Scheme:
    """Return the scheme of a recipe's variant: what suits the target, but for the parameters that are given.

    Raises:
        ConfigError: an unknown method or parameter, a wrong type, or a contradiction; all are named.
    """
    if method not in METHODS:
        raise ConfigError("scheme", (Problem("method", f"{method!r} is not {', '.join(METHODS)}"),))
    known = {item.name for item in fields(Scheme)} - {"method", "operators"}
    if unknown := sorted(set(parameters) - known):
        text = f"is not a parameter of schemes ({', '.join(sorted(known))})"
        raise ConfigError("scheme", tuple(Problem(key, text) for key in unknown))
    start = default_scheme(method, target)  # type: ignore[arg-type]
    try:
        found: Scheme = msgspec.convert({**asdict(start), "operators": operators, **parameters}, Scheme)
    except msgspec.ValidationError as error:
        raise ConfigError("scheme", (Problem("", str(error)),)) from error
    found = replace(found, exclude=tuple(sorted(set(found.exclude))))
    found.check()
    return found


def candidates(target: Target) -> list[Scheme]:
    """Return schemes worth trying on a target, the likely winners first: a search's starting order."""
    static, dynamic = default_scheme("static", target), default_scheme("dynamic", target)
    found = [
        static,
        replace(static, calibrator="percentile"),
        replace(static, calibrator="entropy"),
        replace(static, per_channel=False),
        dynamic,
        replace(dynamic, per_channel=False),
        *(Scheme(method="weights", weight_bits=bits, int8_compute=target.kernels.quick) for bits in (8, 4)),
        Scheme(method="weights", weight_bits=4, algorithm="hqq", int8_compute=target.kernels.quick),
        Scheme(method="weights", weight_bits=4, algorithm="gptq", int8_compute=target.kernels.quick),
        replace(static, activations="u16", symmetric=False, reduced_range=False),
        Scheme(method="fp16"),
    ]
    if target.weights.reduced:  # the other way not to saturate
        found.insert(3, replace(static, reduced_range=False, unsigned_weights=True))
    return found
