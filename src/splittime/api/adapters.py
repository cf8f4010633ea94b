"""What is asked of the adapters that a server has, in vLLM's words."""

from typing import Annotated

from msgspec import Meta

from splittime.api.schema import Strict

AdapterName = Annotated[str, Meta(max_length=128, description="Of the adapter: requests name it as their model.")]


class LoadAdapterBody(Strict):
    lora_name: AdapterName
    lora_path: Annotated[
        str, Meta(min_length=1, max_length=4096, description="Its folder, below --lora-root: relative, or whole.")
    ]


class UnloadAdapterBody(Strict):
    lora_name: AdapterName
