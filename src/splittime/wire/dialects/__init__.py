"""What other servers say of themselves, in our words: one file a server, `dialect` for the arithmetic.

`DIALECTS` is the whole list, by `Arm.kind`.
"""

from splittime.wire.dialects.dialect import Dialect, Notation, Quantity
from splittime.wire.dialects.llama_cpp import LLAMA_CPP
from splittime.wire.dialects.sglang import SGLANG
from splittime.wire.dialects.tgi import TGI
from splittime.wire.dialects.vllm import VLLM

DIALECTS = {dialect.kind: dialect for dialect in (VLLM, SGLANG, TGI, LLAMA_CPP)}

__all__ = ["DIALECTS", "Dialect", "Notation", "Quantity"]
