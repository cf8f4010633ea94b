"""Books of a made illness: the real engine on a fake runner under a virtual clock, so that every cause in them was
stated by the scheduler itself.

    ward = Ward(max_num_seqs=2)
    ward.admit(Case(at_ms=0, prompt=ids(40), output=30), ...)
    books = ward.books()
"""

import random
from dataclasses import dataclass, field
from typing import Any

from splittime.core.clock import VirtualClock
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.diagnose.books import Books, make_books
from splittime.engine.engine import Engine
from splittime.ledger.account import Account, ClosedAccount
from splittime.ledger.facts import Process, ServerFacts, TokenCost
from splittime.ledger.prompt_parts import prompt_parts
from splittime.ledger.stages import Stage
from splittime.ledger.steps import StepRecord
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler
from splittime.simulate.fake import FakeRunner

MS = 1_000_000
WRITE_NS = 50_000


def ids(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 4000) for _ in range(length)]


@dataclass(frozen=True)
class Case:
    at_ms: float
    prompt: list[int]
    output: int
    tokenize_ms: float = 0.1
    client_wait_ms: float = 0.0


def _engine_ns(at_ns: int, case: Case) -> int:
    """When it reaches the engine."""
    return at_ns + int(case.tokenize_ms * MS) + WRITE_NS


@dataclass
class Ward:
    """step_ms and token_ms: what a step and each token in it cost; gap_ms: what the host does after each. execution:
    `FakeRunner`'s. Other arguments are the scheduler's settings."""

    step_ms: float = 4.0
    token_ms: float = 0.05
    gap_ms: float = 0.05
    execution: str = "host"
    plans_ahead: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    clock: VirtualClock = field(default_factory=lambda: VirtualClock(10**9))

    def run(self, *cases: Case) -> Books:
        config = SchedulerConfig(**({"max_model_len": 4096, "num_blocks": 4096} | self.settings))
        costs = (int(self.step_ms * MS), int(self.token_ms * MS))
        runner = FakeRunner(config.block_size, 4000, 0, *costs, self.clock, self.execution)
        self.engine = Engine(Scheduler(config), runner, self.clock, runner if self.plans_ahead else None)
        self.accounts: dict[str, Account] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        self.closed: list[ClosedAccount] = []
        self.steps: list[StepRecord] = []
        self._cases = {}
        begin_ns = self.clock.now_ns()
        arriving = [(begin_ns + int(case.at_ms * MS), case) for case in cases]
        arriving.sort(key=lambda entry: _engine_ns(*entry))
        waiting = [(_engine_ns(at_ns, case), at_ns, f"r{i}", case) for i, (at_ns, case) in enumerate(arriving)]
        while True:
            while waiting and waiting[0][0] <= self.clock.now_ns():
                self._submit(*waiting.pop(0))
            if self.engine.has_work:
                self._step()
            elif waiting:
                self.clock.advance(waiting[0][0] - self.clock.now_ns())
            else:
                break
        facts = ServerFacts(
            version="0",
            model="fake",
            max_model_len=config.max_model_len,
            settings={name: getattr(config, name) for name in config.__struct_fields__},
            cost=TokenCost(
                weight_bytes=1,
                kv_bytes_per_token=4096,
                operations_per_token=1,
                operations_per_context_token=1,
            ),
            processes=(Process(name="engine", started_ns=begin_ns - 10**10, ready_ns=begin_ns - 10**10),),
        )
        return make_books(facts, self.closed, self.steps, "a ward")

    def _submit(self, engine_ns: int, at_ns: int, request_id: str, case: Case) -> None:
        account = Account(request_id, at_ns, Stage.RECEIVE)
        account.enter(Stage.TOKENIZE, at_ns + 10_000)
        account.enter(Stage.HANDOFF, engine_ns)
        request = Request(
            request_id=request_id,
            prompt_token_ids=tuple(case.prompt),
            sampling=SamplingParams(max_tokens=case.output, seed=0),
            submitted_ns=engine_ns,
        )
        self.accounts[request_id] = account
        self._cases[request_id] = case
        self.facts[request_id] = {"steps": [], "ready": [], "cached": 0, "preemptions": 0}
        self.engine.submit(request, engine_ns)

    def _step(self) -> None:
        output = self.engine.step()
        self.clock.advance(int(self.gap_ms * MS))
        if output is None:
            return
        if output.record is not None:
            self.steps.append(output.record)
        for news in output.outputs:
            account, facts = self.accounts[news.request_id], self.facts[news.request_id]
            account.extend(news.marks)
            facts["steps"] += [output.step_id] * len(news.token_ids)
            facts["ready"] += [output.ready_ns] * len(news.token_ids)
            facts["preemptions"] = max(facts["preemptions"], news.num_preemptions)
            if news.num_cached_tokens is not None:
                facts["cached"] = news.num_cached_tokens
            if news.finish_reason is not None:
                self._close(news.request_id, str(news.finish_reason), output.ready_ns)

    def _close(self, request_id: str, reason: str, ready_ns: int) -> None:
        account, facts, case = self.accounts[request_id], self.facts[request_id], self._cases[request_id]
        end_ns = ready_ns + WRITE_NS
        if case.client_wait_ms:
            account.enter(Stage.CLIENT_WAIT, end_ns)
            end_ns += int(case.client_wait_ms * MS)
        account.close(end_ns)
        self.closed.append(
            ClosedAccount(
                request_id=request_id,
                group_id=f"cmpl-{request_id}",
                model="fake",
                endpoint="completions",
                started_at_unix_ns=0,
                start_ns=account.start_ns,
                end_ns=end_ns,
                intervals=tuple(account.intervals()),
                finish_reason=reason,
                prompt_tokens=len(case.prompt),
                cached_tokens=facts["cached"],
                output_tokens=len(facts["ready"]),
                num_preemptions=facts["preemptions"],
                first_chunk_tokens=1,
                token_steps=tuple(facts["steps"]),
                token_ready_ns=tuple(facts["ready"]),
                token_written_ns=tuple(at_ns + WRITE_NS for at_ns in facts["ready"]),
                prompt_parts=prompt_parts(case.prompt),
            )
        )
