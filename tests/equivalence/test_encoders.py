"""Embeddings of encoders equal transformers': alone, in a batch, in chunks; what an encoder cannot do is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

from splittime import LLM, SamplingParams
from splittime.core.errors import ConfigError, RequestError, SplittimeError
from splittime.models.encoder_config import ENCODERS, is_encoder, parse_encoder_config

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
VARIANTS = {
    "bert": ("BertModel", "Bert", {"max_position_embeddings": 64}),
    "bert-tanh": ("BertForMaskedLM", "Bert", {"max_position_embeddings": 64, "hidden_act": "gelu_new"}),
    "roberta": ("RobertaModel", "Roberta", {"type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}),
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


def make(variant: str, folder: Path, mode: str = "mean_tokens") -> Any:
    """Writes the checkpoint, and returns transformers' model of it."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    architecture, name, differences = VARIANTS[variant]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SIZES | differences))
    model = getattr(transformers, architecture)(config).float().eval()
    for parameter_name, parameter in model.named_parameters():
        if "bias" in parameter_name or "Norm" in parameter_name:  # else zeros or ones, which would hide errors
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


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    make("bert", folder)
    write_tokenizer(folder)
    return folder


def test_a_text_in_chunks_is_computed_whole(bert: Path) -> None:
    whole = LLM(bert, num_threads=1).embed(TEXTS)
    cut = LLM(bert, num_threads=1, max_num_seqs=4, max_num_batched_tokens=16)
    cut.configure(enable_chunked_prefill=True, max_prefill_tokens=5) if hasattr(cut, "configure") else None
    assert np.abs(np.array(cut.embed(TEXTS)) - np.array(whole)).max() < MAX_ABS_ERROR


def test_as_long_a_text_as_there_are_positions_and_no_longer(bert: Path) -> None:
    llm = LLM(bert, num_threads=1)
    assert llm.max_model_len == 64
    assert len(llm.embed("w1 " * 62)[0]) == 48
    with pytest.raises(RequestError, match="64"):
        llm.embed("w1 " * 63)


def test_an_encoder_generates_nothing(bert: Path) -> None:
    llm = LLM(bert, num_threads=1)
    try:
        (output,) = llm.generate("w1", SamplingParams(max_tokens=3))
        assert output.error is not None
        assert "encoder" in output.error.message
    except SplittimeError as error:
        assert "encoder" in str(error)
    assert len(llm.embed("w1")[0]) == 48


def test_weights_can_be_rounded(bert: Path) -> None:
    plain, rounded = (LLM(bert, num_threads=1, quantization=way).embed(TEXTS) for way in (None, "int8"))
    likeness = (np.array(plain) * np.array(rounded)).sum(-1)
    assert (likeness > 0.99).all()
    assert (likeness < 1.0).any()


@pytest.mark.parametrize(
    ("setting", "value"), [("tensor_parallel_size", 2), ("load_format", "dummy"), ("max_model_len", 65)]
)
def test_settings_that_an_encoder_has_no_place_for(bert: Path, setting: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        LLM(bert, **{setting: value})
    assert refused.value.info.param == setting


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


def test_encoders_are_known_by_their_architecture(bert: Path, tmp_path: Path) -> None:
    assert is_encoder(bert)
    assert not is_encoder(tmp_path)
    assert {parse_encoder_config(CONFIG | {"architectures": [name]}).architecture for name in ENCODERS} == set(ENCODERS)
