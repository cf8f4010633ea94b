"""Which device a rank computes on: a card of its own, by its number, where the kernels are a card's; else the CPU."""

import torch

from splittime.core.errors import ConfigError
from splittime.runner import machine
from splittime.runner.config import RunnerConfig


def device_of(config: RunnerConfig, index: int) -> torch.device:
    """Makes it this process's, too. Raises `ConfigError` where there are fewer cards than ranks."""
    if not torch.cuda.is_available() or machine.choose_kernels(config.kernels)[0] != "triton":
        return torch.device("cpu")
    from splittime.kernels.triton.device import is_interpreted

    if is_interpreted():
        return torch.device("cpu")
    cards, count = torch.cuda.device_count(), config.tensor_parallel_size
    if cards < count:
        message = f"tensor_parallel_size is {count}, but there are {cards} cards"
        raise ConfigError(message, param="tensor_parallel_size", value=count, limit=cards)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
