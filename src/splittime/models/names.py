"""The names that checkpoints give to a layer's tensors, of which an architecture's entry has its own."""

import re
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from splittime.kernels.layer import MixtureSpec, MlpSpec

NUMBER = re.compile("[0-9]{1,9}")  # of an expert, in a name of a stranger's file


@dataclass(frozen=True)
class MlpNames:
    """The linears of one MLP; gate: "" where there is none."""

    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class Stacked:
    """All experts of a layer in one tensor of each kind: gate_up [experts, 2 inner, hidden], down [experts, hidden,
    inner]; their biases are called as they are, with `_bias` behind.

    is_turned: the last two dimensions change places. alternates: rows of gate and up come in turn, else gate's first.
    """

    gate_up: str
    down: str
    is_turned: bool = False
    alternates: bool = False


@dataclass(frozen=True)
class DeltaNames:
    """The modules of a gated delta net, and of its tensors those that are no module's. by_head: `qkv` holds the gate
    too, and `strength` the decays: of each key head all that belongs to it, one kind below the other."""

    qkv: str = "linear_attn.in_proj_qkv"
    gate: str = "linear_attn.in_proj_z"
    strength: str = "linear_attn.in_proj_b"
    decay: str = "linear_attn.in_proj_a"
    conv: str = "linear_attn.conv1d"
    norm: str = "linear_attn.norm"
    output: str = "linear_attn.out_proj"
    log_decay: str = "linear_attn.A_log"
    dt_bias: str = "linear_attn.dt_bias"
    by_head: bool = False


class ExpertPlace(NamedTuple):
    """Where one expert's linear is in a stack: of its rows the first (0) or the second part (1), or all (None)."""

    stacked: Stacked
    tensor: str
    number: int
    part: int | None

    def cut(self, rows: Tensor) -> Tensor:
        """rows [2 inner, ..], or of `down` [hidden, ..], as they are stored -> those of the linear."""
        if self.part is None:
            return rows
        return rows[self.part :: 2] if self.stacked.alternates else rows.chunk(2)[self.part]


@dataclass(frozen=True)
class LayerNames:
    """What a checkpoint calls the modules of a layer, below `model.layers.N.`.

    experts: the place of one expert, by number; expert: its linears, below that place. correction: of the router, with
    these dimensions before its own. stacked: how experts are stored where each has no tensors of its own.
    rows_are_paired: the rows of queries and keys have rotary pairs as neighbours, where others have them in halves.
    norms_less_one: their scales are stored less 1. qkv, gate_up: modules that hold several projections, one below the
    other, if there are such.
    """

    input_norm: str = "input_layernorm"
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    output: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    mlp_norm: str = "post_attention_layernorm"
    norm_after_mixer: str = "post_attention_layernorm"  # where there is one: else it is the name of `mlp_norm`
    norm_after_mlp: str = "post_feedforward_layernorm"
    mlp: MlpNames = MlpNames("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    correction_dims: tuple[int, ...] = ()
    experts: str = "mlp.experts.{}."
    expert: MlpNames = MlpNames("gate_proj", "up_proj", "down_proj")
    shared: MlpNames = MlpNames(*(f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")))
    shared_gate: str = "mlp.shared_expert_gate"
    sinks: str = "self_attn.sinks"
    delta: DeltaNames = DeltaNames()
    router_scale: str = "router.scale"
    shares: str = "router.per_expert_scale"
    experts_norm: str = "pre_feedforward_layernorm_2"
    norm_after_shared: str = "post_feedforward_layernorm_1"
    norm_after_experts: str = "post_feedforward_layernorm_2"
    factor: str = ""
    stacked: Stacked | None = None
    rows_are_paired: bool = False
    norms_less_one: bool = False
    qkv: str = ""
    gate_up: str = ""

    def mlps(self, feed_forward: MlpSpec | MixtureSpec) -> tuple[MlpNames, ...]:
        """The names of the one MLP, or of each expert."""
        if isinstance(feed_forward, MlpSpec):
            return (self.mlp,)
        places = (self.experts.format(number) for number in range(feed_forward.router.num_experts))
        one = self.expert
        return tuple(MlpNames(place + one.gate, place + one.up, place + one.down) for place in places)

    def place_of(self, module: str) -> ExpertPlace | None:
        """Returns where an expert's linear is, called as if it had tensors of its own."""
        prefix, _, rest = module.partition(self.experts.partition("{}")[0])
        number, _, linear = rest.partition(".")
        part = {self.expert.gate: 0, self.expert.up: 1, self.expert.down: None}
        if self.stacked is None or not NUMBER.fullmatch(number) or linear not in part:
            return None
        tensor = self.stacked.down if linear == self.expert.down else self.stacked.gate_up
        return ExpertPlace(self.stacked, prefix + tensor, int(number), part[linear])
