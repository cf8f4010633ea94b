"""Dialects of other servers: their words for what we measure (`servers`), and the arithmetic behind (`dialect`).

`DIALECTS` is the whole list, by `Arm.kind`.
"""

from splittime.wire.dialects.dialect import Dialect, Notation, Quantity
from splittime.wire.dialects.servers import LLAMA_CPP, SGLANG, TGI, VLLM

DIALECTS = {dialect.kind: dialect for dialect in (VLLM, SGLANG, TGI, LLAMA_CPP)}

__all__ = ["DIALECTS", "Dialect", "Notation", "Quantity"]
