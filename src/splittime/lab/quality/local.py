"""A model in this process as `splittime quality` sees it: the serving runner, its plans, its paged KV cache.

Texts go through `TorchRunner.run` like a server's prompts: in chunks, each of which attends to what earlier ones left
in the cache, then, where asked for, token by token like a generation. `runner.on_hidden` hands out the hidden states,
`decoder.logits` makes the logits of all positions from them, a piece at a time. What the kernels read meanwhile is
counted (`Ops.bytes_read`), apart from what another model in this process reads.

What a model claims to keep in fewer bits, for `splittime quality`: read from its files' headers, from their config,
and from what was asked, beside what the loader says that it made of them.

A claim must be borne out by the kernels' counters (`quality.run`). Were it the loader's alone, a loader that fell
back to floats would claim nothing, and nothing would be missed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splittime.assemble.model_source import load_tokenizer
from splittime.core.errors import ConfigError, EngineError
from splittime.core.sampling import SamplingParams
from splittime.core.step import Admitted, Row, StepPlan
from splittime.drive.crank import EngineParts
from splittime.engine.engine import Engine
from splittime.kernels.layer import MixtureSpec
from splittime.lab.quality.model import Dense, Reads, chunks, log_softmax, pieces
from splittime.models.architectures import layer_names
from splittime.models.weights.checkpoint import Checkpoint
from splittime.models.weights.formats import read as formats
from splittime.runner.batch import Batch
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig
from splittime.runner.torch_runner import TorchRunner
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler
from splittime.text.output import token_text
from splittime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from splittime.models.config import ModelConfig
    from splittime.runner.config import Resolved

SHOWN = ("dtype", "weights", "kv_cache_dtype", "kernels", "linear_backend", "attention_backend", "max_model_len")
REQUEST = "quality"
EIGHT_BITS_OR_FEWER, SMALL_CACHES = ("int4", "int8", "fp8"), ("int8", "float8_e4m3fn")
WIDER = {"weights.int4": "int8", "weights.fp8": "float32"}
"""What some kernels keep a stored weight in, exactly, which has no more of the claim: `formats.stored`, `packing`."""


class LocalModel:
    """`quality.model.Model` over a runner."""

    has_decode = True

    def __init__(self, name: str, runner: TorchRunner, tokenizer: Tokenizer) -> None:
        self.name, self.runner, self.tokenizer = name, runner, tokenizer
        resolved = runner.resolved
        self.vocab_size = resolved.vocab_size
        self.max_tokens = min(resolved.max_model_len, resolved.num_blocks * resolved.block_size)
        self.stored = stored(Path(resolved.model_path), runner.decoder.config)
        in_file = {} if self.stored is None else {"stored": self.stored.describe()}
        self.facts: Mapping[str, object] = {each: getattr(resolved, each) for each in SHOWN} | in_file
        self.reads = Reads(claims=claims(self.stored, resolved))
        self._hidden: Tensor | None = None

    @staticmethod
    def load(name: str, config: RunnerConfig) -> "LocalModel":
        """Raises `ConfigError` for what cannot be honoured."""
        return LocalModel(name, load_torch_runner(config), load_tokenizer(Path(config.model_path)))

    def predictions(self, token_ids: Sequence[int], begin: int, decode_tokens: int) -> Iterator[Dense]:
        num_fed = len(token_ids) - 1
        self._admit(token_ids[:num_fed], min(decode_tokens, num_fed - 1), room=num_fed)
        try:
            for start, end in chunks(num_fed, decode_tokens):
                hidden = self._step(start, token_ids[start:end])
                for first, last in pieces((start, end), begin):
                    yield Dense(first, log_softmax(self._logits(hidden[first - start : last - start])))
        finally:
            self._release()

    def continuations(self, prompt: Sequence[int], endings: Sequence[Sequence[int]]) -> list[float]:
        """The prompt is computed once; each ending is then written over the last in the cache."""
        longest = max(len(ending) for ending in endings)
        self._admit([*prompt, *max(endings, key=len)], 0, room=len(prompt) + longest)
        try:
            for start, end in chunks(len(prompt), 0):
                hidden = self._step(start, prompt[start:end])
            last = hidden[-1:].clone()
            return [self._ending(len(prompt), last, ending) for ending in endings]
        finally:
            self._release()

    def generate(
        self, prompts: Sequence[str], max_tokens: int, stop: Sequence[str], tell: Callable[[int], None]
    ) -> list[str]:
        """By the scheduler and loop of the server, over the same runner."""
        from splittime.llm import LLM

        llm = LLM.from_parts(self._engine(), self.tokenizer, self.runner.resolved.eos_token_ids)
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop=tuple(stop))
        texts = []
        before = self.runner.decoder.ops.bytes_read()
        at_once = self.runner.resolved.max_num_seqs
        for begin in range(0, len(prompts), at_once):
            for output in llm.generate(list(prompts[begin : begin + at_once]), sampling):
                if output.error is not None:
                    raise EngineError(f"{self.name}: {output.error.message}", hint=output.error.hint)
                texts.append(output.text)
                tell(len(texts))
        self._count(before)
        return texts

    # ---- steps

    def _admit(self, token_ids: Sequence[int], num_outputs: int, room: int) -> None:
        blocks = tuple(range(-(-room // self.runner.resolved.block_size)))
        newcomer = Admitted(REQUEST, tuple(token_ids), num_outputs, SamplingParams(temperature=0.0, seed=0), ())
        self.runner.run(StepPlan(0, (), (newcomer,)))
        self._new_blocks = blocks

    def _release(self) -> None:
        self.runner.run(StepPlan(0, (), released=(REQUEST,)))

    def _step(self, start: int, token_ids: Sequence[int]) -> Tensor:
        """[n, hidden] after these tokens. Valid until the next step."""
        row = Row(REQUEST, start, tuple(token_ids), self._new_blocks, 0)
        self._new_blocks = ()
        before = self.runner.decoder.ops.bytes_read()
        self.runner.on_hidden = self._keep
        try:
            result = self.runner.run(StepPlan(0, (row,))).rows[0]
        finally:
            self.runner.on_hidden = None
        if result.error is not None or self._hidden is None:
            raise EngineError(f"{self.name}: {result.error}", value=start)
        self._count(before)
        cost = self.runner.cost
        whole_bytes = cost.weight_bytes - cost.head_bytes
        self.reads.weights_least += whole_bytes if self.stored is None else self.stored.step_bytes
        seen = start if cost.window_tokens is None else min(start, cost.window_tokens)
        share = cost.windowed_share
        self.reads.kv_least += int(cost.kv_bytes_per_token * (share * seen + (1 - share) * start))
        return self._hidden

    def _keep(self, batch: Batch, hidden: Tensor) -> None:
        self._hidden = hidden

    def _logits(self, hidden: Tensor) -> NDArray[np.float32]:
        before = self.runner.decoder.ops.bytes_read()
        with torch.inference_mode():
            logits = self.runner.decoder.logits(hidden.contiguous()).cpu().numpy()
        self._count(before)
        return logits

    def _ending(self, at: int, last: Tensor, ending: Sequence[int]) -> float:
        """The log-probability of `ending` at position `at`, after a prompt whose last hidden state is `last`."""
        states = [last]
        for begin, end in chunks(len(ending) - 1, 0) if len(ending) > 1 else ():
            states.append(self._step(at + begin, ending[begin:end]).clone())
        logprobs = log_softmax(self._logits(torch.cat(states)))
        return float(logprobs[np.arange(len(ending)), list(ending)].sum())

    def _count(self, before: Mapping[str, int]) -> None:
        for name, total in self.runner.decoder.ops.bytes_read().items():
            self.reads.read[name] = self.reads.read.get(name, 0) + total - before.get(name, 0)

    def _engine(self) -> EngineParts:
        resolved = self.runner.resolved
        config = SchedulerConfig(
            max_num_seqs=resolved.max_num_seqs,
            max_num_batched_tokens=resolved.max_num_batched_tokens,
            max_model_len=resolved.max_model_len,
            block_size=resolved.block_size,
            num_blocks=resolved.num_blocks,
        )
        return EngineParts(Engine(Scheduler(config)), self.runner)


def rounded_base(
    base: LocalModel, config: RunnerConfig, candidate: LocalModel, asked: RunnerConfig
) -> Callable[[], LocalModel] | None:
    """Loads the base with the candidate's claims, rounded to nearest: what the `Gate` takes for usual. config, asked:
    what they were loaded with. None where that is the candidate itself, or the base has no floats to round."""
    claimed = [name for name in EIGHT_BITS_OR_FEWER if f"weights.{name}" in candidate.reads.claims]
    has_floats = base.stored is None and not any(claim.startswith("weights.") for claim in base.reads.claims)
    if asked.quantization is not None or not claimed or not has_floats:
        return None
    changes = {"quantization": claimed[0], "kv_cache_dtype": asked.kv_cache_dtype, "packed_cache": "off"}
    usual = msgspec.structs.replace(config, **changes)
    return lambda: LocalModel("rounded", load_torch_runner(usual), base.tokenizer)


class ServerSpelling:
    """`quality.server.Vocabulary`: tokens as this project's server (and OpenAI's API) spells them in `top_logprobs`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.vocab_size = tokenizer, tokenizer.vocab_size

    def text(self, token_id: int) -> str:
        return token_text(self._tokenizer, token_id)


PROBE = "def f(x): return {'a': 1_000}  # naïve café, 東京 42\n\tThe end."


def same_tokens(tokenizers: Sequence[Tokenizer], texts: Iterable[str] = ()) -> None:
    """Raise `ConfigError` where two models would read one text as different ids: by their vocabularies, by their
    merges, and by the texts that are to be read."""
    for other in tokenizers[1:]:
        said = _difference(tokenizers[0], other, texts)
        if said:
            message = f"base and candidate have different tokenizers ({said}): predictions cannot be compared"
            raise ConfigError(message, param="candidate", hint="both must be forms of one model")


def _difference(one: Tokenizer, other: Tokenizer, texts: Iterable[str]) -> str:
    """In words; "" for none. One vocabulary may end before the other: some files pad it."""
    shared = range(min(one.vocab_size, other.vocab_size))
    ids = [number for number in shared if one.id_to_token(number) != other.id_to_token(number)]
    if ids:
        first, second = one.id_to_token(ids[0]), other.id_to_token(ids[0])
        return f"{len(ids)} ids of their vocabularies; id {ids[0]} is {first!r} and {second!r}"
    if one.merges is not None and other.merges is not None and one.merges != other.merges:
        return "their merges"
    for text in (PROBE, *texts):
        if one.encode(text) != other.encode(text):
            return f"a text that begins with {text[:40]!r} becomes other ids"
    return ""


@dataclass(frozen=True)
class Stored:
    """What the headers say of the layers' linear weights. step_bytes: the integers (or e4m3) that a token needs."""

    claim: str
    method: str
    bits: int
    modules: int
    floats: int
    step_bytes: int

    def describe(self) -> str:
        """For the report."""
        told = f"{self.method}, {self.bits} bits: {self.modules} of {self.modules + self.floats} linear weights"
        return f"{told} of the layers"


def stored(path: Path, config: "ModelConfig") -> Stored | None:
    """None for what has no `quantization_config`: floats, and GGUF, whose tensors each name their own type."""
    recipe = config.quantization
    if recipe is None:
        return None
    checkpoint = Checkpoint(path, recipe, layer_names(config.architecture).place_of)
    kept, floats = formats.split(checkpoint, checkpoint.content_of, recipe)
    routers = (part.router for part in (layer.feed_forward for layer in config.layers) if isinstance(part, MixtureSpec))
    share = next((router.num_chosen / router.num_experts for router in routers), 1.0)
    sizes = (_num_bytes(checkpoint, module) * (share if ".experts." in module else 1.0) for module in kept)
    claim = "fp8" if recipe.scales else f"int{recipe.bits}"
    return Stored(f"weights.{claim}", recipe.method, recipe.bits, len(kept), len(floats), int(sum(sizes)))


def _num_bytes(checkpoint: Checkpoint, module: str) -> int:
    """Returns the size of the integers: words of 32 bits, or a byte each."""
    for suffix, width in (("qweight", 4), ("weight_packed", 4), ("weight", 1)):
        shape = checkpoint.shape_of(f"{module}.{suffix}")
        if shape is not None:
            return width * shape[0] * shape[-1]
    return 0


def claims(kept: Stored | None, resolved: "Resolved") -> tuple[str, ...]:
    """By the names of `Ops.bytes_read`."""
    weights = resolved.weights.split(": ", 1)[-1]
    found = [f"weights.{name}" for name in EIGHT_BITS_OR_FEWER if name in weights]
    if kept is not None and kept.claim not in found and WIDER.get(kept.claim, "-") not in weights:
        found.insert(0, kept.claim)
    return (*found, *([f"kv.{resolved.kv_cache_dtype}"] if resolved.kv_cache_dtype in SMALL_CACHES else []))
