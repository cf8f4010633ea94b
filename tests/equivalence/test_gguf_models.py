"""A model in a GGUF file computes what the same weights in safetensors do, for every architecture and tensor type."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from driving import Driver, Sequence
from listening import prompt_logits
from random_models import BASE, VARIANTS, make
from safetensors.numpy import load_file, save_file

pytest.importorskip("gguf")

from gguf_files import write

from splittime.core.errors import ConfigError
from splittime.kernels.layer import MixtureSpec
from splittime.kernels.native.library import LibraryMissing, library
from splittime.models.config import load_config
from splittime.models.gguf.config import load_gguf_config
from splittime.runner.compose import gauge_of, load_torch_runner
from splittime.runner.config import RunnerConfig

pytestmark = pytest.mark.sample(15)

SAYABLE = (
    *("llama", "llama-mha-tied", "llama-mqa-biases", "llama-head-dim", "llama-rope-llama3", "llama-rope-linear"),
    *("mistral-window", "qwen2", "qwen3", "mixtral", "mixtral-window", "qwen3-moe", "gemma3-file"),
    *("llama-rope-yarn", "qwen2-moe", "gemma", "gemma2-file", "smollm3", "phi3", "phi3-long", "phi3-short-partial"),
    *("granite-tied", "granite-hybrid", "granite-hybrid-no-rope", "granite-moe", "olmo2", "olmo3", "olmoe"),
    *("ernie", "ernie-moe", "seed-oss-biases", "glm4", "glm-moe", "glm-moe-groups", "exaone4", "exaone4-full"),
    *("hunyuan", "hunyuan-alpha", "hunyuan-yarn", "ministral3", "gpt-oss", "cohere", "cohere-head-norms", "cohere2"),
    *("starcoder2", "starcoder2-plain", "hunyuan-moe"),
)
"""Few files have keys for windows on some layers only."""
PROMPT = [5, 17, 3, 80, 41, 2, 96, 0, 33, 33, 7, 12, 64, 90, 1, 28, 55, 9, 13, 71]
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2}
DTYPE = {"kernels": "torch", "dtype": "float32"}


def logits(path, **settings):
    """After each token of the prompt, [tokens, vocab]; and the runner."""
    return prompt_logits(path, PROMPT, [7, 4], **settings)


@pytest.mark.parametrize("variant", SAYABLE)
def test_floats_give_the_same_logits(variant, tmp_path):
    make(variant, tmp_path)
    path = tmp_path / "model.gguf"
    write(tmp_path, path)
    mine, runner = logits(path, **DTYPE)
    want, other = logits(tmp_path, **DTYPE)
    assert (mine - want).abs().max() < 2e-5 * want.abs().max()
    assert runner.resolved.num_parameters == other.resolved.num_parameters


def test_a_layer_for_drafts_changes_nothing(tmp_path, monkeypatch):
    """The file has one block more than the folder, and says so, as GLM-4.5's do."""
    monkeypatch.setitem(VARIANTS, "longer", ("Glm4Moe", {**VARIANTS["glm-moe"][1], "num_hidden_layers": 3}))
    make("longer", tmp_path)
    path, weights = tmp_path / "model.gguf", tmp_path / "model.safetensors"
    write(tmp_path, path, **{"glm4moe.nextn_predict_layers": 1})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    kept = {name: each for name, each in load_file(weights).items() if not name.startswith("model.layers.2.")}
    save_file(kept, weights, {"format": "pt"})
    mine, runner = logits(path, **DTYPE)
    want, other = logits(tmp_path, **DTYPE)
    assert (mine - want).abs().max() < 2e-5 * want.abs().max()
    assert runner.resolved.num_parameters == other.resolved.num_parameters
    assert [isinstance(layer.feed_forward, MixtureSpec) for layer in load_gguf_config(path).layers] == [False, True]


def shape_of(layer):
    """All but the epsilons and the rotary embedding, which it may say in other words; GGUF has numbers in float32."""
    has_head_norm = layer.mixer.head_norm is not None
    said = repr(replace(layer, norm=None, mixer=replace(layer.mixer, position=None, head_norm=has_head_norm)))
    return re.sub(r"\d+\.\d+(e-\d+)?", lambda number: f"{float(number[0]):.5g}", said)


@pytest.mark.parametrize("variant", SAYABLE)
def test_metadata_become_the_same_config(variant, tmp_path):
    make(variant, tmp_path)
    write(tmp_path, tmp_path / "model.gguf", **{"tokenizer.ggml.eos_token_id": 2})
    mine, want = load_gguf_config(tmp_path / "model.gguf"), load_config(tmp_path)
    assert mine.eos_token_ids == (2,)
    assert mine.checkpoint_dtype == "float32"
    own = {"layers", "norm", "eos_token_ids", "architecture"}  # compared by what they compute
    same = [name for name in mine.__struct_fields__ if name not in own]
    assert [shape_of(layer) for layer in mine.layers] == [shape_of(layer) for layer in want.layers]
    found, wanted = ({name: getattr(config, name) for name in same} for config in (mine, want))
    factors = ("embedding_factor", "logits_factor", "logits_cap")
    assert [found.pop(name) for name in factors] == pytest.approx([wanted.pop(name) for name in factors])
    assert found == wanted


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """(folder, GGUF file, type) of one model whose matrices are blocks in the file, floats in the folder."""
    folder = tmp_path_factory.mktemp(request.param)
    VARIANTS["gguf-wide"] = ("Llama", {**WIDE, "tie_word_embeddings": True})
    try:
        make("gguf-wide", folder)
    finally:
        del VARIANTS["gguf-wide"]
    write(folder, folder / "model.gguf", request.param)
    return folder, folder / "model.gguf", request.param


@pytest.mark.parametrize("kernels", ["torch", "reference"])
def test_integers_give_the_logits_of_what_they_stand_for(pair, kernels):
    """Scales of groups are kept as float16 in torch, as Q4_0 and Q8_0 have them; those of the others are products."""
    folder, path, kind = pair
    error = 5e-5 if kind in ("Q4_0", "Q5_0", "Q8_0") or kernels == "reference" else 0.01
    want, _ = logits(folder, **DTYPE)
    mine, runner = logits(path, kernels=kernels, dtype="float32")
    assert (mine - want).abs().max() < error * want.abs().max()
    assert "gguf" in runner.resolved.weights
    matrices = sum(parameter.numel() for parameter in _matrices(folder))
    assert runner.resolved.weights_bytes < 2 * matrices  # of the 4 bytes that floats take


def test_native_kernels_stay_close(pair):
    """They round activations to 8 bits: a bound on the divergence, some times what is seen. The machine's ceiling is
    that of the file's own groups."""
    try:
        library()
    except LibraryMissing as missing:
        pytest.skip(str(missing))
    folder, path, kind = pair
    want = logits(folder, **DTYPE)[0].log_softmax(-1)
    mine, runner = logits(path, kernels="native", dtype="float32")
    mine = mine.log_softmax(-1)
    *_, (operations_per_s,) = gauge_of(runner, remembers=False)._multiply()
    assert operations_per_s > 0
    assert (runner.scheme.name, runner.scheme.group) == (
        "int4" if "4" in kind else "int8",
        16 if kind == "Q6_K" else 32,
    )
    divergence = (want.exp() * (want - mine)).sum(-1).mean()
    assert divergence < 0.003, divergence


def _matrices(folder):
    from safetensors.torch import load_file

    return [tensor for tensor in load_file(folder / "model.safetensors").values() if tensor.ndim == 2]


@pytest.mark.parametrize("variant", ["mixtral", "qwen3-moe"])
def test_stacks_of_experts_of_integers(variant, tmp_path):
    name, differences = VARIANTS[variant]
    own = {"moe_intermediate_size": 64, "head_dim": 32} if variant == "qwen3-moe" else {}
    VARIANTS["gguf-experts"] = (name, {**differences, **WIDE, **own})
    try:
        make("gguf-experts", tmp_path)
    finally:
        del VARIANTS["gguf-experts"]
    write(tmp_path, tmp_path / "model.gguf", "Q8_0")
    mine, want = (logits(path, **DTYPE)[0] for path in (tmp_path / "model.gguf", tmp_path))
    assert (mine - want).abs().max() < 2e-4 * want.abs().max()


def test_half_precision_files_are_read_as_they_are(tmp_path):
    make("llama", tmp_path)
    write(tmp_path, tmp_path / "model.gguf", "F16")
    assert load_gguf_config(tmp_path / "model.gguf").checkpoint_dtype == "float16"
    mine, want = (logits(path, **DTYPE)[0] for path in (tmp_path / "model.gguf", tmp_path))
    assert 0 < (mine - want).abs().max() < 0.02 * want.abs().max()


def test_a_stack_with_an_expert_too_many_is_refused(tmp_path):
    make("mixtral", tmp_path)
    config = tmp_path / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {"num_local_experts": values["num_local_experts"] - 1}))
    write(tmp_path, tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match=r"unknown to this architecture|has shape"):
        logits(tmp_path / "model.gguf", **DTYPE)


TOKENS = ["<s>", "<|im_end|>", "</s>", *(chr(letter) for letter in range(33, 126)), "ab"]
VOCABULARY = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 3] + [1] * 94,
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(folder, file with a tokenizer in it); the folder holds nothing else that is a model."""
    folder = tmp_path_factory.mktemp("whole")
    make("llama", folder)
    path = tmp_path_factory.mktemp("gguf") / "tiny-q8_0.gguf"
    write(folder, path, **VOCABULARY)
    return folder, path


def test_a_file_is_all_that_is_needed(whole):
    from splittime import LLM, SamplingParams

    folder, path = whole
    llm = LLM(path.parent, max_num_seqs=2, packed_cache="off")
    assert (llm.name, llm.resolved["eos_token_ids"]) == ("tiny-q8_0", (2, 1))
    assert llm.resolved["context_length"] == BASE["max_position_embeddings"]
    assert llm.tokenizer.render_chat([{"role": "user", "content": "ab"}]) == "ab</s>"
    output = llm.generate("abcab", SamplingParams(temperature=0.0, max_tokens=8))[0]
    prompt = [0, *(TOKENS.index(token) for token in ("ab", "c", "ab"))]
    assert list(output.prompt_token_ids) == prompt
    want = Driver(load_torch_runner(RunnerConfig(model_path=str(folder), max_num_seqs=2)))
    greedy = want.generate(Sequence("a", prompt), 8)
    assert output.token_ids == tuple(greedy)[: len(output.token_ids)]


def test_the_server_s_side_reads_it_without_torch(whole):
    code = (
        "import sys; from pathlib import Path; from splittime.assemble.model_source import load_tokenizer, locate\n"
        "tokenizer = load_tokenizer(locate(sys.argv[1]))\n"
        "assert tokenizer.decode(tokenizer.encode('abc')) == 'abc'; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(whole[1])], check=True, timeout=60)


def test_base_is_as_the_variants_expect():
    assert BASE["vocab_size"] > max(PROMPT)
