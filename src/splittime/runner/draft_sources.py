"""What guesses tokens for a runner to verify: the drafter that its settings ask for, loaded, measured and warmed up.

suffix, ngram       `suffix_drafter`, from texts
draft_model, self   `draft_model` over another runner: of a smaller model, or of the model itself in fewer bits
mtp                 the same over a runner of a head (`models.head`), which reads what the model has computed
auto                suffix, where a step of the model is long enough not to feel it
"""

import time
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from splittime.core.step import Runner
from splittime.models.head import HiddenFeatures
from splittime.models.weights.head import load_head
from splittime.models.weights.load import open_source, read_config
from splittime.runner import machine, start_memory
from splittime.runner.batch import Batch
from splittime.runner.compose import load_torch_runner
from splittime.runner.draft_model import ModelDrafter
from splittime.runner.draft_steps import num_spare_blocks
from splittime.runner.drafting import DraftingRunner
from splittime.runner.execution import HostExecution
from splittime.runner.honoured import check_rounding
from splittime.runner.kv_store import KvStore
from splittime.runner.load import OnPhase, draft_bytes_per_block
from splittime.runner.speculative import (
    LEAST_LOOKUP,
    LEAST_STEP_MS,
    NONE,
    OWN_BITS,
    SpeculativeConfig,
    speculative_config,
)
from splittime.runner.suffix_drafter import SuffixDrafter
from splittime.runner.torch_runner import TorchRunner


def drafting_of(runner: TorchRunner, on_phase: OnPhase | None = None) -> Runner:
    """Returns the runner, with a drafter if its settings ask for one; a draft model or a head is loaded now, and warmed
    up. on_phase: told of that, as of the parts of `load_torch_runner`. Raises ConfigError."""
    asked = _settled(runner)
    if asked is None:
        return runner
    told = msgspec.json.encode(asked).decode()
    runner.resolved = msgspec.structs.replace(runner.resolved, speculative_config=told)
    if asked.has_model:
        begin_ns = time.monotonic_ns()
        make = head_drafter if asked.method == "mtp" else model_drafter
        drafting = DraftingRunner(runner, make(runner, asked))
        if on_phase is not None:
            on_phase("draft model", begin_ns, time.monotonic_ns())
        return drafting
    most, least = asked.num_speculative_tokens, asked.prompt_lookup_min or LEAST_LOOKUP
    return DraftingRunner(runner, SuffixDrafter(most, runner.resolved.max_model_len, least, asked.method == "suffix"))


def _settled(runner: TorchRunner) -> SpeculativeConfig | None:
    """Returns what tokens are guessed with. Where that is "auto", a decode step is timed: keeping and searching texts
    takes as long for a small model as for a large one, and may cost the small one more than a percent or two."""
    asked = speculative_config(runner.config.speculative_config)
    if asked is None or asked.method != "auto":
        return asked
    step_ms, told = start_memory.decode_step_ms(runner)
    is_long = step_ms >= LEAST_STEP_MS
    words = f"{'at least' if is_long else 'less than'} {LEAST_STEP_MS:g} ms"
    reason = f"auto: a decode step of one request takes {step_ms:.2f} ms, {words}; {told}"
    runner.resolved = msgspec.structs.replace(runner.resolved, speculative_reason=reason)
    return msgspec.structs.replace(asked, method="suffix") if is_long else None


def model_drafter(runner: TorchRunner, asked: SpeculativeConfig) -> ModelDrafter:
    """Returns what drafts for this runner by a model, which is loaded and warmed up. Raises ConfigError."""
    config, resolved = runner.config, runner.resolved
    path, most = config.draft_model_path or config.model_path, asked.num_speculative_tokens
    most_tokens = min(resolved.max_model_len, read_config(Path(path)).max_position_embeddings)
    num_blocks = resolved.num_blocks + num_spare_blocks(most, config.block_size, config.max_num_seqs)
    bytes_per_block = draft_bytes_per_block(config, runner.decoder.config, runner.store.layers[0].data.dtype)
    is_own = asked.method == "self"
    drafting = load_torch_runner(
        msgspec.structs.replace(
            config,
            model_path=path,
            quantization=asked.quantization or (OWN_BITS if is_own else None),
            load_format=config.load_format if is_own else "auto",
            activation_dtype="auto",
            kv_cache_dtype=resolved.kv_cache_dtype,
            kv_cache_memory_bytes=num_blocks * bytes_per_block,
            max_model_len=most_tokens,
            num_threads=resolved.num_threads,
            speculative_config=NONE,
            draft_model_path=None,
            enable_lora=False,
        )
    )
    drafting.warm_up()
    drafter = ModelDrafter(drafting, most, resolved.num_blocks, most_tokens)
    drafter.measure()
    return drafter


def head_drafter(runner: TorchRunner, asked: SpeculativeConfig) -> ModelDrafter:
    """Returns what drafts for this runner by a head, which is loaded and warmed up. Raises ConfigError.

    From now on the runner leaves the features of each token that it computes."""
    config, resolved, store = runner.config, runner.resolved, runner.store
    path, most = Path(config.draft_model_path or config.model_path), asked.num_speculative_tokens
    model = read_config(path)
    asked_of = msgspec.structs.replace(config, quantization=asked.quantization)
    check_rounding(asked_of, model, lambda: open_source(path, model).format)
    num_blocks = resolved.num_blocks + num_spare_blocks(most, config.block_size, config.max_num_seqs)
    features = HiddenFeatures(num_blocks, config.block_size, model.hidden_size)
    plan = machine.choose_weights(
        msgspec.structs.replace(config, quantization=asked.quantization or config.quantization),
        resolved.dtype,
        resolved.kernels,
    )
    with torch.inference_mode():
        decoder = load_head(path, model, plan, lambda: runner.decoder, features)
    shape = (num_blocks, config.block_size, store.layers[0].data.dtype, decoder.ops.device, 0)
    head = TorchRunner(
        config, decoder, KvStore(decoder.kv_groups, *shape), resolved, runner.cost, HostExecution(decoder.ops)
    )
    runner.on_hidden = lambda batch, hidden: _leave(features, batch, runner.decoder.normed(hidden), slice(None))
    head.on_hidden = lambda batch, hidden: _leave_drafts(features, batch, decoder.normed(hidden))
    head.warm_up()
    drafter = ModelDrafter(head, most, resolved.num_blocks, resolved.max_model_len, features=features)
    drafter.measure()
    return drafter


def _leave_drafts(features: HiddenFeatures, batch: Batch, states: Tensor) -> None:
    """Leave the head's own features of the last token of each row that gives a draft: the model has not computed it. Of
    texts the model's remain."""
    ends = [batch.attention.query_begins[index + 1] - 1 for index, row in enumerate(batch.rows) if row.num_samples]
    if ends:
        _leave(features, batch, states, torch.tensor(ends))


def _leave(features: HiddenFeatures, batch: Batch, states: Tensor, which: Tensor | slice) -> None:
    attention = batch.attention
    features.write(attention.token_blocks[which], attention.token_offsets[which], states[which])
