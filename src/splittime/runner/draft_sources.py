"""What guesses tokens for a runner to verify: the drafter that its settings ask for, loaded, measured and warmed up.

suffix, ngram       `suffix_drafter`, from texts
draft_model, self   `ModelDrafter` over another runner: of a smaller model, or of the model itself in fewer bits
mtp                 the same over a runner of a head (`models.head`), which reads what the model has computed
auto                suffix, where a step of the model is long enough not to feel it

A draft model runs in the same process after the model's step (`draft_steps`).

    a step of the model     a b c        three requests get a token each
    the text not computed   a b c        in one step of the draft model, which gives the first drafts
    the drafts before       a   c        one step for each further draft, of the requests for which one more is worth it

A draft is drawn as the model's token will be: with the request's temperature, filters, penalties and masks, and with
the same random number, since that depends on the seed and on the token's place alone (`sampler.uniforms`). So where
both models agree about the probabilities, they draw the same token. No answer changes, whatever the draft model
computes: the model's own tokens are what is told.

How many drafts are made is decided here, by time and chance (`draft_record`), and which of them are verified by the
scheduler. A request's first token is told before the draft model reads its prompt.

What is learnt of texts is kept by tenant (`draft_record`). All requests of a step share its time, so whether it pays to
draft at all is decided for them together, for this step and at most `LONGEST_PAUSE` more.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from splittime.core.step import Admitted, Row, RowResult, Runner, StepPlan, StepResult
from splittime.models.head import HiddenFeatures
from splittime.models.weights.head import load_head
from splittime.models.weights.load import open_source, read_config
from splittime.runner import machine, start_memory
from splittime.runner.batch import Batch
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import LEAST_LOOKUP, LEAST_STEP_MS, NONE, OWN_BITS, SpeculativeConfig, speculative_config
from splittime.runner.draft_record import MARGIN, ByTenant, StepWorth, TenantRecord
from splittime.runner.draft_steps import DraftedAnswer, DraftSteps, num_spare_blocks
from splittime.runner.drafting import Draft, DraftingRunner, Look
from splittime.runner.execution import HostExecution
from splittime.runner.honoured import check_rounding
from splittime.runner.kv_store import KvStore
from splittime.runner.load import OnPhase, draft_bytes_per_block
from splittime.runner.suffix_drafter import SuffixDrafter
from splittime.runner.torch_runner import TorchRunner

FORGIVE_STEPS = 16  # without a draft
LONGEST_PAUSE = 8  # steps in which it is not asked whether drafts are worth it, while they are not
READING_MARGIN = 2.0  # so many times what a text costs must its drafts be expected to save: few were verified yet
FIRST_OUTPUTS = 2  # tokens that an answer has before it is drafted


class ModelDrafter:
    """Implements `runner.drafting.Drafter`. How much time searches may take (`Look`) is not its measure: it weighs what
    its own steps take.

    runner: of the draft model; behind the `num_blocks` blocks of the model it has those that `num_spare_blocks` counts.
    most: drafts a row. most_tokens: that a request may have in either model. now_ns: reads the clock. features: what a
    head reads; None for a model. costs: what steps of both models took.
    """

    def __init__(
        self,
        runner: TorchRunner,
        most: int,
        num_blocks: int,
        most_tokens: int,
        now_ns: Callable[[], int] = time.monotonic_ns,
        features: HiddenFeatures | None = None,
    ) -> None:
        self.runner, self._most, self._most_tokens = runner, most, most_tokens
        self._most_behind = most + 2  # drafts in spare blocks, the token before them, and the one behind
        self._steps = DraftSteps(runner, most, num_blocks, now_ns, features)
        self.costs = self._steps.costs
        self._records = ByTenant(TenantRecord)
        self._num_idle = self._next_try = 0  # steps without drafts, and after how many of them some are tried again
        self._answers: dict[str, DraftedAnswer] = {}

    # ---- what happens to requests

    def admit(self, admitted: Admitted) -> None:
        record = self.record_of(admitted.cache_salt)
        self._answers[admitted.request_id] = DraftedAnswer(admitted, self._most_tokens, record)
        self._steps.admit(admitted)

    def release(self, request_id: str, is_preempted: bool = False) -> None:
        gone = self._answers.pop(request_id, None)
        if gone is None:
            return
        self._steps.release(gone)
        if gone.num_outputs and not is_preempted:
            gone.record.learn_answer(gone.num_outputs)

    def record_of(self, salt: str) -> TenantRecord:
        """Returns what a tenant's answers have taught."""
        return self._records.of(salt)

    def measure(self) -> None:
        """Times the draft model's steps, before the first request. Raises ConfigError for one that fails in them."""
        self._steps.measure()

    def learn(self, request_id: str, num_drafts: int, num_right: int) -> None:
        """There is nothing to learn that the answer's next tokens do not tell (`DraftedAnswer.learn_drafts`)."""

    def forget(self) -> None:
        self._steps.forget()

    # ---- a step

    def draft(self, plan: StepPlan, result: StepResult, look: Look) -> Mapping[str, Draft] | None:
        self.costs.learn_model(plan, result)
        asking = self._asking(plan, result)
        if asking and self.costs.model.is_known and self._num_idle >= self._next_try:
            self._next_try = 0 if self._make_drafts(asking) else self._num_idle + self._pause()
        drafts = {one.request_id: Draft(tuple(one.drafts), tuple(one.survival)) for one in asking if one.drafts}
        self._num_idle = 0 if drafts else self._num_idle + 1
        self._note_idle(asking)
        return drafts

    def _pause(self) -> int:
        """Returns after how many steps it is asked again; answers that are ready still are so then."""
        return min(self._num_idle + 1, LONGEST_PAUSE, self._most)

    def _note_idle(self, asking: Sequence[DraftedAnswer]) -> None:
        """Forgives the tenants who have long had no drafts."""
        served = {one.record for one in asking if one.drafts}
        for record in {one.record for one in asking}:
            record.num_idle = 0 if record in served else record.num_idle + 1
            if record.num_idle and record.num_idle % FORGIVE_STEPS == 0:
                forgive(record, asking)

    def _asking(self, plan: StepPlan, result: StepResult) -> list[DraftedAnswer]:
        """Takes in a step of the model. Returns the answers that may be drafted."""
        asking = []
        for row, one in zip(plan.rows, result.rows, strict=True):
            answer = self._answers.get(row.request_id)
            if answer is not None:
                self._take_in(answer, row, one)
                if one.error is None and self._may_draft(answer, one.token_ids):
                    asking.append(answer)
        return asking

    def _take_in(self, answer: DraftedAnswer, row: Row, result: RowResult) -> None:
        """What a row of the model brings: its blocks, its tokens, and what became of the drafts."""
        self._steps.lend(answer, row)
        answer.tokens += result.token_ids
        if answer.drafts:
            self._steps.rewind(answer, answer.learn_drafts(len(row.draft_token_ids)))
        if row.draft_token_ids and result.token_ids:
            self._steps.trim(answer)

    def _may_draft(self, answer: DraftedAnswer, new_tokens: Sequence[int]) -> bool:
        is_ended = not set(answer.stop_ids).isdisjoint(new_tokens)
        is_wanted = bool(new_tokens) and not is_ended and answer.num_outputs >= FIRST_OUTPUTS
        return is_wanted and not answer.is_broken and answer.may_go_on and self._steps.has_spare(answer)

    def _make_drafts(self, asking: Sequence[DraftedAnswer]) -> bool:
        """Puts drafts into the answers, while they are worth it. Returns whether the draft model computed anything."""
        worth, chances = StepWorth(self.costs, len(asking)), sum(one.record.chance for one in asking)
        if not worth.gains(chances, len(asking), MARGIN):  # not even if all were ready
            return False
        ready, has_read = self._ready(asking)
        self._draft_ready(ready, worth)
        return has_read or any(one.drafts for one in asking)

    def _draft_ready(self, going: list[DraftedAnswer], worth: StepWorth) -> None:
        """Gives each of these answers one draft more in a step of the draft model, again and again while that pays."""
        for number in range(self._most):
            expected = sum(one.survival_so_far * one.record.chance for one in going)
            if not going or not worth.gains(expected, len(going), 0.0 if number else MARGIN):
                break
            self._steps.draft_one_more(going)
            going = [one for one in going if len(one.drafts) == number + 1]
            worth.add(sum(one.survival[-1] for one in going), len(going))
            going = [one for one in going if one.may_go_on]

    def _ready(self, asking: Sequence[DraftedAnswer]) -> tuple[list[DraftedAnswer], bool]:
        """Returns those who lack no more than right drafts leave behind, and whether texts of others were computed, as
        far as that is worth it."""
        ready: list[DraftedAnswer] = []
        behind: list[DraftedAnswer] = []
        for answer in asking:
            if answer.num_behind > self._most_behind:
                self._steps.find_computed(answer)
            (ready if answer.num_behind <= self._most_behind else behind).append(answer)
        if behind:
            behind = self._worth_reading(behind, len(asking))
            self._steps.read(behind, len(asking))
        return ready, bool(behind)

    def _worth_reading(self, behind: Sequence[DraftedAnswer], num_rows: int) -> list[DraftedAnswer]:
        """Returns the answers of which drafts of what is left are worth it to compute the text before them."""
        chances = {one.record: one.record.chance for one in behind}
        saved_ns = {record: self.costs.saved_ns(num_rows, chance, self._most) for record, chance in chances.items()}
        return [one for one in behind if self._is_worth_reading(one, saved_ns[one.record])]

    def _is_worth_reading(self, answer: DraftedAnswer, saved_ns: float) -> bool:
        """saved_ns: of a token."""
        left = answer.record.num_left(answer.num_outputs, answer.most_tokens - len(answer.tokens))
        return left * saved_ns * answer.trust.factor > READING_MARGIN * answer.num_behind * self.costs.text_ns


def forgive(record: TenantRecord, answers: Sequence[DraftedAnswer]) -> None:
    """Forgets a little of what speaks against drafts for a tenant, and for his of these answers."""
    record.forgive()
    for answer in answers:
        if answer.record is record:
            answer.trust.recover()


def drafting_of(runner: TorchRunner, on_phase: OnPhase | None = None) -> Runner:
    """Returns the runner, with a drafter if its settings ask for one; a draft model or a head is loaded now, and warmed
    up. on_phase: told of that, as of the parts of `load_torch_runner`. Raises ConfigError."""
    asked = _settled(runner)
    if asked is None:
        return runner
    told = msgspec.json.encode(asked).decode()
    runner.resolved = msgspec.structs.replace(runner.resolved, speculative_config=told)
    if asked.has_model:
        begin_ns = time.monotonic_ns()
        make = head_drafter if asked.method == "mtp" else model_drafter
        drafting = DraftingRunner(runner, make(runner, asked))
        if on_phase is not None:
            on_phase("draft model", begin_ns, time.monotonic_ns())
        return drafting
    most, least = asked.num_speculative_tokens, asked.prompt_lookup_min or LEAST_LOOKUP
    return DraftingRunner(runner, SuffixDrafter(most, runner.resolved.max_model_len, least, asked.method == "suffix"))


def _settled(runner: TorchRunner) -> SpeculativeConfig | None:
    """Returns what tokens are guessed with. Where that is "auto", a decode step is timed: keeping and searching texts
    takes as long for a small model as for a large one, and may cost the small one more than a percent or two."""
    asked = speculative_config(runner.config.speculative_config)
    if asked is None or asked.method != "auto":
        return asked
    step_ms, told = start_memory.decode_step_ms(runner)
    is_long = step_ms >= LEAST_STEP_MS
    reason = f"auto: a step of one request takes {step_ms:.2f} ms; guessing pays from {LEAST_STEP_MS:g} ms on; {told}"
    runner.resolved = msgspec.structs.replace(runner.resolved, speculative_reason=reason)
    return msgspec.structs.replace(asked, method="suffix") if is_long else None


def model_drafter(runner: TorchRunner, asked: SpeculativeConfig) -> ModelDrafter:
    """Returns what drafts for this runner by a model, which is loaded and warmed up. Raises ConfigError."""
    config, resolved = runner.config, runner.resolved
    path, most = config.draft_model_path or config.model_path, asked.num_speculative_tokens
    most_tokens = min(resolved.max_model_len, read_config(Path(path)).max_position_embeddings)
    num_blocks = resolved.num_blocks + num_spare_blocks(most, config.block_size, config.max_num_seqs)
    bytes_per_block = draft_bytes_per_block(config, runner.decoder.config, runner.store.layers[0].data.dtype)
    is_own = asked.method == "self"
    drafting = load_torch_runner(
        msgspec.structs.replace(
            config,
            model_path=path,
            quantization=asked.quantization or (OWN_BITS if is_own else None),
            load_format=config.load_format if is_own else "auto",
            activation_dtype="auto",
            kv_cache_dtype=resolved.kv_cache_dtype,
            kv_cache_memory_bytes=num_blocks * bytes_per_block,
            max_model_len=most_tokens,
            num_threads=resolved.num_threads,
            speculative_config=NONE,
            draft_model_path=None,
            enable_lora=False,
        )
    )
    drafting.warm_up()
    drafter = ModelDrafter(drafting, most, resolved.num_blocks, most_tokens)
    drafter.measure()
    return drafter


def head_drafter(runner: TorchRunner, asked: SpeculativeConfig) -> ModelDrafter:
    """Returns what drafts for this runner by a head, which is loaded and warmed up. Raises ConfigError.

    From now on the runner leaves the features of each token that it computes."""
    config, resolved, store = runner.config, runner.resolved, runner.store
    path, most = Path(config.draft_model_path or config.model_path), asked.num_speculative_tokens
    model = read_config(path)
    asked_of = msgspec.structs.replace(config, quantization=asked.quantization)
    check_rounding(asked_of, model, lambda: open_source(path, model).format)
    num_blocks = resolved.num_blocks + num_spare_blocks(most, config.block_size, config.max_num_seqs)
    features = HiddenFeatures(num_blocks, config.block_size, model.hidden_size)
    plan = machine.choose_weights(
        msgspec.structs.replace(config, quantization=asked.quantization or config.quantization),
        resolved.dtype,
        resolved.kernels,
    )
    with torch.inference_mode():
        decoder = load_head(path, model, plan, lambda: runner.decoder, features)
    shape = (num_blocks, config.block_size, store.layers[0].data.dtype, decoder.ops.device, 0)
    kept, execution = KvStore(decoder.kv_groups, *shape), HostExecution(decoder.ops)
    head = TorchRunner(config, decoder, kept, resolved, runner.cost, runner.scheme, execution)
    runner.on_hidden = lambda batch, hidden: _leave(features, batch, runner.decoder.normed(hidden), slice(None))
    head.on_hidden = lambda batch, hidden: _leave_drafts(features, batch, decoder.normed(hidden))
    head.warm_up()
    drafter = ModelDrafter(head, most, resolved.num_blocks, resolved.max_model_len, features=features)
    drafter.measure()
    return drafter


def _leave_drafts(features: HiddenFeatures, batch: Batch, states: Tensor) -> None:
    """Leave the head's own features of the last token of each row that gives a draft: the model has not computed it. Of
    texts the model's remain."""
    ends = [batch.attention.query_begins[index + 1] - 1 for index, row in enumerate(batch.rows) if row.num_samples]
    if ends:
        _leave(features, batch, states, torch.tensor(ends))


def _leave(features: HiddenFeatures, batch: Batch, states: Tensor, which: Tensor | slice) -> None:
    attention = batch.attention
    features.write(attention.token_blocks[which], attention.token_offsets[which], states[which])
