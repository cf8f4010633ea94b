"""A gated delta net by `plain.delta`, which is the oracle of the native kernel, against its definition and its laws."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from splittime.kernels import plain
from splittime.kernels.api import AttentionBatch, StateBatch
from splittime.kernels.layer import DeltaSpec, DeltaWeights, NormSpec, PackedWeight

SPECS = [
    DeltaSpec(2, 6, 5, 7, conv_width=4, norm=NormSpec(1e-5)),
    DeltaSpec(3, 3, 8, 4, conv_width=2, norm=NormSpec(0.1)),
    DeltaSpec(1, 5, 33, 16, conv_width=4, norm=NormSpec(1e-6)),
]


def weights_of(spec, seed=0):
    torch.manual_seed(seed)
    heads = spec.num_value_heads
    return DeltaWeights(
        spec,
        PackedWeight(),
        PackedWeight(),
        conv=torch.randn(spec.channels, spec.conv_width),
        decay=-torch.rand(heads) * 3,
        dt_bias=torch.randn(heads),
        norm=torch.randn(spec.value_dim),
    )


def products_of(spec, tokens, seed=1):
    torch.manual_seed(seed)
    return torch.randn(tokens, spec.channels + spec.inner + 2 * spec.num_value_heads)


def slots(spec, count=6):
    """What nobody may read."""
    return torch.full((count, spec.state_floats), float("nan"))


def batch_of(lengths, reads, writes, keeps=()):
    begins = [0]
    for length in lengths:
        begins.append(begins[-1] + length)
    nowhere = torch.zeros(begins[-1], dtype=torch.int64)
    return AttentionBatch(
        begins, lengths, nowhere[:1, None], nowhere, nowhere, 0, StateBatch(list(reads), list(writes), list(keeps))
    )


def run(products, weights, states, *batch):
    return plain.delta(products, weights, states, plain.plan_states(batch_of(*batch)))


def whole(products, weights):
    """Returns the outputs of one prompt and the slot behind it."""
    states = slots(weights.spec)
    return run(products, weights, states, [len(products)], [-1], [3]), states[3]


def defined(products, weights):
    """The outputs in float64, token by token, as `DeltaSpec` says."""
    spec = weights.spec
    mixed, z, b, a = products.double().split(
        (spec.channels, spec.inner, spec.num_value_heads, spec.num_value_heads), dim=1
    )
    padded = torch.nn.functional.pad(mixed.T, (spec.conv_width - 1, 0))
    conv = torch.nn.functional.conv1d(padded, weights.conv.double()[:, None], groups=spec.channels).T
    keys = spec.num_key_heads * spec.key_dim
    q, k, v = torch.nn.functional.silu(conv).split((keys, keys, spec.inner), dim=1)
    serving, rows = spec.num_value_heads // spec.num_key_heads, []
    state = torch.zeros(spec.num_value_heads, spec.key_dim, spec.value_dim, dtype=torch.float64)
    for token in range(len(products)):
        for head in range(spec.num_value_heads):
            query, key = (one[token].view(-1, spec.key_dim)[head // serving] for one in (q, k))
            query, key = (one / (one @ one + 1e-6).sqrt() for one in (query, key))
            value, gate = (one[token].view(-1, spec.value_dim)[head] for one in (v, z))
            decay = weights.decay[head].double() * torch.nn.functional.softplus(a[token, head] + weights.dt_bias[head])
            state[head] *= decay.exp()
            state[head] += torch.outer(key, b[token, head].sigmoid() * (value - state[head].T @ key))
            made = state[head].T @ query / spec.key_dim**0.5
            made = made / (made.square().mean() + spec.norm.eps).sqrt() * weights.norm.double()
            rows.append(made * torch.nn.functional.silu(gate))
    return torch.stack(rows).view(len(products), -1)


@pytest.mark.parametrize("spec", SPECS)
def test_it_computes_what_the_spec_says(spec):
    products, weights = products_of(spec, 23), weights_of(spec)
    assert_close(whole(products, weights)[0].double(), defined(products, weights), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("cut", [1, 2, 7, 22])
def test_a_prompt_gives_the_same_bits_however_it_is_cut(spec, cut):
    products, weights = products_of(spec, 23), weights_of(spec)
    expected, state = whole(products, weights)
    states, found = slots(spec), []
    for begin in range(0, 23, cut):
        part = products[begin : begin + cut]
        found.append(run(part, weights, states, [len(part)], [2 if begin else -1], [2]))
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(states[2], state)
    assert states[[0, 1, 3, 4, 5]].isnan().all()


@pytest.mark.parametrize("spec", SPECS)
def test_a_row_in_company_gives_the_same_bits_as_alone(spec):
    weights, lengths = weights_of(spec), [1, 9, 4, 1]
    alone = [products_of(spec, length + 3, seed=length + place) for place, length in enumerate(lengths)]
    states = slots(spec)
    begun = [whole(one[:3], weights)[1] for one in alone]
    states[:4] = torch.stack(begun)
    together = run(torch.cat([one[3:] for one in alone]), weights, states, lengths, [0, 1, -1, 3], [4, 1, 2, 3])
    expected = [whole(one[3:] if place == 2 else one, weights) for place, one in enumerate(alone)]
    for row, (outputs, found) in enumerate(zip(expected, together.split(lengths), strict=True)):
        assert torch.equal(found, outputs[0][-lengths[row] :])
        assert torch.equal(states[[4, 1, 2, 3][row]], outputs[1])
    assert torch.equal(states[0], begun[0])  # read, and written elsewhere


@pytest.mark.parametrize("spec", SPECS)
def test_a_state_kept_in_the_middle_is_gone_on_from_to_the_bit(spec):
    products, weights = products_of(spec, 12), weights_of(spec)
    expected, state = whole(products, weights)
    states = slots(spec)
    given = torch.cat((products[:1], products))
    keeps = [(1, 5, 4), (1, 1, 5), (0, 1, 0), (1, 12, 3)]
    run(given, weights, states, [1, 12], [-1, -1], [1, 2], keeps)
    for count, slot in ((5, 4), (1, 5), (1, 0)):
        again = states.clone()
        assert torch.equal(run(products[count:], weights, again, [12 - count], [slot], [slot]), expected[count:])
        assert torch.equal(again[slot], state)
    assert torch.equal(states[3], state)


def test_what_the_next_row_reads_is_what_was_there_before():
    """A slot that one row reads is another's to write only in another step; its own may be the same."""
    spec = SPECS[0]
    products, weights = products_of(spec, 4), weights_of(spec)
    states = slots(spec)
    run(products[:2], weights, states, [2], [-1], [0])
    before = states[0].clone()
    run(products[2:], weights, states, [2], [0], [0], [(0, 1, 1)])
    other = slots(spec)
    other[5] = before
    run(products[2:3], weights, other, [1], [5], [1])
    assert torch.equal(states[1], other[1])
    assert not torch.equal(states[0], before)


def test_outputs_have_the_dtype_of_the_products_and_states_stay_wide():
    spec, weights = SPECS[0], weights_of(SPECS[0])
    narrow = products_of(spec, 9).bfloat16()
    states = slots(spec)
    found = run(narrow, weights, states, [9], [-1], [0])
    expected, state = whole(narrow.float(), weights)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected.bfloat16())
    assert torch.equal(states[0], state)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 33, 128])
def test_pairs_are_summed_along_any_dimension_in_an_order_of_its_own(size):
    torch.manual_seed(0)
    x = torch.randn(4, size, 9)
    found = plain.sum_pairs(x, 1)
    assert_close(found.double(), x.double().sum(1), rtol=1e-6, atol=1e-5)
    assert torch.equal(plain.sum_pairs(x[2:3, :, 4:5], 1), found[2:3, 4:5])
    assert torch.equal(plain.sum_pairs(x.transpose(1, 2), 2), found)


def test_sizes_of_a_spec():
    spec = replace(SPECS[0], conv_width=3)
    assert spec.channels == 2 * 2 * 5 + 6 * 7
    assert spec.inner == 6 * 7
    assert spec.state_floats == 6 * 5 * 7 + spec.channels * 2
    assert spec.widest == spec.channels + spec.inner + 2 * 6
    assert spec.num_weights(10) == 10 * (spec.widest + spec.inner)
