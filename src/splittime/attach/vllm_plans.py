"""A plan and a request of vLLM's scheduler, in the words of the books."""

from typing import Any

from vllm.v1.request import Request

from splittime.attach.engine_books import DecidedPlan
from splittime.attach.request_book import AskedRequest
from splittime.attach.vllm_causes import StatesCauses


class ReadsPlans(StatesCauses):
    """The part of vLLM's scheduler with books that reads a plan which has just been made. Of our own attributes it
    reads who was preempted since the last."""

    requests: dict[str, Any]
    kv_cache_manager: Any
    _st_victims: list[str]

    def _planned(self, output: Any) -> DecidedPlan:
        counts = output.num_scheduled_tokens
        drafts = output.scheduled_spec_decode_tokens
        rows, decode_tokens, kv_tokens_read = [], 0, 0
        for name, count in counts.items():
            request = self.requests[name]
            end = request.num_computed_tokens  # this plan's tokens are among them
            rows.append((name, end - count, count))
            kv_tokens_read += end
            if not request.is_prefill_chunk and count == 1 + (len(drafts[name]) if name in drafts else 0):
                decode_tokens += count
        running, num_waiting = self.running, self._num_waiting()
        waiting, rest = self._why(output) if num_waiting else ((), None)
        pool = self.kv_cache_manager.block_pool
        return DecidedPlan(
            rows=tuple(rows),
            decode_tokens=decode_tokens,
            kv_tokens_read=kv_tokens_read,
            stalled=self._stalled(counts) if len(running) > len(rows) else (),
            waiting=waiting,
            hits=[(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs],
            victims=tuple(self._st_victims),
            blocks_used=pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),  # one is the null block
            num_running=len(running),
            num_waiting=num_waiting,
            drafts=tuple((name, len(ids)) for name, ids in drafts.items()) if drafts else (),
            rest=rest,
        )


def asked_of(request: Request) -> AskedRequest:
    """Returns what was asked of the engine."""
    params = request.sampling_params
    return AskedRequest(
        request.request_id,
        request.client_index,
        request.num_prompt_tokens,
        request.max_tokens,
        request.priority,
        params is not None and params.prompt_logprobs is not None,
        request.output_token_ids,
    )
