"""List the forms of a model that are worth trying on a board, the likely winners first. Pure.

The space is small and known: some two dozen schemes, not a continuum. So the order is written down here, and knowledge
prunes it: what is coarser than a form that already missed the quality bar cannot reach it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from edgeinfer.artifact.provider import CPU_PROVIDER
from edgeinfer_tools.origin import Source
from edgeinfer_tools.recipe import VariantRecipe
from edgeinfer_tools.scheme import CLIPPING, Scheme, candidates, default_scheme, recipe_scheme
from edgeinfer_tools.search.budget import Budget
from edgeinfer_tools.targets import Target
from edgeinfer_tools.variants import network_key

TIGHT_SIZE = 0.3
"""A size bound below this share of the float model asks for fewer than 8 bits: those schemes come first then."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One form to try."""

    name: str
    """As the variant would be called; says what the scheme is."""
    scheme: Scheme
    source: Source | None = None
    """Another, smaller network of the same contract that it is made from."""
    providers: tuple[str, ...] = (CPU_PROVIDER,)
    provider_options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-6

    @property
    def network(self) -> str:
        """Key of the network that it is made from; empty for the recipe's own."""
        return "" if self.source is None else network_key(self.source)

    @property
    def key(self) -> str:
        """The same for equal forms of the same network."""
        options = (
            "" if self.providers == (CPU_PROVIDER,) else f"{self.providers}{sorted(self.provider_options.items())}"
        )
        return f"{self.scheme.text()}{self.network}{options}"

    def variant(self) -> VariantRecipe:
        """Return it as a recipe has it: `recipe_scheme` gives the same scheme back."""
        parameters = {key: value for key, value in asdict(self.scheme).items() if key not in {"method", "operators"}}
        return VariantRecipe(
            name=self.name,
            method=self.scheme.method,
            operators=list(self.scheme.operators),
            scheme=parameters,
            tolerance=self.tolerance,
            providers=list(self.providers),
            provider_options=self.provider_options,
            source=self.source,
        )

    def with_scheme(self, scheme: Scheme) -> Candidate:
        """Return the same with another scheme, named after it."""
        name = f"{self.name.partition('-kept')[0]}-kept{len(scheme.exclude)}" if scheme.exclude else self.name
        return replace(self, scheme=scheme, name=name)


def space(
    recipe_variants: Sequence[VariantRecipe],
    target: Target,
    budget: Budget,
    float_bytes: int,
    *,
    operators: Collection[str] | None = None,
    calibrated: bool = True,
) -> list[Candidate]:
    """Return the candidates in the order in which to try them: the float model first, then what the recipe names.

    Each other network that the recipe names as a variant's source is tried as it is, and with the best schemes.
    Without calibration data (`calibrated`) what needs them is left out, as are schemes that quantize none of the
    graph's `operators`.
    """
    float_model = Candidate("fp32", Scheme(method="keep"))
    found = [float_model]
    networks: dict[str, tuple[Source, str]] = {}
    for variant in recipe_variants:
        scheme = recipe_scheme(variant.method, variant.operators, variant.scheme, target)
        if variant.source is not None:
            networks.setdefault(network_key(variant.source), (variant.source, variant.name))
        found.append(
            Candidate(
                variant.name,
                scheme,
                source=variant.source,
                providers=tuple(variant.providers),
                provider_options=variant.provider_options,
                tolerance=variant.tolerance,
            )
        )
    schemes = more_schemes(target)
    if budget.size_bytes is not None and budget.size_bytes < TIGHT_SIZE * float_bytes:
        schemes.sort(key=lambda scheme: scheme.weight_bits)  # stable: 4 bits first
    if operators is not None:
        schemes = [scheme for scheme in schemes if not scheme.op_types or _heavy(scheme) & set(operators)]
    found += [Candidate(scheme_name(scheme), scheme) for scheme in schemes]
    for network, name in networks.values():
        forms = [Scheme(method="keep"), default_scheme("static", target), default_scheme("dynamic", target)]
        found += [Candidate(f"{name}-{scheme_name(scheme)}", scheme, source=network) for scheme in forms]
    named = next((item for item in found[1:] if item.key == float_model.key), float_model)
    found[0] = named
    return _unique([item for item in found if calibrated or not item.scheme.calibrated])


def _heavy(scheme: Scheme) -> set[str]:
    return set(scheme.op_types) - set(CLIPPING)


def more_schemes(target: Target) -> list[Scheme]:
    """Return the schemes to try on a target: `scheme.candidates`, and the steps between them.

    One of each kind comes first, then their refinements: so a search whose time is short has seen every kind.
    """
    static = default_scheme("static", target)
    found = candidates(target)
    last = found.index(Scheme(method="fp16"))
    found[last:last] = [
        replace(static, calibrator="percentile", percentile=99.9),
        replace(static, calibrator="percentile", percentile=99.999),
        Scheme(method="weights", weight_bits=4, block_size=128, int8_compute=target.kernels.quick),
        Scheme(method="weights", weight_bits=8, int8_compute=not target.kernels.quick),
    ]
    found = list(dict.fromkeys(found))
    kinds: dict[tuple[str, int], Scheme] = {}
    for scheme in found:
        kinds.setdefault((scheme.method, scheme.weight_bits), scheme)
    return [*kinds.values(), *(scheme for scheme in found if scheme not in kinds.values())]


def _unique(found: Sequence[Candidate]) -> list[Candidate]:
    """Drop equal forms; give names that are taken a number."""
    kept: dict[str, Candidate] = {}
    names: set[str] = set()
    for item in found:
        if item.key in kept:
            continue
        name, number = item.name, 2
        while name in names:
            name, number = f"{item.name}-{number}", number + 1
        names.add(name)
        kept[item.key] = replace(item, name=name)
    return list(kept.values())


def scheme_name(scheme: Scheme) -> str:
    """Return a short name: plain lower case, the same for the same scheme."""
    match scheme.method:
        case "keep":
            return "fp32"
        case "fp16":
            return "fp16"
        case "weights":
            parts = [f"w{scheme.weight_bits}", scheme.algorithm if scheme.algorithm != "rtn" else ""]
            parts += [f"b{scheme.block_size}" if scheme.block_size != 32 else "", "c8" if scheme.int8_compute else ""]
        case "dynamic":
            parts = ["dynamic", "" if scheme.per_channel else "tensor", "7bit" if scheme.reduced_range else ""]
            parts.append("u8w" if scheme.unsigned_weights else "")
        case "static":
            parts = ["static", "" if scheme.per_channel else "tensor", "7bit" if scheme.reduced_range else ""]
            parts += [
                "u8w" if scheme.unsigned_weights else "",
                scheme.activations if "16" in scheme.activations else "",
            ]
            calibrator = "p" + f"{scheme.percentile:g}" if scheme.calibrator == "percentile" else scheme.calibrator
            parts.append("" if scheme.calibrator == "minmax" else calibrator)
    return "-".join(part for part in parts if part)


def coarser(one: Scheme, other: Scheme) -> bool:
    """Whether `one` loses what `other` loses, and more: when `other` missed the bar, `one` need not be tried.

    True only where the one parameter that differs can do nothing but lose: a scale for the whole tensor instead of one
    for each channel, 4 bits instead of 8, larger blocks, rounding to nearest instead of an algorithm that looks.
    """
    if one.method != other.method or one == other or not set(other.exclude) >= set(one.exclude):
        return False
    if one.method in {"static", "dynamic"}:
        return (
            other.per_channel and not one.per_channel and replace(one, per_channel=True, exclude=other.exclude) == other
        )
    if one.method == "weights":
        same = replace(
            one,
            weight_bits=other.weight_bits,
            block_size=other.block_size,
            algorithm=other.algorithm,
            exclude=other.exclude,
        )
        no_better = one.algorithm in {other.algorithm, "rtn"}
        return (
            same == other and one.weight_bits <= other.weight_bits and one.block_size >= other.block_size and no_better
        )
    return False
