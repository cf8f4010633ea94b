"""Embeddings of encoders equal transformers': alone, in a batch, in chunks; what an encoder cannot do is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

from splittime import LLM, SamplingParams
from splittime.assemble.model_source import load_tokenizer
from splittime.core import this_process
from splittime.core.errors import ConfigError, RequestError
from splittime.core.step import Admitted, Row, StepPlan
from splittime.models.encoder_config import ENCODERS, is_encoder, load_encoder_config, parse_encoder_config
from splittime.runner import encoder
from splittime.runner.config import RunnerConfig
from splittime.runner.encoder import load_encoder_runner

MAX_ABS_ERROR = 1e-4
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{number}" for number in range(50)), "##s"]
SIZES = {
    "vocab_size": len(WORDS),
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "max_position_embeddings": 66,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
MODERN = {"local_attention": 9, "global_attn_every_n_layers": 2, "num_hidden_layers": 5, "num_attention_heads": 4}
MODERN |= {"initializer_cutoff_factor": 9.0, "bos_token_id": 2, "cls_token_id": 2, "eos_token_id": 3, "sep_token_id": 3}
GEMMA = {"head_dim": 10, "num_key_value_heads": 2, "num_hidden_layers": 7, "query_pre_attn_scalar": 12}
GEMMA |= {"sliding_window": 9, "use_bidirectional_attention": True, "max_position_embeddings": 400}
VARIANTS = {
    "bert": ("BertModel", "Bert", {"max_position_embeddings": 64}),
    "bert-tanh": ("BertForMaskedLM", "Bert", {"max_position_embeddings": 64, "hidden_act": "gelu_new"}),
    "roberta": ("RobertaModel", "Roberta", {"type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}),
    "modern": ("ModernBertModel", "ModernBert", MODERN | {"max_position_embeddings": 400}),
    "modern-old": (
        "ModernBertForMaskedLM",
        "ModernBert",
        MODERN
        | {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "hidden_activation": "gelu_pytorch_tanh"},
    ),
    "embedding-gemma": ("Gemma3TextModel", "Gemma3Text", GEMMA),
    "xlm-roberta": ("XLMRobertaModel", "XLMRoberta", {"type_vocab_size": 1, "pad_token_id": 1}),
}
TEXTS = ["w1 w2 w3", "w4", " ".join(f"w{number % 50}s" for number in range(30)), "w7 what w8", "w9 " * 20]


def write_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    made.normalizer = tokenizers.normalizers.BertNormalizer()
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.add_special_tokens(WORDS[:4])
    made.save(str(folder / "tokenizer.json"))
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | {"tokenizer_class": "BertTokenizer"}))
    return made


def write_pooling(folder: Path, mode: str) -> None:
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for path, kind in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))


def make(variant: str, folder: Path, mode: str = "mean_tokens", **more: Any) -> Any:
    """Writes the checkpoint, and returns transformers' model of it."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    architecture, name, differences = VARIANTS[variant]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SIZES | differences | more))
    model = getattr(transformers, architecture)(config).float().eval()
    for parameter_name, parameter in model.named_parameters():
        if "bias" in parameter_name or "norm" in parameter_name.lower():  # else zeros or ones, which would hide errors
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    write_pooling(folder, mode)
    return getattr(model, model.base_model_prefix, model)


def expected(model: Any, ids: list[int], mode: str) -> np.ndarray:
    with torch.no_grad():
        states = model(torch.tensor([ids])).last_hidden_state[0].double()
    pooled = states[0] if mode == "cls_token" else states.mean(0)
    return (pooled / pooled.norm()).numpy()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mode", ["mean_tokens", "cls_token"])
def test_embeddings_equal_transformers_alone_and_in_a_batch(variant: str, mode: str, tmp_path: Path) -> None:
    model, tokenizer = make(variant, tmp_path, mode), write_tokenizer(tmp_path)
    llm = LLM(tmp_path, max_num_seqs=4, max_num_batched_tokens=64, num_threads=1)
    together = llm.embed(TEXTS)
    for text, embedding in zip(TEXTS, together, strict=True):
        ids = tokenizer.encode(text).ids
        wanted = expected(model, ids, mode)
        assert np.abs(np.array(embedding) - wanted).max() < MAX_ABS_ERROR
        (alone,) = llm.embed(text)
        assert np.abs(np.array(alone) - wanted).max() < MAX_ABS_ERROR
    (of_ids,) = llm.embed([tokenizer.encode(TEXTS[2]).ids])
    assert np.abs(np.array(of_ids) - np.array(together[2])).max() < MAX_ABS_ERROR


def test_a_modern_encoder_of_older_names_attends_near_and_far(tmp_path: Path) -> None:
    """Its config as the first ones were written, and texts of several chunks."""
    transformers = pytest.importorskip("transformers")
    make("modern", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    older = {"global_attn_every_n_layers": 3, "local_attention": 60, "position_embedding_type": "absolute"}
    older |= {"global_rope_theta": 500.0, "local_rope_theta": 30.0}
    kept = {name: value for name, value in config.items() if name not in ("layer_types", "rope_parameters")}
    (tmp_path / "config.json").write_text(json.dumps(kept | older))
    model, tokenizer = transformers.AutoModel.from_pretrained(tmp_path).float().eval(), write_tokenizer(tmp_path)
    llm = LLM(tmp_path, max_num_seqs=4, max_num_batched_tokens=512, num_threads=1)
    texts = [" ".join(f"w{number * 7 % 50}" for number in range(count)) for count in (30, 31, 61, 62, 130, 300, 398)]
    for text, embedding in zip(texts, llm.embed(texts), strict=True):
        wanted = expected(model, tokenizer.encode(text).ids, "mean_tokens")
        assert np.abs(np.array(embedding) - wanted).max() < MAX_ABS_ERROR


IDENTITY, TANH = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh"
DENSE = [(48, 96, True, TANH), (96, 20, False, IDENTITY)]


def write_dense(folder: Path, layers: list[tuple[int, int, bool, str]] = DENSE) -> list[torch.nn.Linear]:
    """Puts layers behind the pooling, as sentence-transformers writes them, and returns them."""
    safetensors = pytest.importorskip("safetensors.torch")
    modules = json.loads((folder / "modules.json").read_text())
    made = []
    for number, (inputs, outputs, has_bias, activation) in enumerate(layers, 2):
        place = folder / f"{number}_Dense"
        place.mkdir(exist_ok=True)
        said = {"in_features": inputs, "out_features": outputs, "bias": has_bias, "activation_function": activation}
        (place / "config.json").write_text(json.dumps(said))
        made.append(torch.nn.Linear(inputs, outputs, has_bias))
        safetensors.save_model(torch.nn.ModuleDict({"linear": made[-1]}), place / "model.safetensors")
        modules.insert(number, {"type": "sentence_transformers.models.Dense", "path": place.name})
    (folder / "modules.json").write_text(json.dumps(modules))
    return made


def test_windows_to_both_sides_and_layers_behind_the_pooling(tmp_path: Path) -> None:
    """As EmbeddingGemma is made, on texts within its window and far beyond it."""
    model = make("embedding-gemma", tmp_path, sliding_window=150)
    tokenizer, (wide, narrow) = write_tokenizer(tmp_path), write_dense(tmp_path)
    llm = LLM(tmp_path, max_num_seqs=4, max_num_batched_tokens=512, num_threads=1, kernels="native")
    texts = [" ".join(f"w{number * 7 % 50}" for number in range(count)) for count in (1, 73, 74, 149, 230, 398)]
    for text, embedding in zip(texts, llm.embed(texts), strict=True):
        with torch.no_grad():
            states = model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0]
            wanted = torch.nn.functional.normalize(narrow(torch.tanh(wide(states.mean(0)))), dim=0).numpy()
        assert np.abs(np.array(embedding) - wanted).max() < MAX_ABS_ERROR


@pytest.mark.parametrize(
    ("layers", "param"),
    [
        ([(47, 20, True, TANH)], "in_features"),
        ([(48, 20, True, "torch.nn.GELU")], "activation_function"),
        ([(48, 20, True, TANH)], "module_input_name"),
    ],
)
def test_a_layer_behind_the_pooling_that_cannot_be_meant(tmp_path: Path, layers, param: str) -> None:
    make("bert", tmp_path)
    write_dense(tmp_path, layers)
    if param == "module_input_name":
        path = tmp_path / "2_Dense" / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), param: "token_embeddings"}))
    with pytest.raises(ConfigError) as refused:
        load_encoder_runner(RunnerConfig(model_path=str(tmp_path), num_threads=1), lambda *told: None)
    assert (refused.value.info.param, "2_Dense/config.json" in str(refused.value)) == (param, True)


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    make("bert", folder)
    write_tokenizer(folder)
    return folder


def test_a_text_in_chunks_is_computed_whole_and_the_same_beside_another(bert: Path) -> None:
    runner = load_encoder_runner(RunnerConfig(model_path=str(bert), num_threads=1), lambda *told: None)
    asked = SamplingParams(pooling="mean", max_tokens=0, seed=0)
    one, other = (Admitted(name, ids, 0, asked, ()) for name, ids in (("one", (2, 9, 8, 7, 3)), ("other", (2, 5, 3))))

    def pooled(*rows: Row, admitted: tuple[Admitted, ...] = (), released: tuple[str, ...] = ()) -> list[np.ndarray]:
        found = runner.run(StepPlan(0, rows, admitted, released)).rows
        assert [row.error for row in found] == [None] * len(rows)
        return [np.frombuffer(row.pooled, np.float32) for row in found]

    whole = pooled(Row("one", 0, one.token_ids, (0,), 0), admitted=(one,))
    assert len(pooled(Row("one", 0, one.token_ids[:2], (0,), 0), admitted=(one,), released=("one",))[0]) == 0
    rows = (Row("other", 0, other.token_ids, (1,), 0), Row("one", 2, one.token_ids[2:], (), 0))
    beside = pooled(*rows, admitted=(other,))
    assert np.abs(beside[1] - whole[0]).max() < 1e-6
    assert not np.array_equal(beside[0], beside[1])


@pytest.mark.parametrize(
    ("variant", "inner"),
    [("bert", 80), ("modern", 80), ("bert", 37), ("bert-tanh", 64), ("bert-tanh", 37), ("embedding-gemma", 80)],
)
def test_a_vector_is_the_same_to_the_bit_on_any_number_of_threads(variant: str, inner: int, tmp_path: Path) -> None:
    make(variant, tmp_path, intermediate_size=inner)
    write_tokenizer(tmp_path)
    texts = [" ".join(f"w{number * 7 % 50}" for number in range(count)) for count in (60, 3, 17, 60, 41, 1, 33, 52)]
    limits = {"max_num_batched_tokens": 512, "kernels": "native", "max_model_len": 64}
    llm = LLM(tmp_path, num_threads=3, **limits)
    assert llm.resolved["kernels"] == "native"
    together, alone = llm.embed(texts), [llm.embed(text)[0] for text in texts]
    for others in (alone, LLM(tmp_path, num_threads=1, **limits).embed(texts), llm.embed(texts[::-1])[::-1]):
        assert np.array_equal(together, others)


@pytest.mark.parametrize(
    ("ids", "sampling", "said"),
    [((2, 999), SamplingParams(pooling="cls", seed=0), "999"), ((2,), SamplingParams(seed=0), "encoder")],
)
def test_a_request_that_cannot_be_answered_fails_alone(bert: Path, ids, sampling, said: str) -> None:
    runner = load_encoder_runner(RunnerConfig(model_path=str(bert), num_threads=1), lambda *told: None)
    wrong, right = Admitted("wrong", ids, 0, sampling, ()), Admitted("a", (2, 3), 0, SamplingParams(pooling="cls"), ())
    rows = (Row("wrong", 0, ids, (0,), 0), Row("a", 0, (2, 3), (1,), 0))
    first, second = runner.run(StepPlan(0, rows, (wrong, right))).rows
    assert said in str(first.error)
    assert (first.pooled, second.error, len(second.pooled)) == (b"", None, 4 * 48)


def test_as_long_a_text_as_there_are_positions_and_no_longer(bert: Path) -> None:
    llm = LLM(bert, num_threads=1)
    assert llm.max_model_len == 64
    assert len(llm.embed("w1 " * 62)[0]) == 48
    with pytest.raises(RequestError, match="64"):
        llm.embed("w1 " * 63)


def test_an_encoder_generates_nothing(bert: Path) -> None:
    llm = LLM(bert, num_threads=1)
    (output,) = llm.generate("w1", SamplingParams(max_tokens=3))
    assert output.error is not None
    assert "encoder" in output.error.message
    assert len(llm.embed("w1")[0]) == 48


@pytest.mark.parametrize(("native_ms", "chosen"), [(1.0, "native"), (3.0, "torch")])
def test_an_encoder_is_computed_by_the_kernels_that_are_quicker(bert: Path, native_ms, chosen, monkeypatch) -> None:
    took_ms = {"native": native_ms, "torch": 2.0}
    monkeypatch.setattr(encoder, "_product_ms", lambda kernels, config, model: took_ms[kernels])
    llm = LLM(str(bert), dtype="float32")
    assert (llm.resolved["kernels"], llm.resolved["num_threads"]) == (chosen, this_process.num_cores())
    assert f"native {native_ms:.2f}, torch 2.00" in llm.resolved["kernels_reason"]


def test_weights_can_be_rounded(bert: Path) -> None:
    plain, rounded = (LLM(bert, num_threads=1, quantization=way).embed(TEXTS) for way in (None, "int8"))
    likeness = (np.array(plain) * np.array(rounded)).sum(-1)
    assert (likeness > 0.99).all()
    assert (likeness < 1.0).any()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("tensor_parallel_size", 2),
        ("load_format", "dummy"),
        ("max_model_len", 65),
        ("kv_cache_dtype", "float32"),
        ("speculative_config", '{"method": "suffix"}'),
    ],
)
def test_settings_that_an_encoder_has_no_place_for(bert: Path, setting: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        LLM(bert, **{setting: value})
    assert refused.value.info.param == setting


LOCAL = "local_rope_theta"
CONFIG = {"architectures": ["BertModel"], **SIZES}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "swish"),
        ("position_embedding_type", "relative_key"),
        ("is_decoder", True),
        ("hidden_size", 49),
        ("num_hidden_layers", 10**6),
        ("type_vocab_size", 0),
        ("layer_norm_eps", 2.0),
        ("max_position_embeddings", 1),
        ("quantization_config", {}),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_encoder_config(CONFIG | {key: value})
    assert refused.value.info.param == key


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_activation", "relu"),
        ("layer_types", ["full_attention"]),
        ("layer_types", ["chunked_attention"] * 3),
        ("local_attention", 1),
        ("norm_eps", 2.0),
        ("num_attention_heads", 16),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        ("attention_bias", "yes"),
        ("rope_parameters", {"rope_theta": 160_000.0, "rope_type": "default"}),
        ("rope_parameters", [160_000.0]),
        ("rope_parameters.full_attention.rope_type", "yarn"),
        ("rope_parameters.sliding_attention.rope_theta", 0),
    ],
)
def test_a_modern_config_that_cannot_be_served_is_refused_by_name(key: str, value: Any) -> None:
    given = {key: value}
    for name in reversed(key.split(".")):
        given = {name: value if name == key.split(".")[-1] else given}
    with pytest.raises(ConfigError) as refused:
        parse_encoder_config(CONFIG | {"architectures": ["ModernBertModel"]} | given)
    assert refused.value.info.param in (key, "hidden_size")


def test_a_local_base_of_none_is_the_global_one() -> None:
    given = CONFIG | {"architectures": ["ModernBertModel"], "global_rope_theta": 5000.0}
    thetas = [[layer.theta for layer in parse_encoder_config(given | more).modern] for more in ({}, {LOCAL: None})]
    assert thetas == [[5000.0, 10_000.0, 10_000.0], [5000.0] * 3]


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias", "norm_bias"])
def test_a_bias_that_the_config_has_and_the_checkpoint_does_not_is_refused(key: str, tmp_path: Path) -> None:
    make("modern", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: True}))
    with pytest.raises(ConfigError, match="bias"):
        LLM(tmp_path)


def test_encoders_are_known_by_their_architecture(bert: Path, tmp_path: Path) -> None:
    assert is_encoder(bert)
    assert not is_encoder(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": [["BertModel"]]}')
    assert not is_encoder(tmp_path)
    assert {parse_encoder_config(CONFIG | {"architectures": [name]}).architecture for name in ENCODERS} == set(ENCODERS)


JUDGES = {
    "bert": ("BertForSequenceClassification", "Bert", {"max_position_embeddings": 64}),
    "roberta": ("RobertaForSequenceClassification", "Roberta", {"type_vocab_size": 1, "pad_token_id": 1}),
}
PAIRS = [("w1 w2", "w3"), ("w1", "w4s w5 w6"), ("w7s", "what")]


def make_judge(variant: str, folder: Path, **more: Any) -> Any:
    """Writes a cross-encoder, and returns transformers' model of it and the tokenizer."""
    transformers = pytest.importorskip("transformers")
    architecture, name, differences = JUDGES[variant]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SIZES | differences | more), num_labels=1)
    model = getattr(transformers, architecture)(config).float().eval()
    for parameter_name, parameter in model.named_parameters():
        if "bias" in parameter_name or "norm" in parameter_name.lower():
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    tokenizer = write_tokenizer(folder)
    ends, kind = ("[SEP]", 1) if variant == "bert" else ("[SEP] [SEP]", 0)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair=f"[CLS] $A {ends} $B:{kind} [SEP]:{kind}",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return model, tokenizer


@pytest.mark.parametrize("variant", JUDGES)
def test_scores_of_pairs_equal_transformers(variant: str, tmp_path: Path) -> None:
    model, tokenizer = make_judge(variant, tmp_path)
    runner = load_encoder_runner(RunnerConfig(model_path=str(tmp_path), num_threads=1), lambda *told: None)
    assert (runner.resolved.pooling.score, runner.resolved.unused_tensors) == ("sigmoid", ())
    asked = SamplingParams(pooling="score", max_tokens=0, seed=0)
    for number, pair in enumerate(PAIRS):
        encoded = tokenizer.encode(*pair)
        with torch.no_grad():
            ids, types = torch.tensor([encoded.ids]), torch.tensor([encoded.type_ids])
            wanted = model(ids, token_type_ids=types).logits.item()
        assert load_tokenizer(tmp_path).encode_pair(*pair) == tuple(encoded.ids)
        admitted = Admitted(str(number), tuple(encoded.ids), 0, asked, ())
        plan = StepPlan(number, (Row(str(number), 0, admitted.token_ids, (0,), 0),), (admitted,))
        (row,) = runner.run(plan).rows
        assert abs(np.frombuffer(row.pooled, np.float32)[0] - wanted) < MAX_ABS_ERROR
    with pytest.raises(RequestError, match="rerank"):
        LLM(tmp_path, num_threads=1).embed("w1")


def test_what_becomes_of_a_score_is_said_by_the_config(tmp_path: Path) -> None:
    make_judge("bert", tmp_path)
    path = tmp_path / "config.json"
    plain = json.loads(path.read_text())
    linear = "torch.nn.modules.linear.Identity"
    for more, kind in (
        ({"sbert_ce_default_activation_function": linear}, "none"),
        ({"sentence_transformers": {"activation_fn": linear}}, "none"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, "sigmoid"),
    ):
        path.write_text(json.dumps(plain | more))
        assert load_encoder_config(tmp_path).pooling.score == kind
    for more, param in (
        ({"sbert_ce_default_activation_function": "Tanh"}, "sbert_ce_default_activation_function"),
        ({"id2label": {"0": "no", "1": "yes"}}, "id2label"),
    ):
        path.write_text(json.dumps(plain | more))
        with pytest.raises(ConfigError) as refused:
            load_encoder_config(tmp_path)
        assert refused.value.info.param == param
