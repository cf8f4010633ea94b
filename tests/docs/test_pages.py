"""`tests/guides` runs every command of README.md and the guides; none escapes it, and every flag they name exists."""

import re
from pathlib import Path

import pytest
import typer
from pages import BLOCK, PAGES, ROOT, RUN, blocks

from splittime.cli.main import app

NOT_RUN = {
    "README.md": ["make serve", "pip install --constraint constraints.txt ."],
    "docs/start.md": ["apt-get install g++ make python3-venv", "python3 -m venv .venv && . .venv/bin/activate"],
    "docs/guides/access.md": [
        "splittime serve --api-keys-file keys.toml",
        "splittime serve --ssl-certfile cert.pem --ssl-keyfile key.pem",
    ],
    "docs/guides/embeddings.md": [
        "import openai",
        "curl -s http://127.0.0.1:8000/v1/rerank -H 'Content-Type: application/json' -d '{",
    ],
    "docs/guides/messages.md": [
        "curl -s http://127.0.0.1:8000/v1/messages -H 'Content-Type: application/json' \\",
        "import anthropic",
    ],
    "docs/guides/responses.md": ["import openai"],
    "docs/guides/operate.md": ["promtool test rules deploy/prometheus/server.test.yml"],
    "docs/guides/lora.md": [
        "splittime serve ./models/llama --enable-lora --lora-modules sql=./sql --lora-modules mail=./mail",
        "curl -s http://127.0.0.1:8000/v1/load_lora_adapter -H 'Content-Type: application/json' -d '{",
    ],
    "docs/guides/gateway.md": ["splittime gateway --config gateway.toml", "splittime gateway lint"],
    "docs/guides/gateway-apis.md": ["import openai"],
    "docs/guides/gateway-config.md": [
        "splittime gateway rehearse new.toml --config gateway.toml --ledger gateway.sqlite   # what would be different",
        "splittime gateway apply new.toml --canary 10%",
    ],
    "docs/guides/cluster.md": [
        "splittime up --config cluster.toml",
        "splittime up --config cluster.toml --apply",
        "pip install 'splittime[cluster]'",
    ],
    "docs/guides/gateway-routing.md": [
        "splittime gateway rehearse new.toml --config gateway.toml --ledger gateway.sqlite"
    ],
    "docs/guides/tools.md": [
        "curl -s http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -d '{",
    ],
    "docs/guides/gguf.md": [
        'splittime run ./model.gguf "Why is the sky blue?" --max-tokens 24',
        "hf download bartowski/Llama-3.2-1B-Instruct-GGUF Llama-3.2-1B-Instruct-Q4_K_M.gguf --local-dir .",
    ],
    "docs/guides/gpu.md": [
        "splittime serve ./model --kernels triton",
        "splittime serve ./model --kv-offload-memory-bytes 64GiB",
        "sh benchmarks/gpu/run.sh OUT .venv/bin/python              # everything, at most 38 minutes",
        "pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_17_x86_64 \\",
    ],
    "docs/guides/load-test-vllm.md": ["vllm serve Qwen/Qwen3-0.6B"],
    "docs/guides/plan.md": [
        "splittime plan light.json,heavy.json --slo ttft_p99=2s --rate 200 --input-tokens 64 --output-tokens 32"
    ],
    "docs/guides/sleep.md": ["splittime serve --port 8001 --kv-export"],
    "docs/guides/whole-request.md": [
        "import openai",
        "splittime explain cmpl-5f3a --url http://127.0.0.1:8000",
        "curl -s http://127.0.0.1:8000/ledger/hops -H 'Content-Type: application/json' -d '{",
    ],
    "docs/guides/why-is-my-vllm-slow.md": [
        "splittime explain --slowest 1",
        "path/to/vllm-env/bin/pip install .    # in this folder",
        "splittime attach vllm --ledger-file slow.sqlite -- serve ./model --served-model-name code --max-num-seqs 2",
        "splittime bench run http://127.0.0.1:8000 --rate 20 --duration 20s --input-tokens 100 \\",
        "splittime doctor http://127.0.0.1:8000",
        "splittime simulate slow.sqlite --check",
        "splittime simulate fixed.sqlite --max-num-seqs 2",
        "splittime attach vllm --ledger-file fixed.sqlite -- serve ./model --served-model-name code --max-num-seqs 16",
        "splittime tune --slo ttft_p99=400ms,tpot_p99=60ms --rate 20 --input-tokens 100 --output-tokens 40 \\",
    ],
}
"""What needs a card, the network, another program or a quiet machine. Each says why in the page."""
OPEN_OTHERWISE = {
    "index",
    "distill",
    "gateway-config",
    "plan",
    "quality",
    "tune",
    "what-if",
    "whole-request",
    "why-slow",
}
"""Guides that go through several steps: each shows what the later ones print."""
OF_OTHERS = {"--extra-index-url", "--no-deps", "--api-server-count", "--data-parallel-size"}
"""Flags of pip and of vLLM that pages name."""
COMMAND = re.compile(r"^(?:\$ |    )?(?:splittime|curl|pip|make|python|sh) \S.*", re.MULTILINE)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")


def test_what_is_not_run_is_known():
    found = {page: [b.text.splitlines()[0] for b in blocks(page) if b.reason is not None] for page in PAGES}
    assert {page: first for page, first in found.items() if first} == NOT_RUN


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "/guides/" in page and Path(page).stem not in OPEN_OTHERWISE]
)
def test_a_guide_opens_with_a_command_and_what_it_prints(page: str):
    assert any(block.printed for block in blocks(page)[:2])


@pytest.mark.parametrize("page", PAGES)
def test_no_page_names_what_the_default_model_is_called(page: str):
    """It goes by what is installed: a page names the model itself, or asks /v1/models."""
    assert "splittime-code" not in (ROOT / page).read_text()


@pytest.mark.parametrize("page", PAGES)
def test_no_command_hides_in_a_block_that_is_not_run(page: str):
    text = (ROOT / page).read_text()
    fenced = [found["text"] for found in BLOCK.finditer(text) if found["language"] not in (*RUN, "yaml")]
    indented = re.findall(r"^    .*$", BLOCK.sub("", text), re.MULTILINE)
    assert COMMAND.findall("\n".join([*fenced, *indented])) == []


def test_every_flag_that_a_page_names_exists():
    known = {*_flags(typer.main.get_command(app)), "--split", *OF_OTHERS}
    for page in [*PAGES, *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs" / "concepts").iterdir())]:
        spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", (ROOT / page).read_text())
        spans += [b.text for b in blocks(page) if "splittime" in b.text]
        named = {flag for span in spans for flag in FLAG.findall(span)}
        assert named <= known, f"{page}: {sorted(named - known)}"


def _flags(command) -> list[str]:
    own = [flag for option in command.params for flag in (*option.opts, *option.secondary_opts)]
    return own + [flag for part in getattr(command, "commands", {}).values() for flag in _flags(part)]
