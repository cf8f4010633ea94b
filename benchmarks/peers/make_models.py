"""Random-weight checkpoints of real shapes, for engines to race on where no trained weights of that size are at hand.

    python -m benchmarks.peers.make_models FOLDER [llama-1b qwen3-0.6b small tiny]

Weights: bfloat16, normal with standard deviation 0.02, seed 0; norms are one. What such a model says means nothing,
what it costs is the same. The tokenizer is a byte-level BPE trained on Python's standard library, filled up to the
model's vocabulary with pairs of its own tokens, so that every id that a random model says has a text and no server is
spared work. Needs the `dev` extra (transformers).
"""

import argparse
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.progress import track
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

SPECIAL = ("<|begin|>", "<|end|>", "<|turn|>", "<|done|>")
TRAINED_TOKENS = 32_000
# The split before merging that Llama 3 published: converters that must name the rule know this one.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|done|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
COMMON = {"tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1, "dtype": "bfloat16"}
MODELS = {
    "llama-1b": lambda: LlamaConfig(  # type: ignore[call-arg]
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=8192,
        rope_theta=500_000.0,
        rms_norm_eps=1e-5,
        **COMMON,
    ),
    "qwen3-0.6b": lambda: Qwen3Config(  # type: ignore[call-arg]
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-6,
        **COMMON,
    ),
    "small": lambda: LlamaConfig(  # type: ignore[call-arg]
        vocab_size=33_024,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=8192,
        rope_theta=500_000.0,
        rms_norm_eps=1e-5,
        **COMMON,
    ),
    "tiny": lambda: LlamaConfig(  # type: ignore[call-arg]
        vocab_size=33_024,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        rope_theta=500_000.0,
        rms_norm_eps=1e-5,
        **COMMON,
    ),
}


def trained_tokenizer() -> Tokenizer:
    """Byte-level BPE of `TRAINED_TOKENS` entries, trained on the standard library's top level."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TRAINED_TOKENS,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    files = sorted(str(path) for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    tokenizer.train(files, trainer)
    return tokenizer


def filled_up(tokenizer: Tokenizer, vocab_size: int) -> Tokenizer:
    """The tokenizer with further merges until it has `vocab_size` entries."""
    state = json.loads(tokenizer.to_str())
    vocab, merges = state["model"]["vocab"], state["model"]["merges"]
    for left, right in _pairs(vocab):
        if len(vocab) == vocab_size:
            break
        if left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append([left, right])
    return Tokenizer.from_str(json.dumps(state))


def _pairs(vocab: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Pairs of the trained tokens that are plain letters: merging them leaves valid text."""
    words = sorted((token for token in vocab if token.isascii() and token.isalpha()), key=vocab.__getitem__)
    for right in words:
        for left in words:
            yield left, right


def save(folder: Path, config: LlamaConfig | Qwen3Config, tokenizer: Tokenizer) -> int:
    """Write the checkpoint; returns its number of parameters."""
    torch.set_default_dtype(torch.bfloat16)
    model = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, 0.02, generator=generator))
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=filled_up(tokenizer, config.vocab_size),
        bos_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        pad_token=SPECIAL[1],
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    _for_older_readers(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _for_older_readers(folder: Path) -> None:
    """Keys as transformers 4 wrote them, which the peers' converters still read."""
    for name, change in (
        ("config.json", lambda found: {"rope_theta": found["rope_parameters"]["rope_theta"]}),
        ("tokenizer_config.json", lambda found: {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ):
        found = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**found, **change(found)}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=["llama-1b", "qwen3-0.6b"], metavar="NAME", help=", ".join(MODELS))
    arguments = parser.parse_args()
    tokenizer = trained_tokenizer()
    for name in track(arguments.names, "models"):
        count = save(arguments.folder / name, MODELS[name](), tokenizer)
        print(f"{name}: {count / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()
