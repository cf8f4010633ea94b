"""Models of which some layers keep a state: logits and greedy tokens equal transformers', and a step's cuts and company
change no bit."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stored_layouts as layouts
import torch
from random_models import DELTA, LONG, STATEFUL, make
from safetensors.torch import load_file, save_file
from stateful import Stateful, load
from test_stored_formats import AWQ, GPTQ

from splittime.kernels.api import CPU, RoundedRows, WeightScheme
from splittime.kernels.choose import make_backend
from splittime.models.architectures import WRAPPERS
from splittime.models.weights.keeping import finish
from splittime.models.weights.packing import Packer, WeightRows
from splittime.models.weights.source import DummySource, rows_of
from splittime.runner.config_sizes import sizes_of_config

PROMPT_TOKENS, NEW_TOKENS = 310, 12
MEAN_ERROR, MAX_ERROR = 2e-5, 2e-3  # transformers' own two forms of the rule are as far from each other


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=STATEFUL)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """(transformers' model, the folder of its checkpoint)."""
    folder = tmp_path_factory.mktemp(request.param)
    return make(request.param, folder), folder


@pytest.fixture(scope="module")
def native(pair: tuple[Any, Path]) -> Stateful:
    return Stateful(load(pair[1], "native"))


def tokens_of(count: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPT = tokens_of(PROMPT_TOKENS)


@pytest.mark.parametrize(
    ("kernels", "length"), [("native", PROMPT_TOKENS), ("torch", PROMPT_TOKENS), ("reference", 40)]
)
def test_logits_equal_transformers(pair: tuple[Any, Path], kernels: str, length: int) -> None:
    model, folder = pair
    loaded = load(folder, kernels)
    with torch.no_grad():
        want = model(torch.tensor([PROMPT[:length]])).logits[0]
    assert loaded.unused_tensors == ()
    assert loaded.num_parameters == sum(one.numel() for one in model.parameters())
    for cut in (0, 9):
        error = (Stateful(loaded).prompt(PROMPT[:length], cut) - want).abs()
        assert error.mean() <= MEAN_ERROR
        assert error.max() <= MAX_ERROR


def test_greedy_tokens_equal_transformers(pair: tuple[Any, Path], native: Stateful) -> None:
    tokens = PROMPT[:60]
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            tokens = [*tokens, int(pair[0](torch.tensor([tokens])).logits[0, -1].argmax())]
    assert native.generate(PROMPT[:60], NEW_TOKENS) == tokens[60:]


@pytest.mark.parametrize("cut", [5, 62])
def test_a_prompt_in_steps_has_the_same_bits_as_at_once(native: Stateful, cut: int) -> None:
    """But for attention of rows of one token, which sums in another order."""
    assert torch.equal(native.prompt(PROMPT, cut), native.prompt(PROMPT))


def test_a_row_in_company_has_the_same_bits_as_alone(native: Stateful) -> None:
    lengths = (1, 30, 7)
    others = [tokens_of(20 + length, seed=length) for length in lengths]
    alone = [native.prompt(one[:20], 0, place) for place, one in enumerate(others)]
    states = [one.clone() for one in native.store.states]
    apart = [native.step({place: one[20:]})[0] for place, one in enumerate(others)]
    for place, one in enumerate(others):
        assert torch.equal(native.prompt(one[:20], 0, place), alone[place])
    assert all(torch.equal(a[:3], b[:3]) for a, b in zip(states, native.store.states, strict=True))
    together = native.step({place: one[20:] for place, one in enumerate(others)})
    assert all(torch.equal(a, b) for a, b in zip(apart, together, strict=True))


def test_a_kept_state_is_gone_on_from_to_the_bit(native: Stateful) -> None:
    want = native.prompt(PROMPT)
    native.begin(0)
    native.step({0: PROMPT[:200]}, keeps=[(0, 48, 6), (0, 200, 7)])
    for start, slot in ((200, 7), (48, 6)):
        native.num_tokens[0] = start
        (found,) = native.step({0: PROMPT[start:]}, reads={0: slot})
        assert torch.equal(found, want[start:])


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.4), ("int4", 1.5)])
def test_rounded_weights_change_little(
    pair: tuple[Any, Path], native: Stateful, kernels: str, quantization: str, most: float
) -> None:
    """most: of the mean distance of logits."""
    want = native.prompt(PROMPT[:100])
    loaded = load(pair[1], kernels, quantization=quantization)
    found = Stateful(loaded).prompt(PROMPT[:100], 33)
    assert (found - want).abs().mean() < most
    assert not torch.equal(found, want)
    assert loaded.plan.layers.name == quantization


def test_bfloat16_is_close_to_float32(pair: tuple[Any, Path], native: Stateful) -> None:
    want = native.prompt(PROMPT[:100])
    for kernels in ("native", "torch"):
        found = Stateful(load(pair[1], kernels, "bfloat16")).prompt(PROMPT[:100])
        assert (found - want).abs().mean() < 0.25


def test_packed_weights_come_back_from_the_cache(pair: tuple[Any, Path], tmp_path: Path) -> None:
    found = []
    for _ in range(3):  # the first only hashes in the background
        loaded = load(pair[1], "native", quantization="int8", cache_folder=tmp_path)
        finish()
        found.append((Stateful(loaded).prompt(PROMPT[:30]), loaded.cache_story))
    assert found[-1][1].startswith("mapped")
    assert torch.equal(found[0][0], found[-1][0])


@pytest.mark.parametrize(("quantization", "dtype"), [(None, "float32"), ("int8", "bfloat16"), ("int4", "bfloat16")])
def test_sizes_of_the_config_are_those_of_the_model(
    pair: tuple[Any, Path], quantization: str | None, dtype: str
) -> None:
    sizes, loaded = sizes_of_config(pair[1], quantization), load(pair[1], "torch", dtype, quantization)
    config = loaded.decoder.config
    is_shared = config.tie_word_embeddings and quantization is None
    table = 0 if is_shared else config.vocab_size * config.hidden_size * getattr(torch, dtype).itemsize
    assert sizes.weights_bytes == loaded.weights_bytes + table
    if not config.has_routers:
        parts = [
            part.num_weights(config.hidden_size) for one in config.layers for part in (one.mixer, one.feed_forward)
        ]
        named = pair[0].named_parameters()
        assert sum(parts) == sum(one.numel() for name, one in named if ".layers." in name and one.dim() == 2)


def test_random_weights_run(pair: tuple[Any, Path]) -> None:
    assert Stateful(load(pair[1], "native", is_dummy=True)).prompt(PROMPT[:30], 11).isfinite().all()


@pytest.mark.parametrize("name", ["model.language_model.", "model."])
def test_the_text_part_of_a_multimodal_model_is_served(pair: tuple[Any, Path], tmp_path: Path, name: str) -> None:
    """With what stands beside it: the vision tower says nothing of text, and the heads for drafts are told."""
    values, tensors = json.loads((pair[1] / "config.json").read_text()), load_file(pair[1] / "model.safetensors")
    kind = {text: whole for (whole, text) in WRAPPERS}.get(values["model_type"])
    if kind is None:
        pytest.skip("the family has no multimodal models")
    wrapped = {
        "architectures": [kind],
        **{
            "model_type": "qwen3_5",
            "tie_word_embeddings": values["tie_word_embeddings"],
            "vision_config": {"depth": 2},
        },
        "text_config": {key: value for key, value in values.items() if key != "architectures"},
    }
    (tmp_path / "config.json").write_text(json.dumps(wrapped))
    renamed = {one.replace("model.", name, 1): tensor for one, tensor in tensors.items()}
    extra = {"model.visual.blocks.0.mlp.weight": torch.zeros(3, 3), "mtp.fc.weight": torch.zeros(2, 2)}
    save_file({**renamed, **extra}, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = load(tmp_path, "native")
    assert loaded.unused_tensors == ("mtp.fc.weight",)
    assert torch.equal(Stateful(loaded).prompt(PROMPT[:20]), Stateful(load(pair[1], "native")).prompt(PROMPT[:20]))


def test_experts_may_be_stored_in_one_tensor_or_each_in_its_own(pair: tuple[Any, Path], tmp_path: Path) -> None:
    values, tensors = json.loads((pair[1] / "config.json").read_text()), load_file(pair[1] / "model.safetensors")
    if values["model_type"] != "qwen3_5_moe_text":
        pytest.skip("of this family alone")
    (tmp_path / "config.json").write_text(json.dumps(values))
    own = {name: one for name, one in tensors.items() if ".experts." in name}
    stacked, (inner, count) = {}, (values["moe_intermediate_size"], values["num_experts"])
    for place in {name.split(".experts.")[0] + ".experts." for name in own}:
        if f"{place}down_proj" in own:
            both, down = own[f"{place}gate_up_proj"], own[f"{place}down_proj"]
            for number in range(count):
                stacked[f"{place}{number}.gate_proj.weight"] = both[number, :inner].clone()
                stacked[f"{place}{number}.up_proj.weight"] = both[number, inner:].clone()
                stacked[f"{place}{number}.down_proj.weight"] = down[number].clone()
        else:
            gate, up, down = (
                torch.stack([own[f"{place}{number}.{part}_proj.weight"] for number in range(count)])
                for part in ("gate", "up", "down")
            )
            stacked |= {f"{place}gate_up_proj": torch.cat((gate, up), dim=1), f"{place}down_proj": down}
    others = {name: one for name, one in tensors.items() if name not in own}
    save_file(others | stacked, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = load(tmp_path, "native")
    assert loaded.unused_tensors == ()
    assert torch.equal(Stateful(loaded).prompt(PROMPT[:20]), Stateful(load(pair[1], "native")).prompt(PROMPT[:20]))


EVEN = {
    **{
        **LONG,
        **DELTA,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "mlp_only_layers": [*range(5)],
    },
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
}


def is_rounded(name: str, tensor: torch.Tensor) -> bool:
    """Whether it is a product of a layer."""
    return ".layers." in name and tensor.dim() == 2


@pytest.mark.parametrize("family", ["Qwen3_5", "Qwen3Next"])
@pytest.mark.parametrize(("said", "store"), [(AWQ, layouts.awq), (GPTQ, layouts.gptq)], ids=["awq", "gptq"])
def test_a_quantised_checkpoint_is_the_model_that_it_stands_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, said: dict[str, Any], store: Any
) -> None:
    """Rows of two projections that a module holds head by head are found in integers as in floats."""
    monkeypatch.setitem(STATEFUL, "even", (family, EVEN))
    make("even", tmp_path / "plain")
    values, tensors = (
        json.loads((tmp_path / "plain" / "config.json").read_text()),
        load_file(tmp_path / "plain" / "model.safetensors"),
    )
    (tmp_path / "stored").mkdir()
    integers = {name: one for name, one in tensors.items() if not is_rounded(name, one)}
    for name in sorted(tensors.keys() - integers.keys()):
        drawn = layouts.draw(*tensors[name].shape, zeros=(1, 15), seed=name)
        tensors[name] = drawn.values().float()
        integers |= {name.removesuffix("weight") + kind: one for kind, one in store(drawn).items()}
    save_file(tensors, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    save_file(integers, tmp_path / "stored" / "model.safetensors", {"format": "pt"})
    (tmp_path / "stored" / "config.json").write_text(json.dumps({**values, "quantization_config": said}))
    want = Stateful(load(tmp_path / "plain", "torch")).prompt(PROMPT[:40])
    for kernels, most in (("torch", 1e-4), ("native", 0.08)):
        loaded = load(tmp_path / "stored", kernels)
        assert loaded.unused_tensors == ()
        assert (Stateful(loaded).prompt(PROMPT[:40]) - want).abs().mean() < most * want.std()


def test_integers_of_which_several_weights_take_rows_are_let_go_of_once(tmp_path: Path) -> None:
    """Behind the last rows of each weight: rows of one module are spread over its pages."""
    released, made = [], []

    class Whole:
        out_features, in_features, scheme, columns = 12, 64, WeightScheme("int8"), None

        def rows(self, begin: int, end: int) -> RoundedRows:
            made.append((begin, end, len(released)))
            return RoundedRows(torch.zeros(end - begin, 64, dtype=torch.int8), torch.ones(end - begin, 1))

    class Spy(DummySource):
        def release(self, read: Any) -> None:
            released.append(read)

    first, second = Whole(), Whole()
    parts = [WeightRows(rows_of(first, begin, begin + 3)) for begin in (0, 6)] + [WeightRows(second)]
    ops = make_backend("torch", torch.float32)
    Packer(ops, Spy(torch.float32, CPU), None).linear("all", parts, [], WeightScheme("float32"))
    assert released == [first, second]
    assert made == [(0, 3, 0), (6, 9, 0), (0, 12, 1)]


def test_packed_weights_are_of_heads_of_one_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a module holds rows head by head, another shape of heads is another order of them in the same file."""
    monkeypatch.setitem(STATEFUL, "even", ("Qwen3Next", EVEN))
    make("even", tmp_path / "model")
    stories = [load_twice(tmp_path / "model", tmp_path / "cache")]
    config = tmp_path / "model" / "config.json"
    said = json.loads(config.read_text())
    config.write_text(json.dumps({**said, "linear_num_key_heads": 4, "linear_key_head_dim": 4}))
    stories.append(load_twice(tmp_path / "model", tmp_path / "cache"))
    assert stories == [["packed", "mapped"]] * 2


def load_twice(folder: Path, cache: Path) -> list[str]:
    found = []
    for _ in range(2):
        found.append(load(folder, "native", quantization="int8", cache_folder=cache).cache_story.split()[0])
        finish()
    return found
