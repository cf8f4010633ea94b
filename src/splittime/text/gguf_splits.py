"""How a text is cut before byte-level BPE, by the name that a GGUF file gives it (`tokenizer.ggml.pre`).

The patterns are those of the models' own tokenizers; each cuts what the one before it left over, as llama.cpp does:

    gpt-2        GPT-2: `pat` of openai/gpt-2, src/encoder.py
    llama-bpe    Llama 3: `pat_str` of meta-llama/llama3, llama/tokenizer.py
    qwen2        Qwen2: `pre_tokenizer` of its tokenizer.json, digits one by one
    smollm       digits one by one, then as GPT-2: `pre_tokenizer` of SmolLM's, StarCoder's and Refact's tokenizer.json
    tekken       Mistral Nemo: `pattern` of its tekken.json
    deepseek-coder, hunyuan-dense, seed-coder  `pre_tokenizer` of their tokenizer.json
    dbrx         `pat_str` of cl100k_base, openai/tiktoken, which OLMo 2, Phi-4 and Granite 4 have too; glm4 alike
    gpt-4o       `pat_str` of o200k_base, openai/tiktoken: gpt-oss and Phi-4-mini
    default      what llama.cpp falls back to, for files made before the key existed

`ignores_merges`: a piece that is a token as a whole is that token, whatever the merges say.
"""

from dataclasses import dataclass

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SHORT}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2 = rf"{_SHORT}|{_WORDS}|\p{{N}}|{_SIGNS}|{_SPACES}"
_SEED = rf"{_SHORT}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_CASED = r"[^\r\n\p{L}\p{N}]?" + _UPPER
_PATHS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_TEKKEN = rf"{_CASED}*{_LOWER}+|{_CASED}+{_LOWER}*|\p{{N}}|{_PATHS}"
_GPT4O = rf"{_CASED}*{_LOWER}+{_SHORT}?|{_CASED}+{_LOWER}*{_SHORT}?|\p{{N}}{{1,3}}|{_PATHS}"
_HUNYUAN = r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES


@dataclass(frozen=True)
class TextSplit:
    """adds_bos: unless the file says otherwise."""

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False


_AS_GPT2 = TextSplit((_GPT2,))
_AS_LLAMA3 = TextSplit((_LLAMA3,), ignores_merges=True, adds_bos=True)
_AS_QWEN2 = TextSplit((_QWEN2,))
_SINGLE_DIGITS = TextSplit((r"\p{N}", _GPT2))

SPLITS = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "exaone4"), _AS_GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _AS_LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe"), TextSplit((_LLAMA3,))),
    "glm4": TextSplit((_LLAMA3,), ignores_merges=True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "hunyuan"), _AS_QWEN2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _SINGLE_DIGITS),
    "tekken": TextSplit((_TEKKEN,), ignores_merges=True, adds_bos=True),
    "gpt-4o": TextSplit((_GPT4O,)),
    "seed-coder": TextSplit((_SEED,)),
    "hunyuan-dense": TextSplit((r"\p{N}{1,3}", r"[一-龥\u3040-\u30ff]+", _HUNYUAN)),
    "deepseek-coder": TextSplit((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")),
    "default": TextSplit((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
