"""This project under the line protocol: python -m benchmarks.peers.contender_splittime MODEL_FOLDER SETTINGS

SETTINGS is JSON for `RunnerConfig`, such as {"num_threads": 2, "quantization": "int8"}. The engine's whole step runs,
plan, run, commit and its record, as under a server; prefix cache off.
"""

import json
import os
import sys
import time
from typing import Any

import msgspec

from benchmarks.peers.protocol import serve
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.scheduler.config import SchedulerConfig

KV_BYTES = 1 << 30


class Splittime:
    def __init__(self, folder: str, settings: dict[str, Any]) -> None:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the engine process does
        from benchmarks.scenarios.engine_driver import crank_over, load_runner

        limits = {"max_num_seqs": 64, "max_num_batched_tokens": settings.pop("max_num_batched_tokens", 512)}
        scheduler = SchedulerConfig(enable_prefix_caching=False, **limits)
        asked = {"kv_cache_memory_bytes": KV_BYTES, "max_model_len": 4096, **settings}
        runner, config = load_runner(folder, scheduler, **asked)
        self._crank = crank_over(runner, scheduler, config)
        self._next_id = 0
        resolved = msgspec.to_builtins(runner.resolved)
        self.about = {key: value for key, value in resolved.items() if key != "model_path"} | limits

    def submit(self, stream: int, prompt: list[int], new_tokens: int) -> None:
        now_ns = time.monotonic_ns()
        request = Request(
            request_id=f"{self._next_id}:{stream}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, seed=0),
            submitted_ns=now_ns,
        )
        self._next_id += 1
        self._crank.submit(request, now_ns)

    def step(self) -> list[int]:
        output = self._crank.turn()
        streams: list[int] = []
        for news in output.outputs if output is not None else ():
            if news.error is not None:
                raise RuntimeError(str(news.error))
            streams += [int(news.request_id.split(":")[1])] * len(news.token_ids)
        return streams


if __name__ == "__main__":
    serve(lambda: Splittime(sys.argv[1], json.loads(sys.argv[2])))
