"""The model cards, written from `training/results.json` so that no figure in them is typed by hand."""

from training.export import PACKAGED, replace_text

TITLES = {"code": "splittime-code", "code-draft": "splittime-code-draft"}
PURPOSES = {
    "code": "The model that comes with splittime, so that a server can be started without a download.",
    "code-draft": "The draft of `code` for speculative decoding: the same tokenizer, a third of the parameters.",
}
LIMITS = """\
* It continues Python source. It follows no instructions, knows no facts, and often names things that do not exist.
* It is here to exercise and measure a server with real weights and real text. Do not ship what it writes.
* Its chat template only turns requests into comments; expect code, not an answer.
* It has learnt from the library's sources, and at length may repeat common parts of them (licence headers, for one).
"""
COMMANDS = {
    "code": "python -m training.train --model code --tokens 6000000 --export",
    "code-draft": "python -m training.train --model code-draft --tokens 3200000 --step-tokens 2048 --export",
}


def table(header: list[str], rows: list[list]) -> str:
    """A Markdown table."""
    lines: list[list] = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def shape_section(model: dict) -> str:
    """What the model is made of."""
    shape = model["shape"]
    return (
        f"LlamaForCausalLM, {model['parameters']:,} parameters in bfloat16 ({model['folder_bytes'] / 1e6:.1f} MB with "
        f"the tokenizer): {shape['num_hidden_layers']} layers, hidden size {shape['hidden_size']}, feed-forward "
        f"{shape['intermediate_size']}, {shape['num_attention_heads']} heads of {shape['head_dim']} over "
        f"{shape['num_key_value_heads']} key-value heads, tied embedding, rotary positions up to "
        f"{shape['max_position_embeddings']}, byte-level BPE of {shape['vocab_size']} tokens."
    )


def corpus_section(results: dict) -> str:
    """What it has read and what was kept from it."""
    corpus = results["corpus"]
    sizes = [[split, corpus[split]["files"], f"{corpus[split]['bytes']:,}"] for split in corpus if split != "skipped"]
    return (
        "The Python standard library's `.py` files with its tests, and nothing else. A file's split is the SHA-256 of "
        "its relative name modulo 20: 0 is held out, 1 is validation (picks the checkpoint), the rest is trained on. "
        "Files of equal text are kept once; tables of numbers, empty files and files that are not UTF-8 are left out. "
        "Files that are similar but not equal can be on both sides.\n\n" + table(["split", "files", "bytes"], sizes)
    )


def training_section(model: dict) -> str:
    """What the training cost."""
    runs = [
        [
            "continued, windows of 2048 only" if number else "from random weights",
            f"{run['tokens']:,}",
            f"{run['steps']:,}",
            run["wall_minutes"],
            f"{run['settings']['matrix_rate']} / {run['settings']['other_rate']}",
        ]
        for number, run in enumerate(model["training"])
    ]
    header = ["run", "tokens", "steps", "minutes", "peak rates: Muon / AdamW"]
    return (
        "On two CPU cores shared with other work, in float32; Muon for the layers' matrices, AdamW for the embedding "
        "and the norms; warm-up and cosine; the checkpoint with the lowest validation loss.\n\n" + table(header, runs)
    )


def verdict(results: dict, name: str) -> str:
    """One sentence on which compressors the model does better than."""
    own = results["models"][name]["heldout"]["bits_per_byte"]
    sizes = {
        f"{packer} ({kind.replace('_', ' ')})": size
        for packer, kinds in results["compressors_bits_per_byte"].items()
        for kind, size in kinds.items()
    }
    better = [packer for packer, size in sizes.items() if own < size]
    worse = [packer for packer, size in sizes.items() if own >= size]
    return (
        f"`{name}` needs fewer bits than: {', '.join(better) or 'none'}; not fewer than: {', '.join(worse) or 'none'}."
    )


def result_section(results: dict, name: str) -> str:
    """Bits per byte beside what general compressors need."""
    models = [[key, value["heldout"]["bits_per_byte"], ""] for key, value in results["models"].items()]
    packers = [[k, v["per_file"], v["concatenated"]] for k, v in results["compressors_bits_per_byte"].items()]
    positions = results["models"][name]["nats_per_token_by_position"]
    return (
        table(["bits per byte, held-out files", "per file", "concatenated"], models + packers)
        + "\n\nLower is better. *Per file*: each file on its own, the mean weighted by bytes. *Concatenated*: all the "
        f"files as one stream, so that a compressor can learn from one file for the next. {verdict(results, name)}\n\n"
        + table(["position in the window", *positions], [["nats per token", *positions.values()]])
    )


def sample_section(model: dict) -> str:
    """The recorded completions."""
    return "\n\n".join(f"{kind}:\n\n```python\n{text.rstrip()}\n```" for kind, text in model["samples"].items())


def card(results: dict, name: str) -> str:
    """The whole card of one model."""
    model = results["models"][name]
    sections = {
        "Shape": shape_section(model),
        "Data": corpus_section(results),
        "Training": training_section(model)
        + f"\n\nTo make it again:\n\n```sh\n{COMMANDS[name]}\npython -m training.evaluate\n```",
        "Held-out results": result_section(results, name),
        "Completions of `def read_json(path):`": sample_section(model),
        "Limits": LIMITS.rstrip(),
        "Licence": "The sources it has learnt from are under the Python Software Foundation License Version 2. The "
        "weights, the tokenizer and the code that made them are under splittime's Apache-2.0 licence.",
    }
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in sections.items())
    return f"# {TITLES[name]}\n\n{PURPOSES[name]}\n\n{body}\n"


def write_cards(results: dict) -> None:
    """Put a card into each packaged folder."""
    for name in results["models"]:
        replace_text(PACKAGED / name / "MODEL_CARD.md", card(results, name))
