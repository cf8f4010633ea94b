"""The byte-level BPE tokenizer, made for Python source.

Owns how text is cut before merges are learnt. The rules, in order:

* a run of two or more spaces is one piece, so an indentation is one token and the word after it is the same token
  wherever it is indented;
* line ends are pieces of their own, never merged with the indentation that follows: a prompt that stops at the end of
  a line is then cut exactly as the same line is cut in training;
* a name keeps its underscores and takes one space before it; digits are cut in groups of up to three;
* `.` is never merged into the name that follows, for the same reason as line ends: prompts often stop at `self.`.

All 256 bytes are in the vocabulary, so any text round-trips (`tests/training/test_training_tokenizer.py`).
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
PIECES = r" {2,}|\n+| ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s"

# A base model has seen comments and code, never a dialogue. Requests become comments and answers stay plain code.
# Every line end is inside an expression, so the text is the same whether or not blocks are trimmed.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] + '\\n\\n' }}"
    "{% else %}"
    "{% for line in message['content'].split('\\n') %}{{ ('# ' + line).strip() + '\\n' }}{% endfor %}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Learn the merges from the texts; the same texts give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_config(max_positions: int) -> dict[str, object]:
    """What `tokenizer_config.json` says beside `tokenizer.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "model_max_length": max_positions,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder."""
    return Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))


def as_json(value: object) -> str:
    """JSON as the model folders hold it: indented, with a final newline."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
