"""The packaged model through the commands and through `LLM`, with torch: the whole way, once."""

import json
import subprocess
import sys

import pytest

import splittime
from splittime.assemble import model_source
from splittime.core.errors import ConfigError, RequestError
from splittime.ledger.account import verify_intervals
from splittime.ledger.account_json import account_from_json

pytestmark = pytest.mark.timeout(600)  # processes of its own, on a busy machine

try:
    model_source.locate(None)
except ConfigError:
    pytest.skip("no packaged model yet", allow_module_level=True)

PROMPT = "def read_json(path):"


@pytest.fixture(scope="module")
def answer():
    command = [sys.executable, "-m", "splittime.cli.main", "generate", "-p", PROMPT, "-n", "8", "-t", "0", "--json"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_generate_accounts_for_every_nanosecond(answer):
    account = account_from_json(answer["account"])
    verify_intervals(list(account.intervals), account.start_ns, account.end_ns)
    assert account.output_tokens == len(answer["token_ids"]) <= 8
    assert {"tokenize", "handoff", "queue", "prefill", "decode", "deliver"} >= {i.stage for i in account.intervals}


def test_llm_gives_what_the_command_gives(answer):
    llm = splittime.LLM(max_num_seqs=4, kv_cache_memory_bytes="32MiB", max_model_len=256)
    sampling = splittime.SamplingParams(max_tokens=8, temperature=0.0, repetition_penalty=1.2)  # as advised
    one, other = llm.generate([PROMPT, "import os"], sampling)
    assert one.text == answer["text"]
    assert other.account.intervals[-1].end_ns == other.account.end_ns
    assert "".join(piece.text for piece in llm.stream(PROMPT, sampling)) == answer["text"]
    assert [phase[0] for phase in llm.timeline][-1] == "warm-up"
    advice = {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.2}  # generation_config.json
    assert llm.resolved["default_sampling"] == advice
    assert llm.default_sampling == splittime.SamplingParams(**advice)
    assert len({output.text for output in llm.generate([PROMPT] * 4)}) > 1  # drawn, and to the end of the context
    one, other = llm.embed([PROMPT, "import os"])
    assert (len(one), sum(value * value for value in one)) == (
        llm.resolved["pooling"]["size"],
        pytest.approx(1, abs=1e-5),
    )
    assert llm.embed("import os") == [other]
    with pytest.raises(RequestError, match="dimensions is 9999, outside 1 to"):
        llm.embed(PROMPT, dimensions=9999)


def test_unknown_settings_are_refused_with_did_you_mean():
    with pytest.raises(ConfigError) as caught:
        splittime.LLM(max_num_sqs=4)
    assert caught.value.info.hint == "did you mean 'max_num_seqs'?"
