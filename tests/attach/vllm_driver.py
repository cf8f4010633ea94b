"""vLLM's real scheduler with books, driven step by step without a server."""

from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from splittime.attach.request_book import EndedBook
from splittime.attach.settings import VllmSettings
from splittime.attach.vllm_offline import offline_scheduler
from splittime.core.clock import VirtualClock
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import StepRecord
from splittime.simulate.shape import StepTime

ROOMY = VllmSettings(max_model_len=256, max_num_seqs=4, max_num_batched_tokens=256, num_blocks=64, block_size=16)
HASHER = get_request_block_hasher(16, get_hash_fn_by_name("sha256"))
init_none_hash(get_hash_fn_by_name("sha256"))
TIME = StepTime(plan_ns=10, device_ns=1000, commit_ns=10)


class Driver:
    """A scheduler whose requests are told apart by name, and all steps' marks."""

    def __init__(self, **settings: Any) -> None:
        told = {name: getattr(ROOMY, name) for name in VllmSettings.__struct_fields__}
        self.clock = VirtualClock()
        self.scheduler = offline_scheduler(VllmSettings(**told | settings), self.clock, lambda plan, begin_ns: TIME)
        self.num_added = 0
        self.records: list[StepRecord] = []
        self.ended: dict[str, EndedBook] = {}

    def add(self, name: str, prompt: int = 20, most: int = 50, first: int | None = None, **more: Any) -> Request:
        """first: the prompt's first token; default: one that no other prompt begins with."""
        self.num_added += 1
        first = self.num_added * 1000 if first is None else first
        sampling = {"max_tokens": most, "ignore_eos": True, "detokenize": False, **more.pop("sampling", {})}
        request = Request(
            name,
            list(range(first, first + prompt)),
            SamplingParams(**sampling),
            None,
            arrival_time=0.0,
            block_hasher=HASHER,
            **more,
        )
        self.clock.advance(5)
        self.scheduler.add_request(request)
        return request

    def plan(self) -> Any:
        return self.scheduler.schedule()

    def end(self, plan: Any) -> None:
        self.clock.advance(TIME.device_ns)
        names = list(plan.num_scheduled_tokens)
        requests = [self.scheduler.requests.get(name) for name in names]
        tokens = [[] if each is None or each.is_prefill_chunk else [7] for each in requests]
        told = ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, tokens)
        self.scheduler.update_from_output(plan, told)
        ended, record = self.scheduler.told.take()
        self.ended |= {book.request_id: book for book in ended}
        self.records += [record] if record is not None else []

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.end(self.plan())

    def now(self, name: str) -> tuple[Stage, Cause | None]:
        account = self.scheduler.books.books[name].account
        return account.stage, account.cause
