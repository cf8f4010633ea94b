"""Which weight is kept in which scheme.

    quantization   layers' linear weights   values and down   head (lm_head, tied or not)   router of experts
    None           dtype                    dtype             dtype                         dtype
    int8           int8                     int8              int8                          dtype
    int4           int4, groups of 64       int8              int8                          dtype
    w8a8           int8, and activations    as layers         int8                          dtype
    fp8            e4m3, and activations    as layers         dtype                         dtype

Norms and biases are float32, the embedding as it is stored.

* int8 is turned before it is rounded where a CPU rounds activations beside it (`WeightScheme.is_turned`): in real
  models some inputs are a hundred times the others, beside which one step a row would be coarse.
* The head under int4 stays int8: its errors go straight into every logit with no later layer to average them out, and
  all logits of a step share one hidden state. OpenVINO's 4-bit exports do the same.
* Values (`v_proj`) and what leads back from a feed-forward (`down_proj`) stay int8 under int4, but on a card: this
  third of the weights, in 4 bits, costs more than half of the quality (docs/log.md; Q4_K_M has half of it in 6 bits).
* A router chooses experts by comparing probabilities that may be close, and is a thousandth of the weights:
  rounding it would cost much and save nothing.
* Embedding rows are looked up, not multiplied: rounding them would save no time, and they stay in the file's mapping.
* A weight whose columns are not a multiple of the group (or of int8's unit of 64 columns) is filled up with zeros
  inside the packed weight, which changes no result. With fewer columns than that, the padding may cost more memory than
  the rounding saves.
"""

from dataclasses import dataclass, replace

from splittime.kernels.api import WeightScheme

INT4_GROUP = 64
INTEGERS = ("int8", "int4")
QUANTIZATIONS = (*INTEGERS, "w8a8", "fp8")


@dataclass(frozen=True)
class WeightPlan:
    """The scheme of each kind of weight. finer: of values and of what leads back from a feed-forward, of any expert."""

    layers: WeightScheme
    finer: WeightScheme
    head: WeightScheme
    router: WeightScheme

    def describe(self, has_experts: bool) -> str:
        """For the user, in one line."""
        others = {"values and down": self.finer, "head": self.head} | ({"router": self.router} if has_experts else {})
        told = [f"{kind} {_name(scheme)}" for kind, scheme in others.items() if scheme != self.layers]
        return ", ".join([_name(self.layers), *told])


def choose(quantization: str | None, dtype: str, activation_dtype: str = "auto", has_finer: bool = True) -> WeightPlan:
    """quantization: None or one of `QUANTIZATIONS`; dtype: "float32" or "bfloat16", of what is not quantised;
    activation_dtype: "bfloat16" to round them to it before products with weights of bfloat16, but for the router's;
    has_finer: whether int4 leaves values and down in int8."""
    plain, int8 = WeightScheme(dtype), WeightScheme("int8", is_turned=True)
    if quantization is None:
        products = replace(plain, rounds_activations=dtype == activation_dtype == "bfloat16")
        return WeightPlan(products, products, products, plain)
    if quantization == "int8":
        return WeightPlan(int8, int8, int8, plain)
    if quantization == "w8a8":
        both = replace(int8, rounds_activations=True)
        return WeightPlan(both, both, int8, plain)
    if quantization == "fp8":
        fp8 = WeightScheme("fp8", rounds_activations=True)
        return WeightPlan(fp8, fp8, plain, plain)
    int4 = WeightScheme("int4", INT4_GROUP)
    return WeightPlan(int4, int8 if has_finer else int4, int8, plain)


def kept_bytes(out_features: int, in_features: int, scheme: WeightScheme) -> int:
    """Memory of a weight in this scheme where no backend says otherwise: integers and their scales, no padding."""
    groups = -(-in_features // scheme.group) if scheme.group else 1
    scales = 2 if scheme.group and scheme.name != "fp8" else 4  # bytes of each
    extras = 2 if scheme.has_minima else 1 if scheme.has_zeros else 0
    bytes_per_row = {
        "float32": 4 * in_features,
        "bfloat16": 2 * in_features,
        "float16": 2 * in_features,
        "fp8": in_features + scales * groups,
        "int8": in_features + (scales + extras) * groups,
        "int4": -(-in_features // 2) + (scales + extras) * groups,
    }
    return out_features * bytes_per_row[scheme.name]


def _name(scheme: WeightScheme) -> str:
    if scheme.rounds_activations:
        return f"{scheme.name} x {scheme.name}"
    return f"{scheme.name} in groups of {scheme.group}" if scheme.group else scheme.name
