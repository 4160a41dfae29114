"""A scheme is a value: its text is stable, contradictions are refused, and what suits a board follows from its flags."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.errors import ConfigError
from edgeinfer_tools.scheme import METHODS, Scheme, candidates, default_scheme, parse_scheme, recipe_scheme
from edgeinfer_tools.targets import KERNELS, Target

AVX2 = Target("avx2", "x86_64", ("avx2",))
FLAGS = {
    "x86-vnni": Target("t", "x86_64", ("avx2", "avx_vnni")),
    "x86-avx512-novnni": Target("t", "x86_64", ("avx2", "avx512f")),
    "x86-avx2": AVX2,
    "x86-sse": Target("t", "x86_64", ("sse4_2",)),
    "arm-dotprod": Target("t", "aarch64", ("asimd", "asimddp")),
    "arm-nodotprod": Target("t", "aarch64", ("asimd",)),
}


def test_every_kind_of_kernel_is_recognised() -> None:
    assert FLAGS.keys() == KERNELS.keys()
    assert {name: target.kernels.name for name, target in FLAGS.items()} == {name: name for name in FLAGS}


@pytest.mark.parametrize("name", FLAGS)
def test_no_default_and_no_candidate_saturates_on_its_target(name: str) -> None:
    target = FLAGS[name]
    for scheme in [default_scheme(method, target) for method in METHODS] + candidates(target):  # type: ignore[arg-type]
        scheme.check()
        saturates = (
            scheme.method in {"static", "dynamic"}
            and scheme.activations in {"u8", "s8"}
            and not scheme.reduced_range
            and not scheme.unsigned_weights
            and not target.kernels.exact
        )
        assert not saturates, scheme.title


def test_the_number_range_follows_the_instruction_sets() -> None:
    found = {}
    for name, target in FLAGS.items():
        scheme = default_scheme("static", target)
        found[name] = (scheme.activations, scheme.reduced_range)
    assert found == {
        "x86-vnni": ("u8", False),
        "x86-avx512-novnni": ("u8", True),
        "x86-avx2": ("u8", True),
        "x86-sse": ("u8", True),
        "arm-dotprod": ("s8", False),
        "arm-nodotprod": ("s8", False),
    }


def test_the_text_is_what_caches_may_rely_on() -> None:
    scheme = Scheme(method="static", per_channel=True, calibrator="percentile", percentile=99.9).without(
        "b", "a, b", "b"
    )
    text = '{"calibrator":"percentile","exclude":["a, b","b"],"method":"static","per_channel":true,"percentile":99.9}'
    assert scheme.text() == text
    assert Scheme(method="keep").text() == '{"method":"keep"}'
    assert hash(parse_scheme(text)) == hash(scheme)


@given(
    st.builds(
        Scheme,
        method=st.just("static"),
        activations=st.sampled_from(["u8", "s8", "u16", "s16"]),
        per_channel=st.booleans(),
        symmetric=st.booleans(),
        calibrator=st.sampled_from(["minmax", "entropy", "percentile"]),
        percentile=st.floats(50.5, 100),
        exclude=st.lists(st.text(min_size=1), unique=True).map(lambda names: tuple(sorted(names))),
    )
)
def test_the_text_gives_the_scheme_again(scheme: Scheme) -> None:
    assert parse_scheme(scheme.text()) == scheme


def test_schemes_that_differ_have_texts_and_titles_that_differ() -> None:
    found = candidates(AVX2)
    assert len({scheme.text() for scheme in found}) == len(found)
    assert len({scheme.title for scheme in found}) == len(found)


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        (Scheme(method="dynamic", calibrator="entropy"), "calibrator: means nothing with dynamic"),
        (Scheme(method="static", weight_bits=4), "weight_bits: 4 is not 8 with static"),
        (
            Scheme(method="weights", weight_bits=3, block_size=7),
            "weight_bits: 3 is not 8 or 4.*\n.*block_size: 7 is not",
        ),
        (Scheme(method="static", unsigned_weights=True, reduced_range=True), "full-range weights beside u8"),
        (Scheme(method="static", exclude=("b", "a")), "exclude: must be sorted"),
        (Scheme(method="static", percentile=0.99), "0.99 is not between 50 and 100"),
    ],
)
def test_contradictions_are_refused_all_at_once(scheme: Scheme, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        scheme.check()


def test_a_recipe_says_what_differs_from_the_board() -> None:
    scheme = recipe_scheme("static", ["Conv"], {"calibrator": "entropy", "exclude": ["n2", "n1"]}, AVX2)
    assert scheme == replace(
        default_scheme("static", AVX2), operators=("Conv",), calibrator="entropy", exclude=("n1", "n2")
    )
    for parameters, words in [
        ({"calibratr": "entropy"}, "calibratr: is not a parameter of schemes"),
        ({"calibrator": "guess"}, "Invalid enum value 'guess'"),
        ({"per_channel": "yes"}, "per_channel"),
    ]:
        with pytest.raises(ConfigError, match=words):
            recipe_scheme("static", [], parameters, AVX2)
    with pytest.raises(ConfigError, match="'magic' is not keep"):
        recipe_scheme("magic", [], {}, AVX2)


@pytest.mark.parametrize("text", ["", "[]", '{"method":"magic"}', '{"method":"static","colour":1}'])
def test_a_text_that_is_no_scheme_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_scheme(text)


def test_the_text_has_no_defaults_in_it() -> None:
    assert all(len(json.loads(default_scheme(method, AVX2).text())) <= 3 for method in METHODS)  # type: ignore[arg-type]
