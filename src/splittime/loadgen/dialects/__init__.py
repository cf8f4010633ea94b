"""What other servers say of themselves, in our words: one file a server, `reading` for the arithmetic, `view` to show.

`DIALECTS` is the whole list, by `Arm.kind`.
"""

from splittime.loadgen.dialects.dialect import Dialect, Form, Quantity
from splittime.loadgen.dialects.llama_cpp import LLAMA_CPP
from splittime.loadgen.dialects.sglang import SGLANG
from splittime.loadgen.dialects.tgi import TGI
from splittime.loadgen.dialects.vllm import VLLM

DIALECTS = {dialect.kind: dialect for dialect in (VLLM, SGLANG, TGI, LLAMA_CPP)}

__all__ = ["DIALECTS", "Dialect", "Form", "Quantity"]
