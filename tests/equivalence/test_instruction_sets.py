"""Whole models on each instruction set that this processor has: their logits are those of the portable kernels, and
those of torch with the same weights, to what the number formats lose."""

import pytest
from native_or_not import has_native_kernels
from random_models import make
from test_parallel_models import follow, runner_of

from splittime.kernels.native import check, library

pytestmark = pytest.mark.skipif(not has_native_kernels(), reason="no native kernels")

ROUTES = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16", "activation_dtype": "float32"},
    "bfloat16 activations": {"dtype": "bfloat16", "activation_dtype": "bfloat16"},
    "int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "int4": {"quantization": "int4"},
}
# Sums are made in another order. Where that changes the last bit of what is rounded afterwards (an activation, a key, a
# value), that is off by one step of its format: 2^-8 of itself in bfloat16, 1/127 of its token's largest in int8; a few
# layers make a few steps of it. Of float32 a sum of some hundred terms loses some bits of 24.
STEPS = {"float32": 2**-14, "bfloat16": 2**-8, "bfloat16 activations": 2**-6, "int8": 4 / 127, "int4": 4 / 127}
# torch rounds no activations, and keeps keys and values of bfloat16 weights in float32.
LOST = {"float32": 2**-14, "bfloat16": 2**-5, "bfloat16 activations": 2**-5, "int8": 16 / 127, "int4": 16 / 127}


def error(found, wanted):
    return float((found - wanted).square().mean().sqrt() / wanted.std())


@pytest.fixture
def selected():
    check.choose_isa()  # once, so that no runner chooses again
    before = library.selected_isa()
    yield library.select_isa
    library.select_isa(before)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("variant", ["llama", "qwen3", "qwen3-moe", "gemma2", "gemma3"])
@pytest.mark.sample(10)
def test_the_same_logits(variant, route, selected, tmp_path):
    make(variant, tmp_path)
    unrounded = {name: value for name, value in ROUTES[route].items() if not name.endswith("dtype")}
    exact, outputs = follow(runner_of(tmp_path, kernels="torch", dtype="float32", **unrounded))
    found = {}
    for isa in library.isa_names():
        selected(isa)
        found[isa], _ = follow(runner_of(tmp_path, kernels="native", **ROUTES[route]), outputs)
        assert library.selected_isa() == isa
    for isa, logits in found.items():
        assert error(logits, found["portable"]) < STEPS[route], isa
        assert error(logits, exact) < LOST[route], isa
