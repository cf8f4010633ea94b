"""Decisions that depend on the machine: kernels, dtypes, threads, folders, how much memory the KV cache gets.
Each comes with its reason.

Measured for torch on two cores without bfloat16 instructions (Zen 3): a bfloat16 product of 32 rows with a 3072 x 2048
weight runs at 20 GFLOP/s, float32 at 110; so "auto" takes bfloat16 there only where the CPU has instructions for it.

There, with a 4 M-parameter model and a busy neighbour, a decode step of 32 rows took 20 to 31 ms on one thread, 160 to
370 on two: a thread that spins for another which the system has put aside loses whole time slices. (45 ms on two with
OMP_WAIT_POLICY=passive in the environment before torch is imported.)
"""

import logging
import os
import platform
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import torch

from splittime.core.errors import ConfigError
from splittime.core.facts import Machine
from splittime.core.step import SPARE_STATES
from splittime.core.this_process import affinity, cache_folder, free_memory_bytes, num_cores, quota_cores
from splittime.kernels.api import Ops
from splittime.kernels.native.check import PAIRS, TILES, choose_isa
from splittime.kernels.native.library import LibraryMissing, library
from splittime.models.config import ModelConfig
from splittime.models.encoder_config import EncoderConfig
from splittime.models.quant.plan import WeightPlan, choose
from splittime.runner.config import RunnerConfig, speculative_config

log = logging.getLogger("splittime.runner")

CPUS = Path("/sys/devices/system/cpu")
SMALL_MODEL_BYTES = 128 << 20
MOST_BLOCKS = 1 << 20  # of a card's cache, beyond what all requests can fill: each is some host memory and start time
FREE_MEMORY_SHARE = 0.5
AMD = "AuthenticAMD"  # whose vdpbf16ps has the rate of a float32 multiply-add, and does two; Intel's has half of it


def multiplies_bfloat16() -> bool:
    """Returns whether this CPU has instructions for bfloat16 products (AVX512-BF16 or AMX), not merely an emulation."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, name, bool)()) for name in checks)


def choose_kernels(asked: str) -> tuple[str, str]:
    """The backend and why: with "auto", a card's if there is one, or native kernels if they can be loaded. To ask for
    them by name is to insist."""
    if asked != "auto":
        return asked, "as asked"
    if torch.cuda.is_available() and find_spec("triton") is not None:
        return "triton", f"there is a card, {torch.cuda.get_device_name()}"
    try:
        library()
    except LibraryMissing as error:
        log.warning("no native kernels, computing with torch, which is slower: %s", error)
        return "torch", f"{error}"
    return "native", "they could be loaded"


def choose_dtype(asked: str, checkpoint_dtype: str, kernels: str) -> tuple[torch.dtype, str]:
    """The dtype of what is not quantised (and for all but the native kernels, of the arithmetic), and why.

    Native kernels multiply bfloat16 weights exactly, so a bfloat16 checkpoint stays as it is on any CPU: the same
    results from half of float32's bytes. A float16 checkpoint becomes float32: bfloat16 would drop 3 of its 11 bits of
    mantissa, up to 0.4 % of each weight, which nobody asked for; `--dtype bfloat16` does.
    """
    if asked != "auto":
        return getattr(torch, asked), "as asked"
    if checkpoint_dtype == "float32":
        return torch.float32, "the checkpoint is float32"
    if kernels == "triton":
        return getattr(torch, checkpoint_dtype), f"the checkpoint is {checkpoint_dtype}"
    if kernels == "native":
        if checkpoint_dtype == "bfloat16":
            return torch.bfloat16, "the checkpoint is bfloat16"
        return torch.float32, f"the checkpoint is {checkpoint_dtype}, which bfloat16 cannot hold"
    if multiplies_bfloat16():
        return torch.bfloat16, f"the checkpoint is {checkpoint_dtype} and the CPU multiplies bfloat16"
    return torch.float32, f"the CPU has no bfloat16 instructions (checkpoint is {checkpoint_dtype})"


def choose_weights(config: RunnerConfig, dtype: str, kernels: str) -> WeightPlan:
    """Each kind's scheme. A scheme rounds activations to bfloat16 with native kernels only: others compute in dtype."""
    rounding = choose_rounding(config, dtype, kernels)[0]
    return choose(config.quantization, dtype, rounding, has_finer=kernels != "triton")


def choose_rounding(config: RunnerConfig, dtype: str, kernels: str) -> tuple[str, str]:
    """The dtype that activations are rounded to before products with bfloat16 weights, and why (ADR 17)."""
    if kernels != "native":
        return "auto", f"the {kernels} kernels compute in their own dtype"
    if config.activation_dtype != "auto":
        return config.activation_dtype, "as asked"
    if dtype != "bfloat16" or config.quantization is not None:
        return "auto", "as the scheme of each weight has it"
    if config.tensor_parallel_size > 1:
        return "float32", "each rank chooses its instruction set by itself, and two could disagree"
    isa = choose_isa()[0]
    if isa == TILES:
        return "bfloat16", "tiles of AMX, which are much faster, multiply bfloat16 by bfloat16 alone"
    if isa == PAIRS and of_processor("vendor_id") == AMD:
        return "bfloat16", "this processor multiplies bfloat16 by bfloat16 at twice the rate of float32"
    return "float32", "with this processor and these instructions it is not known to be faster"


def choose_kv_cache_dtype(asked: str, dtype: torch.dtype, kernels: str) -> torch.dtype:
    """Raises `ConfigError` for what these kernels cannot attend to: native ones to all but fp8, others to dtype or
    int8, those of a card to fp8 too."""
    if asked == "auto":
        return dtype
    own = str(dtype).removeprefix("torch.")
    allowed = ("float32", "bfloat16", "int8") if kernels == "native" else (own, "int8")
    if kernels == "triton":
        allowed = (*allowed, "fp8")
    if asked not in allowed:
        message = (
            f"kv_cache_dtype is {asked!r}; with dtype {own} and {kernels} kernels it is one of {', '.join(allowed)}"
        )
        raise ConfigError(message, param="kv_cache_dtype", value=asked, limit=["auto", *allowed])
    return torch.float8_e4m3fn if asked == "fp8" else getattr(torch, asked)


def packed_cache_folder(setting: str) -> Path | None:
    """Returns where packed weights are kept; None for nowhere: as asked, or because this user has no home.

    Raises `ConfigError` for a path that cannot be a folder.
    """
    if setting == "off":
        return None
    if setting == "auto":
        home = cache_folder()
        return None if home is None else home / "packed"
    try:
        folder = Path(setting).expanduser()
        is_usable = "\0" not in setting and (folder.is_dir() or not folder.exists())
    except (OSError, RuntimeError, ValueError):
        is_usable = False
    if not is_usable:
        raise ConfigError(f"packed_cache is {setting!r}, which is no folder", param="packed_cache", value=setting)
    return folder.absolute()


def kernels_build(ops: Ops) -> list[object]:
    """Returns which build of the kernels: another one may be faster."""
    if ops.name != "native":
        return [torch.__version__]
    status = os.stat(library()._name)
    return [status.st_size, status.st_mtime_ns]


def cpu_name() -> str:
    """As the system calls the processor."""
    return of_processor("model name") or platform.processor() or platform.machine()


def of_processor(key: str) -> str:
    """Returns what /proc/cpuinfo says of the first core, "" if nothing."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(key):
                return line.partition(":")[2].strip()
    return ""


def without_ceilings(threads: int) -> Machine:
    """Returns this machine as far as it is known without measuring."""
    return Machine(
        cpu=cpu_name(), cores=num_cores(), quota=quota_cores(), threads=threads, cache_bytes=cache_bytes(threads)
    )


class Others:
    """What others do on the cores that this process needs, from when this is made."""

    def __init__(self) -> None:
        self._begin = self._now()

    def busy_cores(self) -> float:
        """Returns how many of them others, or the hypervisor, have kept busy, beyond those that this process leaves
        free; 0 where the system does not tell. The system counts in hundredths of a second: two of them are not
        told."""
        (begin_s, begin_busy_s), (end_s, end_busy_s) = self._begin, self._now()
        free = len(affinity()) - num_cores()
        busy_s = end_busy_s - begin_busy_s - 2 / os.sysconf("SC_CLK_TCK")
        return max(0.0, busy_s / max(1e-9, end_s - begin_s) - free)

    def _now(self) -> tuple[float, float]:
        """The time, and how long the cores have been busy with others, in s."""
        ticks, wanted = 0, {f"cpu{core}" for core in affinity()}
        with suppress(OSError, ValueError):
            for line in Path("/proc/stat").read_text().splitlines():
                name, *fields = line.split()
                if name in wanted:
                    user, nice, system, _, _, irq, softirq, stolen = map(int, fields[:8])
                    ticks += user + nice + system + irq + softirq + stolen
        return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


def cache_bytes(threads: int) -> int | None:
    """The last-level caches that so many threads of this process can use together; None where the system tells none."""
    found = {}  # size by (level, the cores that share it)
    for core in affinity():
        for folder in CPUS.glob(f"cpu{core}/cache/index*"):
            with suppress(OSError, ValueError):
                level, shared, size = (
                    (folder / name).read_text().strip() for name in ("level", "shared_cpu_list", "size")
                )
                found[int(level), shared] = int(size.removesuffix("K")) << 10
    last = max((level for level, _ in found), default=None)
    sizes = sorted((size for (level, _), size in found.items() if level == last), reverse=True)
    return sum(sizes[:threads]) or None


def choose_num_threads(asked: int | None, weights_bytes: int) -> tuple[int, str]:
    """Threads for torch, and why. A small model's products gain less from a second thread than waiting for it costs."""
    if asked is not None:
        return asked, "as asked"
    if weights_bytes <= SMALL_MODEL_BYTES:
        return 1, f"weights are {weights_bytes >> 20} MiB, at most {SMALL_MODEL_BYTES >> 20}: one thread, not measured"
    return num_cores(), "one for each core"


def choose_max_model_len(config: RunnerConfig, model: ModelConfig | EncoderConfig) -> int:
    """Raises `ConfigError` when more is asked than the checkpoint was made for."""
    asked = config.max_model_len
    if asked is not None and asked > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {asked}, above the checkpoint's max_position_embeddings {model.max_position_embeddings}",
            param="max_model_len",
            value=asked,
            limit=model.max_position_embeddings,
        )
    return asked or model.max_position_embeddings


def memory_bytes() -> int:
    """Returns what the machine has: a bound that holds; what is free is none, since the page cache gives way."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _refuse_beyond(total_bytes: int, asked_bytes: int) -> None:
    if asked_bytes > total_bytes:
        raise ConfigError(
            f"kv_cache_memory_bytes is {asked_bytes}, more than the machine's memory, {total_bytes} bytes",
            param="kv_cache_memory_bytes",
            value=asked_bytes,
            limit=total_bytes,
        )


def _kept_bytes(config: RunnerConfig, free_bytes: int) -> int:
    """Returns what past answers may come to take."""
    drafts = speculative_config(config.speculative_config)
    kept_bytes = 0 if drafts is None else drafts.memory_bytes
    if drafts is not None and drafts.method == "auto":  # nobody has asked for it: it takes no model's last memory
        kept_bytes = min(kept_bytes, free_bytes // 4)
    return kept_bytes


STATES_SHARE = 4  # one in so many bytes of the cache's may go to states; more only if the requests' own need it
CHECKPOINTS = 16  # for each request that runs, if there is room


def choose_num_state_slots(config: RunnerConfig, state_bytes: int) -> int:
    """Returns how many states are kept, of a model whose layers keep some: one for each request that runs, and
    checkpoints within a share of the cache's memory. Raises `ConfigError` where the first leave no room for blocks."""
    budget = config.kv_cache_memory_bytes or _free_budget(config, 0)
    least = config.max_num_seqs + SPARE_STATES
    if 2 * least * state_bytes > budget:
        message = f"states of max_num_seqs={config.max_num_seqs} requests and {SPARE_STATES} checkpoints, {state_bytes}"
        raise ConfigError(
            f"{message} bytes each, take more than half of the cache's {budget} bytes",
            param="max_num_seqs",
            value=config.max_num_seqs,
            limit=(most := max(1, budget // (2 * state_bytes) - SPARE_STATES)),
            hint=f"--max-num-seqs {most}, or a larger --kv-cache-memory-bytes",
        )
    return max(least, min(least + CHECKPOINTS * config.max_num_seqs, budget // STATES_SHARE // state_bytes))


def _free_budget(config: RunnerConfig, step_bytes: int) -> int:
    free_bytes = free_memory_bytes()
    kept_bytes = _kept_bytes(config, free_bytes) + step_bytes
    return int(max(0, free_bytes - kept_bytes) // config.tensor_parallel_size * FREE_MEMORY_SHARE)


def choose_num_blocks(
    config: RunnerConfig,
    max_model_len: int,
    bytes_per_block: int,
    room: tuple[int, str] | None = None,
    step_bytes: int = 0,
    states_bytes: int = 0,
) -> tuple[int, str]:
    """Blocks of KV cache, and why. room: bytes of a card that it may take, and which those are. step_bytes: of the
    machine's memory, what a step may come to take. states_bytes: of the cache's, what states take. Raises `ConfigError`
    when one full context does not fit."""
    blocks_per_context = -(-max_model_len // config.block_size)
    wanted = config.max_num_seqs * blocks_per_context
    if config.kv_cache_memory_bytes is not None:
        _refuse_beyond(memory_bytes(), config.kv_cache_memory_bytes)
        budget, reason = max(0, config.kv_cache_memory_bytes - states_bytes), "kv_cache_memory_bytes"
        num_blocks = budget // bytes_per_block
    elif room is not None:
        budget, reason = room
        num_blocks = budget // bytes_per_block
        most = max(wanted, MOST_BLOCKS)
        if num_blocks > most:
            num_blocks, reason = most, f"no more than {most} blocks for so small a model, of {reason}"
    else:
        budget = max(0, _free_budget(config, step_bytes) - states_bytes)
        num_blocks = min(wanted, budget // bytes_per_block)
        reason = f"max_num_seqs={config.max_num_seqs} full contexts"
        if num_blocks < wanted:
            reason = f"{FREE_MEMORY_SHARE:.0%} of {budget / FREE_MEMORY_SHARE / 2**30:.1f} GiB free memory"
    if num_blocks < blocks_per_context:
        raise ConfigError(
            f"a KV cache of {budget} bytes holds {num_blocks} blocks; one context of max_model_len {max_model_len} "
            f"needs {blocks_per_context} blocks, {blocks_per_context * bytes_per_block} bytes",
            param="kv_cache_memory_bytes",
            value=budget,
            limit=blocks_per_context * bytes_per_block,
            hint="lower max_model_len",
        )
    return num_blocks, reason
