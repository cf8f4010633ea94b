"""Logits after every token that a runner computes, where a runner itself makes only those that are asked for."""

from collections.abc import Iterable

import torch
from driving import Driver, Sequence

from splittime.runner.batch import Batch
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig
from splittime.runner.torch_runner import TorchRunner


def heard(runner: TorchRunner) -> list[torch.Tensor]:
    """Filled step by step from now on: [tokens, vocab] each."""
    seen: list[torch.Tensor] = []

    def listen(batch: Batch, hidden: torch.Tensor) -> None:
        seen.append(runner.decoder.logits(hidden))

    runner.on_hidden = listen
    return seen


def prompt_logits(
    model: object, prompt: Iterable[int], chunks: Iterable[int] = (), **settings: object
) -> tuple[torch.Tensor, TorchRunner]:
    """After each token of the prompt, [tokens, vocab]; and the runner. settings: of `RunnerConfig`."""
    runner = load_torch_runner(
        RunnerConfig(**{"model_path": str(model), "max_num_seqs": 2, "packed_cache": "off", **settings})
    )
    seen = heard(runner)
    Driver(runner).prefill(Sequence("a", prompt), chunks)
    return torch.cat(seen), runner
