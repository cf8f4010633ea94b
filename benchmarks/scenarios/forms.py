"""What it costs to hold answers to a form: tokens a second with one over without, and what a schema and a mask take.

    python -m benchmarks.scenarios.forms [--model FOLDER] [--load-format dummy] [--threads 2] [--sizes 1 8 32]
        [--tokens 96] [--repeats 5] [--schemas 500] [--tokenizer FILE] [--small] [--json]

* speed: so many requests at once, free and held to a form by turns, the same prompts, seeds and numbers of tokens. The
  form is lines of JSON objects without end (`LINES`), so both write as many tokens.
* schemas: so many of `form_schemas`; each is compiled, and answered once by the model at temperature 1, 16 requests at
  once. An answer that has ended must match its schema; one that was cut may not have ended.
* masks: a walk of tokens drawn from the masks themselves, through each schema, without a model: what one mask takes.
  `--tokenizer`: another tokenizer.json, whose vocabulary is larger.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
from tokenizers import Tokenizer as TokenizerFile

from benchmarks.report import file_result
from benchmarks.scenarios.form_schemas import schemas
from splittime import LLM, SamplingParams
from splittime.assemble import model_source
from splittime.core.errors import RequestError
from splittime.kernels.draw import has_bits
from splittime.runner.form_walk import FormPlace
from splittime.runner.grammars import Grammars
from splittime.text import grammars

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["int", "str", "list"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 9999},
        "is_used": {"type": "boolean"},
    },
    "required": ["name", "kind", "size", "is_used"],
    "additionalProperties": False,
}
LINES = 'start: record "\\n" start\nrecord: %json ' + json.dumps(RECORD)
PROMPTS = ["def add(a, b):", "# a list\n", "import ", "x = {"]
AT_ONCE, WALK_TOKENS, ANSWER_TOKENS = 16, 48, 160


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--small", action="store_true", help="to see that it works: the figures mean nothing")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sizes, tokens, repeats, count = arguments.sizes, arguments.tokens, arguments.repeats, arguments.schemas
    if arguments.small:
        sizes, tokens, repeats, count = [2], 8, 1, 4
    asked = {"load_format": arguments.load_format, "quantization": arguments.quantization}
    limits = {"max_num_seqs": max(AT_ONCE, *sizes), "max_model_len": 512, "num_threads": arguments.threads}
    llm = LLM(arguments.model, **asked, **limits, speculative_config='{"method": "none"}')
    say: Callable[[str], None] = (lambda text: None) if arguments.json else print
    figures: dict[str, Any] = {"speed": [speed(llm, size, tokens, repeats, say) for size in sizes]}
    drawn = schemas(count)
    figures |= {"schemas": answers(llm, drawn, say), "masks": masks(arguments.tokenizer, drawn, say)}
    path = file_result("forms", figures, vars(arguments), arguments.json)
    say(f"written to {path}")


def speed(llm: LLM, size: int, tokens: int, repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Free and held by turns, after one turn that does not count."""
    grammar = grammars.of_lark(LINES, "grammar")
    rates: dict[str, list[float]] = {"free": [], "held": []}
    for number in range(repeats + 1):
        for name in sorted(rates, reverse=number % 2 == 0):
            rate = _rate(llm, size, tokens, number, grammar if name == "held" else "")
            rates[name] += [rate] if number else []
    ratios = [held / free for free, held in zip(rates["free"], rates["held"], strict=True)]
    found = {"requests": size, "free_tokens_per_s": statistics.median(rates["free"])}
    found |= {"ratio": statistics.median(ratios), "ratio_from": min(ratios), "ratio_to": max(ratios)}
    say(f"{size:>3} at once {found['free_tokens_per_s']:8.0f}/s free, held {found['ratio']:.3f} of it "
        f"({min(ratios):.3f} to {max(ratios):.3f})")  # fmt: skip
    return found


def _rate(llm: LLM, size: int, tokens: int, seed: int, grammar: str) -> float:
    prompts = [f"# {number}\n{PROMPTS[number % len(PROMPTS)]}" for number in range(size)]
    common = {"max_tokens": tokens, "temperature": 1.0, "ignore_eos": not grammar, "grammar": grammar}
    begin_s = time.monotonic()
    outputs = llm.generate(prompts, [SamplingParams(seed=seed + number, **common) for number in range(size)])
    took_s = time.monotonic() - begin_s
    counts = {len(output.token_ids) for output in outputs}
    if counts != {tokens}:
        raise SystemExit(f"answers have {sorted(counts)} tokens where {tokens} were asked for")
    return size * tokens / took_s


def answers(llm: LLM, drawn: Sequence[dict[str, Any]], say: Callable[[str], None]) -> dict[str, Any]:
    """Returns how the answers to these schemas ended, and which are wrong."""
    ended: Counter[str] = Counter()
    wrong: list[Any] = []
    for begin in range(0, len(drawn), AT_ONCE):
        some = drawn[begin : begin + AT_ONCE]
        params = [
            SamplingParams(max_tokens=ANSWER_TOKENS, temperature=1.0, seed=number, grammar=_grammar(schema))
            for number, schema in enumerate(some, begin)
        ]
        outputs = llm.generate([PROMPTS[number % len(PROMPTS)] for number in range(len(some))], params)
        for schema, output in zip(some, outputs, strict=True):
            ended[str(output.finish_reason)] += 1
            if output.finish_reason != "length" and not _is_right(schema, output.text):
                wrong.append({"schema": schema, "answer": output.text, "error": str(output.error)})
    say(f"{len(drawn)} schemas: {dict(ended)}, {len(wrong)} answers are wrong")
    return {"ended": dict(ended), "num_wrong": len(wrong), "wrong": wrong[:5]}


def _is_right(schema: dict[str, Any], answer: str) -> bool:
    try:
        return bool(jsonschema_rs.is_valid(schema, json.loads(answer)))
    except ValueError:
        return False


def masks(file: Path | None, drawn: Sequence[dict[str, Any]], say: Callable[[str], None]) -> dict[str, Any]:
    text = (file or model_source.locate(None) / "tokenizer.json").read_text(encoding="utf-8")
    vocab_size = TokenizerFile.from_str(text).get_vocab_size()
    known, rng = Grammars(lambda: text, vocab_size), np.random.default_rng(0)
    begin_s = time.monotonic()
    known.compile(_grammar({"type": "null"}))
    first_s, compile_ms, mask_us, refused = time.monotonic() - begin_s, [], [], 0
    for schema in drawn:
        begin_ns = time.perf_counter_ns()
        try:
            known.compile(_grammar(schema))
        except RequestError:
            refused += 1
            continue
        compile_ms.append((time.perf_counter_ns() - begin_ns) / 1e6)
        mask_us += _walk(known, _grammar(schema), rng)
    found = {"vocab_size": vocab_size, "first_s": first_s, "refused": refused, "compile_ms": _told(compile_ms)}
    found["mask_us"] = _told(mask_us)
    say(f"vocabulary {vocab_size}: the tokenizer and a first schema {first_s:.2f} s; then a schema, in ms: "
        f"{found['compile_ms']}; a mask, in us: {found['mask_us']}; {refused} refused")  # fmt: skip
    return found


def _walk(known: Grammars, grammar: str, rng: np.random.Generator) -> list[float]:
    walk, masks, tokens, taken = known.walk(grammar), known.masks(), np.zeros(0, np.int64), []
    for _ in range(WALK_TOKENS):
        begin_ns = time.perf_counter_ns()
        place = FormPlace(walk, tokens, len(tokens), (0,))
        allowed = masks.look([place])[place.key].allowed
        taken.append((time.perf_counter_ns() - begin_ns) / 1e3)
        assert allowed is not None
        token = int(rng.choice(np.flatnonzero(has_bits(allowed, 32 * len(allowed)))))
        if token == 0:
            break
        tokens = np.append(tokens, token)
    return taken


def _grammar(schema: dict[str, Any]) -> str:
    return grammars.of_json_schema(schema, "schema")


def _told(values: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": round(float(p50), 3), "p99": round(float(p99), 3), "max": round(max(values), 3)}


if __name__ == "__main__":
    main()
