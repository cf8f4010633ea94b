"""Under the engine: an idle rank's death ends the engine process with a cause that names it, and a successor serves."""

import asyncio
import logging
import os
import signal
import time

import pytest
import tiny_checkpoint

from splittime.assemble import settings
from splittime.assemble.settings import worker_settings
from splittime.core.request import FinishReason, Request
from splittime.core.sampling import SamplingParams
from splittime.drive.process import ProcessClient

PATIENCE_S = 90


async def tokens_of(client, name):
    sampling = SamplingParams(temperature=0.0, max_tokens=6, seed=0)
    prompt = (3, 4, 5)
    client.submit(
        Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, submitted_ns=time.monotonic_ns())
    )
    tokens = []
    async for item in client.stream(name):
        tokens += item.output.token_ids
        assert item.output.finish_reason in (None, FinishReason.LENGTH)
    return tokens


@pytest.mark.timeout(3 * PATIENCE_S)
def test_an_idle_rank_s_death_starts_the_engine_anew(tmp_path, caplog):
    tiny_checkpoint.write(tmp_path)
    chosen = settings.from_arguments({"tensor_parallel_size": 2, "max_num_seqs": 2, "packed_cache": "off"})

    async def scenario():
        client = ProcessClient(None, worker_settings(chosen, tmp_path))
        try:
            first = await asyncio.wait_for(client.start(), PATIENCE_S)
            before = await asyncio.wait_for(tokens_of(client, "a"), PATIENCE_S)
            engine, rank = first.resolved["rank_pids"]
            assert engine == client.pid
            os.kill(rank, signal.SIGKILL)
            async with asyncio.timeout(PATIENCE_S):
                while client.num_restarts == 0 or not client.is_ready:
                    await asyncio.sleep(0.05)
            after = await asyncio.wait_for(tokens_of(client, "b"), PATIENCE_S)
            assert len(before) == 6
            assert after == before
            return rank
        finally:
            await client.stop()

    with caplog.at_level(logging.ERROR, "splittime.engine"):
        rank = asyncio.run(scenario())
    assert f"rank 1 (process {rank}) was killed by SIGKILL" in caplog.text
