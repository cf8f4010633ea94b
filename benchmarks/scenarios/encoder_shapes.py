"""Random encoders of known shapes, as sentence-transformers keeps them in a folder: to measure how fast one of that
shape is, since figures do not hang on what its weights are."""

import json
from pathlib import Path
from typing import NamedTuple

import tokenizers
import torch
from tokenizers import models, pre_tokenizers, processors

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


class EncoderShape(NamedTuple):
    layers: int
    width: int
    heads: int
    inner: int
    vocabulary: int
    positions: int = 512


SHAPES = {"minilm": EncoderShape(6, 384, 12, 1536, 30_522)}  # all-MiniLM-L6-v2


def write_encoder(folder: Path, shape: EncoderShape) -> None:
    """Writes a BERT of this shape, whose embeddings are means of length 1. A word of its vocabulary is a token: w4, w5,
    and so on, behind the special ones."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.inner,
        max_position_embeddings=shape.positions,
    )
    BertModel(config).save_pretrained(folder)
    _write_tokenizer(folder, shape)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    listed = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(kinds.items())
    ]
    _write(folder / "modules.json", listed)
    _write(folder / "sentence_bert_config.json", {"max_seq_length": shape.positions, "do_lower_case": False})
    _write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": shape.width, **MEAN})
    (folder / "2_Normalize").mkdir()


MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}


def _write(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def _write_tokenizer(folder: Path, shape: EncoderShape) -> None:
    words = [*SPECIAL, *(f"w{number}" for number in range(len(SPECIAL), shape.vocabulary))]
    made = tokenizers.Tokenizer(models.WordPiece({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(word, words.index(word)) for word in ("[CLS]", "[SEP]")]
    )
    made.add_special_tokens(list(SPECIAL))
    made.save(str(folder / "tokenizer.json"))
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": shape.positions}
    _write(folder / "tokenizer_config.json", names | config)
