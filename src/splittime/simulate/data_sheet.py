"""A server that nobody has measured: what its maker's data sheet says of the device, and the model's own sizes.

    decode floor          weight bytes / bandwidth                               every step reads all weights once
    a KV position         2 x layers x KV heads x head dimension x bytes         read at the same bandwidth
    a token               operations of its products / dense rate
    a pair of positions   4 x layers x heads x head dimension operations / rate
    blocks                (memory x MEMORY_SHARE - RESERVE_BYTES - weights) / (block size x KV bytes per token)

A step takes the larger of what its bytes take and what its operations take (`CostModel.compute`), and what it costs to
begin one. A line through both would be up to twice as slow where they are equal: 300 rows of an H100 in bfloat16.

No device attains what its sheet says. `BANDWIDTH_SHARE`, `RATE_SHARE` and `STEP_NS` state, as 90 % intervals, what
good kernels attain; they are the model's covariance, so what is planned with it has wide intervals. Left out: texts and
network before and behind the engine, and sliding windows (each position counts as in a layer without one). A mixture's
step reads the experts that its tokens are expected to choose (`simulate.cost.Basis`).
"""

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from splittime.core.errors import ConfigError
from splittime.core.facts import TokenCost
from splittime.scheduler.admission import QueueLimits
from splittime.scheduler.config import SchedulerConfig
from splittime.simulate.cost import HOST_PARTS, LIMITED, CostModel, Errors, basis_of, operations_of
from splittime.simulate.replica import UNBOUNDED, Replica

Coefficients = NDArray[np.float64]
BANDWIDTH_SHARE = (0.55, 0.85)
RATE_SHARE = (0.35, 0.65)
STEP_NS = (0.1e6, 1.0e6)  # launches and the host's own work, of any model
MEMORY_SHARE = 0.9  # of the device, as --gpu-memory-utilization
RESERVE_BYTES = 2 * 10**9  # the largest step's activations, and the runtime
DEVIATIONS = 1.645  # from the middle of a normal distribution to the end of its 90 % interval
ARITHMETIC = {"int8": "bfloat16", "int4": "bfloat16", "w8a8": "int8", "float16": "bfloat16"}
"""Precision of weights -> what is multiplied. Weights alone in 8 or 4 bits are widened first."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """memory_bytes: makers' gigabytes are 10^9 here. operations_per_s: dense, without the sparsity that sheets count
    twice, by the numbers that are multiplied; a multiplication and its addition are two. sheet: where this is from."""

    name: str
    memory_bytes: int
    read_bytes_per_s: float
    operations_per_s: dict[str, float]
    sheet: str

    def rate(self, precision: str) -> float:
        """Returns operations a second with weights in this precision. 8-bit floats are widened where the device does
        not multiply them. Raises ConfigError where the sheet does not say."""
        numbers = ARITHMETIC.get(precision, precision)
        fallback = {"fp8": "bfloat16"}.get(numbers, numbers)
        found = self.operations_per_s.get(numbers, self.operations_per_s.get(fallback))
        if found is None:
            hint = f"It says: {', '.join(self.operations_per_s)}."
            message = f"the data sheet of {self.name} does not say what it does with {precision}"
            raise ConfigError(message, param="precision", value=precision, hint=hint)
        return found


def _card(name: str, gigabytes: int, gb_per_s: int, sheet: str, tera: dict[str, float]) -> Device:
    rates = {numbers: value * 1e12 for numbers, value in tera.items()}
    return Device(
        name=name, memory_bytes=gigabytes * 10**9, read_bytes_per_s=gb_per_s * 1e9, operations_per_s=rates, sheet=sheet
    )


_AMPERE = ("NVIDIA A100 Tensor Core GPU data sheet, 2021, SXM", {"bfloat16": 312.0, "int8": 624.0, "float32": 19.5})
_HOPPER = {"bfloat16": 989.5, "fp8": 1979.0, "int8": 1979.0, "float32": 67.0}
_BLACKWELL = {"bfloat16": 2250.0, "fp8": 4500.0, "int8": 4500.0}
_ADA = {"bfloat16": 362.0, "fp8": 733.0, "int8": 733.0, "float32": 91.6}
_CDNA3 = {"bfloat16": 1307.4, "fp8": 2614.9, "int8": 2614.9, "float32": 163.4}
_CARDS = (
    _card("A100-40GB", 40, 1555, *_AMPERE),
    _card("A100-80GB", 80, 2039, *_AMPERE),
    _card("H100", 80, 3350, "NVIDIA H100 Tensor Core GPU data sheet, 2023, SXM", _HOPPER),
    _card("H200", 141, 4800, "NVIDIA H200 Tensor Core GPU data sheet, 2024, SXM", _HOPPER),
    _card("B200", 180, 8000, "NVIDIA DGX B200 data sheet, 2024, an eighth of it", _BLACKWELL),
    _card("L40S", 48, 864, "NVIDIA L40S data sheet, 2023", _ADA),
    _card("MI300X", 192, 5300, "AMD Instinct MI300X data sheet, 2023", _CDNA3),
)
DEVICES: dict[str, Device] = {card.name: card for card in _CARDS}


def device_named(name: str) -> Device:
    """Returns the device of this name, in whichever case, or of these figures (`stated_device`). Raises ConfigError for
    one whose sheet is not known."""
    if ":" in name:
        return stated_device(name)
    found = {known.lower(): device for known, device in DEVICES.items()}.get(name.lower())
    if found is None:
        hint = f"Known: {', '.join(DEVICES)}; another: NAME:GB:GB/S:TFLOPS; this machine: cpu."
        raise ConfigError(f"no data sheet of {name!r} is known", param="device", value=name, hint=hint)
    return found


def stated_device(text: str) -> Device:
    """Returns the device of `NAME:GB:GB/S:TFLOPS`, as a processor that no sheet here has. Raises ConfigError."""
    name, *figures = text.split(":")
    try:
        gigabytes, gb_per_s, tera = map(float, figures)
    except ValueError:
        gigabytes = gb_per_s = tera = 0.0
    if not name or not all(math.isfinite(one) and one > 0 for one in (gigabytes, gb_per_s, tera)):
        hint = "Its memory, what it reads a second, and its dense rate: epyc:256:300:4 has 256 GB, 300 GB/s, 4 TFLOPS."
        raise ConfigError(f"{text!r} is not NAME:GB:GB/S:TFLOPS", param="device", value=text, hint=hint)
    return processor(name, round(gigabytes * 1e9), gb_per_s * 1e9, tera * 1e12, "figures given by the user")


def processor(name: str, memory_bytes: int, read_bytes_per_s: float, operations_per_s: float, sheet: str) -> Device:
    """Returns a processor of these figures, of the same rate in every precision."""
    rates = dict.fromkeys(("float32", "bfloat16", "int8"), operations_per_s)
    return Device(
        name=name, memory_bytes=memory_bytes, read_bytes_per_s=read_bytes_per_s, operations_per_s=rates, sheet=sheet
    )


def replica_of_data_sheet(
    device: str | Device,
    cost: TokenCost,
    settings: SchedulerConfig | None = None,
    *,
    precision: str = "bfloat16",
    weights_bytes: int | None = None,
    num_blocks: int | None = None,
) -> Replica:
    """Returns one server of this model on one device.

    settings: its number of blocks is not heeded; None: the server's defaults. precision: of the weights. weights_bytes:
    of memory, None: what a step reads, which leaves out the embedding. num_blocks: None: what the memory holds. Raises
    ConfigError for a model that does not fit.
    """
    device = device_named(device) if isinstance(device, str) else device
    config = settings or SchedulerConfig()
    read_bytes = cost.weight_bytes + cost.idle_expert_bytes
    if num_blocks is None:
        num_blocks = blocks_within(device, cost, max(read_bytes, weights_bytes or 0), config)
    config = msgspec.structs.replace(config, num_blocks=num_blocks).validate()
    return Replica(
        config=config,
        limits=QueueLimits(UNBOUNDED, UNBOUNDED),
        costs=sheet_costs(device, cost, precision),
        settings={"device": device.name, "precision": precision, **msgspec.to_builtins(config)},
        source=f"a data sheet, nothing measured ({device.sheet})",
    )


def blocks_within(device: Device, cost: TokenCost, weights_bytes: int, config: SchedulerConfig) -> int:
    """Returns how many blocks of the KV cache fit beside the weights. Raises ConfigError if there is no room for one
    context."""
    room = round(device.memory_bytes * MEMORY_SHARE) - RESERVE_BYTES - weights_bytes
    blocks = room // (config.block_size * cost.kv_bytes_per_token)
    if blocks * config.block_size < config.max_model_len:
        needed = weights_bytes + config.max_model_len * cost.kv_bytes_per_token
        message = (
            f"weights of {weights_bytes / 1e9:.1f} GB and one context of {config.max_model_len} tokens need "
            f"{needed / 1e9:.1f} GB; {device.name} has {(room + weights_bytes) / 1e9:.1f} GB for them"
        )
        hint = "A server is one device here: take a larger one, or weights of fewer bits."
        raise ConfigError(message, param="device", value=device.name, limit=room + weights_bytes, hint=hint)
    return blocks


def sheet_costs(device: Device, cost: TokenCost, precision: str) -> CostModel:
    """Returns what steps take, by the formulae above."""
    byte_ns, byte_spread = _middle(1e9 / device.read_bytes_per_s, BANDWIDTH_SHARE)
    operation_ns, operation_spread = _middle(1e9 / device.rate(precision), RATE_SHARE)
    memory = byte_ns * _bytes_of(cost)
    compute = operation_ns * operations_of(cost)
    begin = np.zeros(len(memory))
    begin[0] = 1.0
    step_ns, step_deviation = sum(STEP_NS) / 2, (STEP_NS[1] - STEP_NS[0]) / 2 / DEVIATIONS
    pushes = np.stack(
        [
            np.concatenate([memory * byte_spread, 0 * compute]),
            np.concatenate([0 * memory, compute * operation_spread]),
            np.concatenate([begin, begin]) * step_deviation,
        ]
    )
    return CostModel(
        device=tuple((memory + step_ns * begin).tolist()),
        compute=tuple((compute + step_ns * begin).tolist()),
        basis=basis_of((), cost),
        covariance=tuple(map(tuple, (pushes.T @ pushes).tolist())),
        host=((0.0, 0.0, 0.0),) * len(HOST_PARTS),
        move_ns=0.0,
        buckets={},
        most=(UNBOUNDED,) * len(LIMITED),  # a formula holds for all steps
        persistence=0.0,
        errors=Errors(median_relative=DEVIATIONS * max(byte_spread, operation_spread), mean_relative=0.0, drift=0.0),
        num_steps=0,
        about={"device": device.name, "precision": precision, "sheet": device.sheet},
    )


def _middle(at_best: float, share: tuple[float, float]) -> tuple[float, float]:
    """Returns a time where this share of the best is attained, and its relative standard deviation."""
    most, least = at_best / share[0], at_best / share[1]
    middle = (most + least) / 2
    return middle, (most - least) / 2 / DEVIATIONS / middle


def _bytes_of(cost: TokenCost) -> Coefficients:
    """Returns the bytes that each term of `simulate.cost.Basis` reads or writes."""
    experts = [cost.idle_expert_bytes] if cost.num_experts else []
    return np.array([cost.weight_bytes, 0, 0, 0, cost.kv_bytes_per_token, 0, *experts], float)
