"""Two engines of one model: what the second takes from the first instead of computing it changes no token, and no bit
of a log-probability."""

import gc
import weakref
from typing import Any

import pytest
from random_models import make

torch = pytest.importorskip("torch")

from splittime.assemble import model_source, settings  # noqa: E402
from splittime.assemble.worker import build_engine  # noqa: E402
from splittime.core.clock import SystemClock  # noqa: E402
from splittime.core.engine import BlocksAsk  # noqa: E402
from splittime.core.errors import ConfigError  # noqa: E402
from splittime.core.request import Request  # noqa: E402
from splittime.core.sampling import SamplingParams  # noqa: E402
from splittime.drive.crank import Crank, EngineParts  # noqa: E402
from splittime.kernels.native.library import LibraryMissing, library  # noqa: E402
from splittime.kv.blocks import block_names, root_name  # noqa: E402
from splittime.kv.cache import Lease  # noqa: E402
from splittime.runner.compose import load_torch_runner  # noqa: E402
from splittime.runner.config import RunnerConfig  # noqa: E402
from splittime.runner.honoured import check_sharing  # noqa: E402
from splittime.runner.kv_port import layout_of  # noqa: E402

try:
    library()
except LibraryMissing as error:
    pytest.skip(str(error), allow_module_level=True)

PROMPT = tuple((7 * place + 3) % 400 + 5 for place in range(75))


def parts_of(**given: Any) -> EngineParts:
    small = {"max_model_len": 256, "kv_cache_memory_bytes": "16MiB", "num_threads": 1, "max_num_seqs": 4}
    chosen = settings.from_arguments({**small, "kv_export": True, **given})
    return build_engine(settings.worker_settings(chosen, model_source.locate(None)), [])


class Server:
    def __init__(self, **given: Any) -> None:
        self.parts = parts_of(**given)
        self.crank = Crank(self.parts, SystemClock())
        self.port = self.parts.sharing.port
        self.num_asked = 0

    def answer(self, prompt: tuple[int, ...] = PROMPT, salt: str = "") -> tuple[list[tuple[int, float]], int]:
        """Returns the tokens with their log-probabilities, and how many of the prompt's were cached."""
        self.num_asked += 1
        counts = self.crank.engine.scheduler.counts
        before = counts.prefix_hit_tokens
        sampling = SamplingParams(max_tokens=12, temperature=0.0, seed=0, ignore_eos=True, logprobs=1)
        now_ns = SystemClock().now_ns()
        request = Request(
            request_id=f"r{self.num_asked}",
            prompt_token_ids=prompt,
            sampling=sampling,
            submitted_ns=now_ns,
            cache_salt=salt,
        )
        self.crank.submit(request, now_ns)
        tokens: list[tuple[int, float]] = []
        while self.crank.has_work:
            for output in self.crank.turn().outputs:
                tokens += [(each.token_id, each.logprob) for each in output.logprobs]
        assert len(tokens) == 12
        self.crank.engine.scheduler.check()
        return tokens, counts.prefix_hit_tokens - before

    def take_from(self, other: "Server", salt: str = "", spoil: bool = False) -> int:
        names = tuple(block_names(root_name(salt), PROMPT, 16))
        told = other.crank.export(BlocksAsk(self.port.layout, names))
        blobs = [bytes(len(blob)) if spoil else blob for blob in told.blobs]
        self.crank.take_in(told.names, [self.port.receive(blob) for blob in blobs])
        return len(told.names)


@pytest.mark.parametrize("given", [{}, {"kv_cache_dtype": "int8"}, {"async_scheduling": True}], ids=str)
def test_tokens_are_the_same_whether_a_prefix_was_computed_or_taken(given: dict[str, Any]) -> None:
    giver, taker = Server(**given), Server(**given)
    tokens, _ = giver.answer()
    assert taker.answer(PROMPT[1:])[1] == 0
    assert taker.take_from(giver) == len(PROMPT) // 16
    assert taker.answer() == (tokens, 64)
    assert taker.answer(salt="another tenant's") == (tokens, 0)
    assert taker.port._received == {}
    assert taker.take_from(giver) == 4
    assert taker.port._received == {}, "what is here already is not kept"


def test_the_content_that_is_taken_is_what_is_attended_to() -> None:
    """Else the test above would say nothing."""
    giver, taker = Server(), Server()
    tokens, _ = giver.answer()
    taker.take_from(giver, spoil=True)
    spoilt, num_cached = taker.answer()
    assert num_cached == 64
    assert spoilt != tokens


def test_nothing_is_given_of_another_layout_or_asleep_or_to_one_that_sleeps() -> None:
    giver, taker = Server(), Server(kv_cache_dtype="int8")
    giver.answer()
    assert giver.port.layout != taker.port.layout
    assert giver.crank.export(BlocksAsk(taker.port.layout)) is None
    told = giver.crank.export(BlocksAsk(giver.port.layout))
    assert len(told.names) == 5  # the prompt's four, and one with the answer
    other = Server()
    other.answer()
    layout = other.port.layout
    kept = weakref.ref(giver.parts.runner.decoder)
    giver.parts.sleeper.sleep(2)
    gc.collect()
    assert kept() is None, "it holds no memory"
    giver.parts.sleeper.wake()
    assert giver.port.layout == "", "other weights may have been read"
    assert giver.crank.export(BlocksAsk("")) is None
    names = tuple(block_names(root_name(""), PROMPT, 16))
    told = other.crank.export(BlocksAsk(layout, names))
    giver.crank.engine.forget_cache()
    giver.crank.take_in(told.names, [giver.port.receive(blob) for blob in told.blobs])  # asked for before it slept
    assert giver.crank.engine.scheduler.cache.num_known(names) == 0
    assert giver.port._received == {}


def test_contents_that_lost_their_blocks_are_dropped_with_the_next_step() -> None:
    giver, taker = Server(), Server()
    giver.answer()
    taker.take_from(giver)
    cache = taker.crank.engine.scheduler.cache
    lease = Lease()
    assert cache.reserve(lease, cache.num_blocks * 16)  # all of them go to somebody else
    cache.free(lease)
    assert len(taker.port._received) == 4
    taker.answer(PROMPT[1:])
    assert taker.port._received == {}


def test_what_cannot_be_shared_is_refused_by_name() -> None:
    for given in ({"speculative_config": '{"method": "self"}'}, {"kernels": "triton"}):
        with pytest.raises(ConfigError, match="are not shared with") as refused:
            parts_of(**given)
        assert refused.value.info.param == "kv_peers"
    with pytest.raises(ConfigError, match="adapters"):
        check_sharing(RunnerConfig(model_path="x", kv_export=True, enable_lora=True), "native")


def test_servers_whose_keys_are_turned_otherwise_have_other_layouts(tmp_path) -> None:
    """Phi-3 turns by other factors where more is served than its original context, 64 tokens here."""
    make("phi3-long", tmp_path)
    near, far, further = (
        layout_of(load_torch_runner(RunnerConfig(model_path=str(tmp_path), max_model_len=length)))
        for length in (64, 96, 128)
    )
    assert near != far
    assert far == further
