"""openvino-genai under the line protocol: python -m benchmarks.peers.contender_openvino MODEL_FOLDER THREADS

Its continuous batching pipeline with the precision hints left at their defaults, 1 GiB of KV cache, at most 2,048
tokens a step, prompts split and fused with decodes, prefix cache off. Runs in the peer's own environment.
"""

import sys
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from benchmarks.peers.protocol import serve


def pipeline(folder: str, threads: int) -> Any:
    scheduling = genai.SchedulerConfig()
    scheduling.cache_size = 1
    scheduling.max_num_batched_tokens = 2048
    scheduling.max_num_seqs = 64
    scheduling.dynamic_split_fuse = True
    scheduling.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    return genai.ContinuousBatchingPipeline(folder, scheduling, "CPU", properties)


def greedy(new_tokens: int) -> Any:
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = new_tokens, True, False
    return config


class OpenVino:
    def __init__(self, folder: str, threads: int) -> None:
        self._pipeline = pipeline(folder, threads)
        self._handles: dict[int, Any] = {}
        self._next_id = 0
        self.about = {"openvino-genai": genai.__version__, "openvino": ov.get_version()}

    def submit(self, stream: int, prompt: list[int], new_tokens: int) -> None:
        ids = ov.Tensor(np.array([prompt], dtype=np.int64))
        self._handles[stream] = self._pipeline.add_request(self._next_id, ids, greedy(new_tokens))
        self._next_id += 1

    def step(self) -> list[int]:
        self._pipeline.step()
        streams = []
        for stream, handle in self._handles.items():
            if handle.can_read():
                streams += [stream] * sum(len(output.generated_ids) for output in handle.read().values())
        return streams


if __name__ == "__main__":
    serve(lambda: OpenVino(sys.argv[1], int(sys.argv[2])))
