"""The native gated delta nets against `plain.delta`, and their law: the same bits however a prompt is cut, whoever else
is in the batch, and on however many threads; on every instruction set. A layer with one in a call of the library."""

from dataclasses import replace

import pytest
import torch
from test_delta import SPECS, batch_of, products_of, slots, weights_of
from test_native_adapted import low_rank
from test_native_ops import EPS, HIDDEN, INNER, layer_of, weights
from torch.testing import assert_close

from splittime.kernels import plain
from splittime.kernels.api import NotFused, WeightScheme
from splittime.kernels.choose import make_backend
from splittime.kernels.compose import ComposedLayer
from splittime.kernels.layer import DeltaSpec, NormSpec
from splittime.kernels.low_rank import LayerAdapter

WIDE = DeltaSpec(2, 4, 16, 80, conv_width=3, norm=NormSpec(1e-6))  # three panels of columns, the last half full
SPECS = [*SPECS, WIDE, replace(SPECS[0], conv_width=1)]
CUTS = [1, 2, 3, 50, 64, 65, 99]
NUM_TOKENS = 100  # more than two items of the convolution


@pytest.fixture
def ops(isa):
    return make_backend("native", torch.float32)


def run(ops, products, weights, states, *batch):
    return ops.delta(products, weights, states, ops.plan_states(batch_of(*batch)))


def whole(ops, products, weights):
    """Returns the outputs of one prompt and the slot behind it."""
    states = slots(weights.spec)
    return run(ops, products, weights, states, [len(products)], [-1], [3]), states[3]


def unpacked(state, spec):
    """A slot as `plain.delta` has it. (Panels of 32 columns, then what the convolution was given.)"""
    of_heads, seen = state.split((spec.inner * spec.key_dim, spec.channels * (spec.conv_width - 1)))
    panels = of_heads.view(spec.num_value_heads, -1).split(
        [spec.key_dim * min(32, spec.value_dim - begin) for begin in range(0, spec.value_dim, 32)], dim=1
    )
    return torch.cat((torch.cat([one.unflatten(1, (spec.key_dim, -1)) for one in panels], dim=2).flatten(), seen))


@pytest.mark.parametrize("spec", SPECS)
def test_it_agrees_with_the_plain_form(ops, spec):
    weights, lengths = weights_of(spec), [1, 1, 1, 40, 2]
    states = slots(spec, 9)
    states[:5] = torch.randn(5, spec.state_floats) / 4
    given = torch.stack([unpacked(one, spec) for one in states])
    products = torch.cat([products_of(spec, length, seed=place) for place, length in enumerate(lengths)])
    batch = lengths, [0, 1, -1, 3, 4], [0, 5, 2, 3, 6], [(3, 7, 7), (4, 1, 8)]
    found = run(ops, products, weights, states, *batch)
    expected = plain.delta(products, weights, given, plain.plan_states(batch_of(*batch)))
    assert_close(found, expected, rtol=2e-4, atol=2e-5)
    for slot in range(9):
        assert_close(unpacked(states[slot], spec), given[slot], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.sample(30)
def test_a_prompt_gives_the_same_bits_however_it_is_cut(ops, spec, cut):
    products, weights = products_of(spec, NUM_TOKENS), weights_of(spec)
    expected, state = whole(ops, products, weights)
    states, found = slots(spec), []
    for begin in range(0, NUM_TOKENS, cut):
        part = products[begin : begin + cut]
        read, write = (begin // cut - 1) % 2 if begin else -1, begin // cut % 2  # elsewhere each time
        found.append(run(ops, part, weights, states, [len(part)], [read], [write]))
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(states[write], state)
    assert states[2:].isnan().all()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.sample(30)
def test_a_row_in_company_gives_the_same_bits_as_alone(ops, spec, threads):
    """So many rows that heads are whole items, where alone their panels are."""
    weights, lengths = weights_of(spec), [1, 1, 9, 1, 70, 2]
    alone = [products_of(spec, length + 3, seed=place) for place, length in enumerate(lengths)]
    states = slots(spec, 8)
    begun = [whole(ops, one[:3], weights)[1] for one in alone]
    states[:6] = torch.stack(begun)
    ops.set_threads(threads)
    reads, writes = [0, 1, 2, 3, -1, 5], [6, 1, 2, 7, 4, 5]
    together = run(ops, torch.cat([one[3:] for one in alone]), weights, states, lengths, reads, writes)
    ops.set_threads(2)
    expected = [whole(ops, one[3:] if place == 4 else one, weights) for place, one in enumerate(alone)]
    for row, (outputs, found) in enumerate(zip(expected, together.split(lengths), strict=True)):
        assert torch.equal(found, outputs[0][-lengths[row] :])
        assert torch.equal(states[writes[row]], outputs[1])
    assert torch.equal(states[0], begun[0])  # read, and written elsewhere


def test_many_decodes_give_the_same_bits_in_any_order(ops):
    """More rows than the tokens of an item of the convolution."""
    spec, weights, rows = SPECS[0], weights_of(SPECS[0]), 150
    products, given = products_of(spec, rows), torch.randn(rows, spec.state_floats) / 4
    found = []
    for order in (list(range(rows)), list(range(rows))[::-1]):
        states = given.clone()
        outputs = run(ops, products[order], weights, states, [1] * rows, order, order)
        found.append((outputs[torch.tensor(order).argsort()], states))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert torch.equal(run(ops, products[64:65], weights, given, [1], [64], [64]), found[0][0][64:65])


@pytest.mark.parametrize("spec", SPECS)
def test_a_state_kept_in_the_middle_is_gone_on_from_to_the_bit(ops, spec):
    products, weights = products_of(spec, 12), weights_of(spec)
    expected, state = whole(ops, products, weights)
    states = slots(spec, 12)
    begun = whole(ops, products[:4], weights)[1]
    states[6] = states[9] = begun
    given = torch.cat((products[:1], products, products[4:], products[4:6]))
    keeps = [(1, 5, 4), (2, 1, 7), (1, 1, 5), (0, 1, 0), (1, 12, 3), (2, 0, 8), (3, 0, 11)]
    found = run(ops, given, weights, states, [1, 12, 8, 2], [-1, -1, 6, 9], [1, 2, 6, 10], keeps)
    assert torch.equal(found[1:], torch.cat((expected, expected[4:], expected[4:6])))
    assert torch.equal(states[[8, 9, 11]], begun.expand(3, -1))
    assert torch.equal(states[2:4], state.expand(2, -1))
    for count, slot in ((5, 4), (1, 5), (1, 0), (5, 7)):
        again = states.clone()
        assert torch.equal(run(ops, products[count:], weights, again, [12 - count], [slot], [slot]), expected[count:])
        assert torch.equal(again[slot], state)


def test_a_row_without_tokens_takes_its_state_along(ops):
    for spec in SPECS:
        products, weights = products_of(spec, 5), weights_of(spec)
        _, state = whole(ops, products, weights)
        states = slots(spec)
        states[0] = states[4] = state
        run(ops, products, weights, states, [0, 5, 0, 0], [0, -1, -1, 4], [1, 2, 3, 4])
        assert torch.equal(states[[0, 1, 2, 4]], state.expand(4, -1))
        assert not states[3].any()


def test_products_may_be_a_slice_of_something_wider(ops):
    spec, weights = SPECS[0], weights_of(SPECS[0])
    products = products_of(spec, 9)
    wider = torch.cat((products, torch.full((9, 3), float("nan"))), dim=1)
    for given in (wider[:, :-3], products.t().contiguous().t()):
        assert torch.equal(whole(ops, given, weights)[0], whole(ops, products, weights)[0])


def test_each_layer_has_weights_of_its_own(ops):
    spec = SPECS[0]
    products, layers = products_of(spec, 9), [weights_of(spec, seed) for seed in (0, 1)]
    (first, _), (second, _), (again, _) = (whole(ops, products, layers[place]) for place in (0, 1, 0))
    assert torch.equal(again, first)
    assert not torch.equal(second, first)


def test_what_does_not_fit_is_refused(ops):
    spec, weights = SPECS[0], weights_of(SPECS[0])
    products, states = products_of(spec, 4), slots(spec)
    for batch in (([4], [-1], [5]), ([4], [5], [0]), ([4], [-1], [0], [(0, 4, 5)])):
        fits = ops.plan_states(batch_of(*batch))
        ops.delta(products, weights, states, fits)
        with pytest.raises(AssertionError, match="fewer slots"):
            ops.delta(products, weights, states[:5], fits)
    for wrong in (products[:3], products[:, 1:]):
        with pytest.raises(AssertionError, match="products"):
            ops.delta(wrong, weights, states, fits)
    for wrong, reason in ((states[:, 1:].contiguous(), "another spec"), (states.t().contiguous().t(), "behind")):
        with pytest.raises(AssertionError, match=reason):
            ops.delta(products, weights, wrong, fits)
    refused = [
        ([4], [0, 1], [0]),
        ([4], [0], [-1]),
        ([4], [0], [0], [(0, 5, 1)]),
        ([4], [0], [0], [(0, -1, 1)]),
        ([4], [0], [0], [(0, 1, -1)]),
        ([2, 2], [0], [0]),
    ]
    for batch in refused:
        with pytest.raises(AssertionError):
            ops.plan_states(batch_of(*batch))
    with pytest.raises(AssertionError, match="another backend"):
        ops.delta(products, weights, states, plain.plan_states(batch_of([4], [-1], [5])))


def test_gates_are_good_over_their_whole_range(ops):
    """Of a state of ones, keys of zeros and no values a token leaves its decay."""
    spec = DeltaSpec(1, 1, 1, 1, conv_width=1, norm=NormSpec(1e-6))
    a = torch.cat((torch.linspace(-90, 90, 1001), torch.tensor([19.999, 20.0, 20.001, 300.0, -300.0])))
    for decay in (-1e-3, -1.0, -16.0):
        weights = replace(weights_of(spec), decay=torch.tensor([decay]), dt_bias=torch.tensor([0.25]))
        products, states = torch.zeros(len(a), spec.widest), torch.ones(len(a), spec.state_floats)
        products[:, -1] = a
        rows = list(range(len(a)))
        run(ops, products, weights, states, [1] * len(a), rows, rows)
        want = (torch.nn.functional.softplus(a.double() + 0.25) * torch.tensor(decay, dtype=torch.float64)).exp()
        assert_close(states[:, 0].double(), want, rtol=2e-5, atol=1e-38)


def with_delta(ops, scheme, places, **more):
    """A layer of `test_native_ops`, whose mixer is a gated delta net."""
    layer, spec = layer_of(ops, scheme, False, False, places, **more), WIDE
    products, output = weights(spec.widest, HIDDEN, 8), weights(HIDDEN, spec.inner, 9)
    packed = [ops.pack_linear([one], None, scheme) for one in (products, output)]
    mixer = replace(weights_of(spec), products=packed[0], output=packed[1])
    return replace(layer, spec=replace(layer.spec, mixer=spec), mixer=mixer)


@pytest.mark.parametrize("places", ["before", "after", "both"])
@pytest.mark.parametrize("scheme", [WeightScheme("float32"), WeightScheme("int8")], ids=lambda scheme: scheme.name)
def test_the_fused_layer_is_its_composition_to_the_last_bit(ops, scheme, places):
    layer = with_delta(ops, scheme, places)
    fused, composed = ops.fuse(layer), ComposedLayer(ops, layer, "to compare")
    adapter = LayerAdapter(
        output=low_rank(ops, scheme, WIDE.inner, 3, (0, HIDDEN, 4)),
        gate_up=low_rank(ops, scheme, HIDDEN, 4, (0, 2 * INNER, 4)),
    )
    uses = [(adapter, torch.tensor([0, 2, 9], dtype=torch.int32))] if scheme.name == "float32" else []
    for added in ([], uses):
        stores = [slots(WIDE), slots(WIDE)]
        for read in (-1, 3):  # two steps
            plan = ops.plan_states(batch_of([1, 9], [read, -1], [3, 4], [(1, 5, 0)]))
            hidden = weights(10, HIDDEN, 7)
            found = fused(hidden.clone(), torch.empty(0), stores[0], plan, added)
            assert torch.equal(found, composed(hidden.clone(), torch.empty(0), stores[1], plan, added))
            assert torch.equal(*(store[[0, 3, 4]] for store in stores))
            assert not torch.equal(found, hidden)


def test_a_fused_layer_refuses_what_does_not_fit(ops):
    fused, hidden = ops.fuse(with_delta(ops, WeightScheme("float32"), "before")), weights(4, HIDDEN, 7)
    plan = ops.plan_states(batch_of([4], [-1], [5]))
    with pytest.raises(AssertionError, match="fewer slots"):
        fused(hidden, torch.empty(0), slots(WIDE)[:5], plan)
    with pytest.raises(AssertionError, match="another backend"):
        fused(hidden, torch.empty(0), slots(WIDE), plain.plan_states(batch_of([4], [-1], [5])))


def test_what_is_not_fused_is_told(ops):
    layer = with_delta(ops, WeightScheme("float32"), "before")
    assert ops.fuse(replace(layer, factor=2.0)) == NotFused("the output is multiplied")
    centred = replace(layer.spec, norm=NormSpec(EPS, is_centred=True))
    assert ops.fuse(replace(layer, spec=centred)) == NotFused("norms take off a mean")
