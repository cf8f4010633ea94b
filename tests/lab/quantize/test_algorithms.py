"""Each algorithm on a layer of its own: what its paper promises must be seen, and what it must not change is equal."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import correlated

from splittime.core.errors import ConfigError
from splittime.lab.quantize import rounding
from splittime.lab.quantize.forward import Gatherer, relative_error
from splittime.lab.quantize.rounding import Grid, round_to_nearest, round_values
from splittime.lab.quantize.treat import awq_clip, awq_scales, scores, semi_structured, smooth_scales, unstructured

SYMMETRIC = Grid(4, 32, True, torch.float16)
ASYMMETRIC = Grid(4, 32, False, torch.float16)


def moments_of(x):
    gatherer = Gatherer(x.shape[1])
    for part in x.split(100):
        gatherer.add(part)
    return gatherer.moments()


def layer(seed=0, rows=48, columns=96):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed + 10))


def test_moments_are_those_of_all_tokens():
    x = correlated(333, 32)
    found = moments_of(x)
    assert found.tokens == 333
    torch.testing.assert_close(found.gram, x.t() @ x / 333)
    torch.testing.assert_close(found.mean_abs, x.abs().mean(0))
    assert torch.equal(found.max_abs, x.abs().amax(0))
    assert Gatherer(4).moments() is None


def test_the_relative_error_is_that_of_the_outputs():
    x, weight = correlated(200, 96), layer()
    kept = round_values(weight, SYMMETRIC)
    wanted = (x @ (kept - weight).t()).norm() / (x @ weight.t()).norm()
    assert relative_error(weight, kept, moments_of(x)) == pytest.approx(float(wanted), rel=1e-3)
    assert relative_error(weight, kept, None) == pytest.approx(float((kept - weight).norm() / weight.norm()), rel=1e-5)
    assert relative_error(torch.zeros(2, 3), torch.zeros(2, 3), None) == 0


@given(st.integers(0, 1000), st.sampled_from([SYMMETRIC, ASYMMETRIC, Grid(8, 0, True, torch.float32)]))
@settings(max_examples=30, deadline=None)
def test_rounding_to_nearest_errs_by_half_a_step_and_keeps_zero(seed, grid):
    weight = layer(seed)
    weight[0, :40] = 0
    found = round_to_nearest(weight, grid)
    step = found.scales[:, found.group_of]
    steps_off = ((found.values() - weight) / step).abs()
    at_an_end = (found.integers == 0) | (found.integers == grid.top)
    assert steps_off[~at_an_end].max() <= 0.5 + 1e-3
    assert steps_off.max() <= (0.51 if grid.bits == 4 else 0.6)  # a scale is rounded too
    assert torch.all(found.values()[0, :40] == 0)
    assert torch.equal(found.values(), round_values(weight, grid))
    assert torch.equal(found.scales, found.scales.to(grid.scale_dtype).float())


def test_a_weight_beyond_the_scales_type_is_refused():
    with pytest.raises(ConfigError, match=r"too large for scales in torch\.float16"):
        round_to_nearest(torch.full((2, 32), 1e6), SYMMETRIC)


ORDERS = pytest.mark.parametrize(("act_order", "static_groups"), [(False, False), (True, False), (True, True)])


@ORDERS
@pytest.mark.parametrize(
    "grid", [SYMMETRIC, ASYMMETRIC, Grid(4, 0, True, torch.float16), Grid(4, 96, True, torch.float16)]
)
def test_gptq_beats_rounding_on_correlated_inputs(grid, act_order, static_groups):
    seen, unseen = (moments_of(part) for part in correlated(800, 192).split(400))
    weight = layer(columns=192)  # more than a block of columns
    found = rounding.gptq(weight, seen.gram, grid, act_order, static_groups)
    error = relative_error(weight, found.values(), unseen)
    assert error < 0.9 * relative_error(weight, round_values(weight, grid), unseen)
    assert torch.equal(found.scales, found.scales.half().float())


def test_gptq_with_an_identity_hessian_is_rounding():
    weight = layer(columns=192)
    found, wanted = rounding.gptq(weight, torch.eye(192), SYMMETRIC, False), round_to_nearest(weight, SYMMETRIC)
    for name in ("integers", "scales", "zeros", "group_of"):
        assert torch.equal(getattr(found, name), getattr(wanted, name))


def test_gptq_in_the_order_of_importance_groups_columns_by_it():
    weight, gram = layer(columns=64), torch.diag(torch.arange(1.0, 65.0))
    found = rounding.gptq(weight, gram, SYMMETRIC, True)
    assert found.group_of.tolist() == [1] * 32 + [0] * 32  # the last columns matter most
    torch.testing.assert_close(found.values()[:, 32:], round_values(weight[:, 32:], SYMMETRIC))


def test_static_groups_stay_as_they_lie():
    weight, gram = layer(columns=192), moments_of(correlated(400, 192)).gram
    found, nearest = rounding.gptq(weight, gram, SYMMETRIC, True, True), round_to_nearest(weight, SYMMETRIC)
    assert torch.equal(found.group_of, nearest.group_of)
    assert torch.equal(found.scales, nearest.scales)
    first, last = int(gram.diagonal().argmax()), int(gram.diagonal().argmin())
    assert torch.equal(found.integers[:, first], nearest.integers[:, first])
    assert not torch.equal(found.integers[:, last], nearest.integers[:, last])


@ORDERS
def test_gptq_does_not_depend_on_its_blocks(act_order, static_groups, monkeypatch):
    """A group that begins in one block and ends in the next has the errors of both taken off when its scale is fit."""
    weight, gram = layer(columns=192), moments_of(correlated(400, 192)).gram
    grid, found = Grid(4, 96, True, torch.float32), []
    for columns in (1000, 128, 50):
        monkeypatch.setattr(rounding, "BLOCK_COLUMNS", columns)
        found.append(rounding.gptq(weight, gram, grid, act_order, static_groups))
    for other in found[1:]:  # a tie may fall the other way where sums are in another order
        close = (other.scales - found[0].scales).abs() < 1e-3 * found[0].scales
        assert close.float().mean() > 0.9


def test_gptq_is_as_its_definition_says():
    """Column by column with the inverse worked out anew each time, as the method it makes fast does (section 3.1)."""
    grid = Grid(4, 0, True, torch.float32)
    weight, gram = layer(columns=24), moments_of(correlated(100, 24)).gram
    left = weight.clone().double()
    damped = gram.double() + rounding.DAMPING * gram.diagonal().mean().double() * torch.eye(24, dtype=torch.float64)
    wanted = torch.empty_like(left)
    scales = 2 * weight.abs().amax(1).double() / 15
    for column in range(24):
        inverse = torch.linalg.inv(damped[column:, column:])
        wanted[:, column] = (left[:, column] / scales).round().clamp(-8, 7) * scales
        error = (left[:, column] - wanted[:, column]) / inverse[0, 0]
        left[:, column:] -= torch.outer(error, inverse[0])
    found = rounding.gptq(weight, gram, grid, False).values()
    same = (found - wanted).abs() < 1e-4  # a tie may fall the other way in float32, and then all after it differ
    assert same.all(1).float().mean() > 0.9


def test_gptq_rounds_channels_that_are_never_touched():
    weight, x = layer(columns=64), correlated(100, 64)
    x[:, [3, 40]] = 0
    found = rounding.gptq(weight, moments_of(x).gram, SYMMETRIC, False)
    assert found.values().isfinite().all()
    assert (found.values()[:, 40] - weight[:, 40]).abs().max() < 0.8  # a step of the group's scale at most
    nothing = rounding.gptq(weight, torch.zeros(64, 64), SYMMETRIC, False)
    assert torch.equal(nothing.values(), round_values(weight, SYMMETRIC))


def test_a_hessian_without_numbers_is_refused():
    with pytest.raises(ConfigError, match="cannot be inverted"):
        rounding.inverse_factor(torch.full((4, 4), float("nan")))


def test_awq_scales_beat_rounding_where_channels_differ():
    x, weight = correlated(300, 96), layer()
    found = moments_of(x)
    scales = awq_scales([weight], found, found.mean_abs, ASYMMETRIC)
    scaled = round_values(weight * scales, ASYMMETRIC) / scales
    plain = round_values(weight, ASYMMETRIC)
    assert relative_error(weight, scaled, found) < 0.9 * relative_error(weight, plain, found)
    assert scales.std() > 0


def test_awq_leaves_equal_channels_alone():
    found = moments_of(torch.randn(4000, 96, generator=torch.Generator().manual_seed(0)).sign())
    scales = awq_scales([layer()], found, found.mean_abs, ASYMMETRIC)
    torch.testing.assert_close(scales, torch.ones(96))


def test_awq_ignores_channels_that_are_never_touched():
    x = correlated(100, 96)
    x[:, 7] = 0
    found = moments_of(x)
    scales = awq_scales([layer()], found, found.mean_abs, ASYMMETRIC)
    assert scales.isfinite().all()
    assert (scales > 0).all()
    assert scales[7] == 1
    assert torch.equal(
        awq_scales([layer()], moments_of(torch.zeros(9, 96)), torch.zeros(96), ASYMMETRIC), torch.ones(96)
    )


def test_awq_clipping_never_raises_a_groups_error_and_cuts_outliers():
    weight = layer()
    weight[:, 5] *= 4  # an outlier in the first group, on a channel that hardly ever speaks
    x = correlated(300, 96)
    x[:, 5] *= 0.001
    gram = moments_of(x).gram
    cut = awq_clip(weight, gram, ASYMMETRIC)
    assert (cut[:, 5].abs() < weight[:, 5].abs()).float().mean() > 0.5
    for begin in range(0, 96, 32):
        group, block = slice(begin, begin + 32), gram[begin : begin + 32, begin : begin + 32]
        errors = []
        for kept in (cut, weight):
            change = round_values(kept[:, group], Grid(4, 0, False, torch.float16)) - weight[:, group]
            errors.append(((change @ block) * change).sum(1))
        assert (errors[0] <= errors[1] * (1 + 1e-4)).all()


def test_smoothing_divides_outliers_by_the_papers_formula():
    x, weights = correlated(100, 32), [layer(1, 16, 32), layer(2, 8, 32)]
    weights[0][:, 3] = weights[1][:, 3] = 0
    x[:, 4] = 0
    found = smooth_scales(weights, moments_of(x), 0.5)
    largest = torch.cat(weights).abs().amax(0)
    wanted = x.abs().amax(0).sqrt() / largest.sqrt()
    alive = [column for column in range(32) if column not in (3, 4)]
    torch.testing.assert_close(found[alive], wanted[alive])
    assert found[[3, 4]].tolist() == [1, 1]
    torch.testing.assert_close(smooth_scales(weights, moments_of(x), 1.0)[alive], x.abs().amax(0)[alive])


@given(st.integers(0, 1000), st.booleans())
@settings(max_examples=30, deadline=None)
def test_two_in_four_are_zero_and_they_are_the_lowest(seed, has_ties):
    weight = layer(seed) if not has_ties else torch.ones(48, 96)
    kept = semi_structured(weight, scores(weight, None))
    fours, whole = kept.unflatten(1, (-1, 4)), weight.unflatten(1, (-1, 4))
    assert torch.all((fours == 0).sum(-1) == 2)
    lost = torch.where(fours == 0, whole.abs(), 0).amax(-1)
    assert torch.all(lost <= torch.where(fours != 0, whole.abs(), torch.inf).amin(-1))
    assert torch.all((kept == weight) | (kept == 0))


@pytest.mark.parametrize("by_row", [False, True])
def test_unstructured_drops_the_share_that_was_asked_for(by_row):
    weight = layer()
    kept = unstructured(weight, weight.abs(), 0.3, by_row)
    per_row = (kept == 0).sum(1)
    if by_row:
        assert per_row.tolist() == [28] * 48
    else:
        assert per_row.sum() == int(0.3 * 48 * 96)
    assert weight[kept == 0].abs().max() <= weight[kept != 0].abs().min() or by_row


def test_wanda_beats_magnitude_on_outputs_where_channels_differ():
    weight, found = layer(), moments_of(correlated(300, 96))
    errors = []
    for squares in (found.gram.diagonal(), None):
        kept = unstructured(weight, scores(weight, squares), 0.5, True)
        errors.append(relative_error(weight, kept, found))
    assert errors[0] < 0.7 * errors[1]
