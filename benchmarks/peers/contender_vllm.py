"""vLLM under the line protocol: python -m benchmarks.peers.contender_vllm MODEL_FOLDER THREADS SETTINGS

SETTINGS is JSON: {"dtype": "bfloat16"} and whatever is to be in the environment. Its engine in this process, stepped by
us, prefix cache off, graphs off (`enforce_eager`: compiling takes minutes on two cores), 1 GiB of KV cache. Runs in the
peer's own environment.
"""

import json
import os
import sys
from typing import Any

from benchmarks.peers.protocol import serve


class Vllm:
    def __init__(self, folder: str, threads: int, dtype: str, **environment: str) -> None:
        os.environ |= environment | {
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": str(threads),
        }
        import vllm

        self._vllm = vllm
        limits = {"max_model_len": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 4096}
        options: dict[str, Any] = {"enable_prefix_caching": False, "enforce_eager": True}
        self._engine = vllm.LLM(folder, dtype=dtype, **limits, **options).llm_engine
        self._done: dict[str, int] = {}
        self._next_id = 0
        self.about = {"vllm": vllm.__version__, "dtype": dtype, **environment, **options}

    def submit(self, stream: int, prompt: list[int], new_tokens: int) -> None:
        sampling = self._vllm.SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        name = f"{self._next_id}:{stream}"
        self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        self._done[name] = 0
        self._next_id += 1

    def step(self) -> list[int]:
        streams = []
        for output in self._engine.step():
            count = len(output.outputs[0].token_ids)
            streams += [int(output.request_id.split(":")[1])] * (count - self._done[output.request_id])
            self._done[output.request_id] = count
        return streams


if __name__ == "__main__":
    serve(lambda: Vllm(sys.argv[1], int(sys.argv[2]), **json.loads(sys.argv[3])))
