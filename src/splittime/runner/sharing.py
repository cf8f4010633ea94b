"""Whether blocks of KV cache can be shared with other servers; known without torch, so who starts servers asks too."""

from splittime.runner.config import RunnerConfig
from splittime.runner.speculative import speculative_config


def sharing_obstacle(config: RunnerConfig, kernels: str) -> str | None:
    """Returns what stands in the way, in words; None if nothing does."""
    drafts = speculative_config(config.speculative_config)
    obstacles = {
        f"the {kernels} kernels: it takes the native ones, whose sums depend on no neighbour": kernels != "native",
        f"tensor_parallel_size = {config.tensor_parallel_size}": config.tensor_parallel_size > 1,
        f"load_format = {config.load_format}": config.load_format == "dummy",
        "a model that makes drafts, which keeps blocks of its own": drafts is not None and drafts.has_model,
        "adapters (enable_lora), whose names do not say what they hold": config.enable_lora,
    }
    return next((words for words, is_so in obstacles.items() if is_so), None)
