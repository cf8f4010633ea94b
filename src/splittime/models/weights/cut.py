"""Some rows, or some columns, of a weight that is integers in the checkpoint, as a `StoredWeight` of its own.

Rows can be cut anywhere. Columns are cut between groups, so that each part has its own scales; of one group a row, each
part has that group's scale. Columns that act-order has moved apart cannot be cut: a rank's inputs would be in all
groups. What is cut off by columns is unpacked too, a piece at a time, and dropped.
"""

from dataclasses import replace

from torch import Tensor

from splittime.core.errors import ConfigError
from splittime.kernels.api import RoundedRows, WeightScheme
from splittime.kernels.rounded import UNITS
from splittime.models.weights.source import StoredWeight

HINT = "a smaller tensor_parallel_size, or another checkpoint of the model"


class RowsOf:
    """Rows [begin, end) of `whole`."""

    def __init__(self, whole: StoredWeight, begin: int, end: int) -> None:
        self.whole = whole
        self.out_features = end - begin
        self.in_features = whole.in_features
        self.scheme = whole.scheme
        self.columns: Tensor | None = whole.columns
        self._begin = begin

    def rows(self, begin: int, end: int) -> RoundedRows:
        return self.whole.rows(self._begin + begin, self._begin + end)


class ColumnsOf:
    """Columns [begin, end) of `whole`. Raises `ConfigError` naming the module where groups forbid it."""

    def __init__(self, module: str, whole: StoredWeight, begin: int, end: int) -> None:
        self.whole = whole
        self.out_features = whole.out_features
        self.in_features = end - begin
        self.columns: Tensor | None = None
        self._columns = slice(begin, end)
        self._groups = _groups(module, whole, begin, end)
        self.scheme = _scheme(whole, end - begin)

    def rows(self, begin: int, end: int) -> RoundedRows:
        found = self.whole.rows(begin, end)
        scales, zeros, minima = (
            None if each is None else each[:, self._groups] for each in (found.scales, found.zeros, found.minima)
        )
        assert scales is not None
        return RoundedRows(found.integers[:, self._columns], scales, zeros, minima)


def _is_one_group(whole: StoredWeight) -> bool:
    return whole.scheme.group == 0 or whole.scheme.group >= whole.in_features


def _groups(module: str, whole: StoredWeight, begin: int, end: int) -> slice:
    if whole.columns is not None:
        message = f"weights: the inputs of {module} are in act-order, so they cannot be cut for several ranks"
        raise ConfigError(message, param=module, hint=HINT)
    if _is_one_group(whole):
        return slice(None)
    group = whole.scheme.group
    if begin % group or (end % group and end != whole.in_features):
        message = f"weights: {module} has groups of {group} columns; a rank's part [{begin}, {end}) cuts through one"
        raise ConfigError(message, param=module, value=end - begin, limit=group, hint=HINT)
    return slice(begin // group, -(-end // group))


def _scheme(whole: StoredWeight, width: int) -> WeightScheme:
    if whole.scheme.group == 0 or not _is_one_group(whole):
        return whole.scheme
    unit = UNITS[whole.scheme.name]
    return replace(whole.scheme, group=-(-width // unit) * unit)
