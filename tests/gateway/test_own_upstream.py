"""In front of our own server with the packaged model: its account is nested, and what is left is the network."""

import json
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

import forked
from benchmarks.server_process import served
from lazily import anthropic, openai
from splittime.ledger.account_json import account_from_json
from splittime.ledger.stages import Stage
from splittime.ledger.store import open_readonly

from .conftest import gateway_of, until_written, upstream
from .test_escalation import CHAT, COMPLETIONS, ask, ends, route, who
from .test_relay import events


@pytest.fixture(scope="module")
def own(hostile, tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    with served() as url:
        text = f'ledger_file = "{folder}/gateway.sqlite"\n'
        text += upstream("ours", url, "splittime-code", kind="splittime") + upstream("big", hostile.url("fine"))
        text += route("never", "big", "splittime-code", -100.0) + route("always", "big", "splittime-code", 0.0)
        with gateway_of(folder, text) as gateway:
            gateway.server_url, gateway.folder = url, folder
            yield gateway


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_its_account_is_nested_and_the_difference_is_network(own, stream, path):
    request_id = uuid.uuid4().hex
    asked = {"prompt": "def f("} if path == "/v1/completions" else {}
    headers = {"x-request-id": request_id}
    body = {"model": "splittime-code", "max_tokens": 8, "stream": stream, **asked}
    told = body if asked else body | {"messages": [{"role": "user", "content": "x"}]}
    status, _, answer = own.ask("", headers, path, raw=json.dumps(told).encode())
    assert status == 200, answer
    account = account_from_json(own.account(request_id))
    account.verify()
    (attempt,) = account.attempts
    lengths = {one.stage: one.duration_ns for one in account.intervals}
    nested_ns = sum(one.end_ns - one.begin_ns for one in attempt.nested)
    assert attempt.nested_fault == ""
    assert account.output_tokens == 8  # told beside the timing, though no client asked
    assert account.prompt_tokens > 0
    assert {Stage.PREFILL, Stage.DECODE} <= {one.stage for one in attempt.nested}
    assert lengths[Stage.UPSTREAM] == nested_ns  # to the nanosecond
    assert lengths[Stage.NETWORK] >= 0
    sealed = json.loads(answer if not stream else events(answer)[-2])["timing"]
    assert sealed["sealed_ns"] - sealed["start_ns"] == nested_ns
    upstreams_own = json.loads(_get(f"{own.server_url}/ledger/requests/{attempt.request_id}"))
    for nested, theirs in zip(attempt.nested[:-1], upstreams_own["stages"], strict=False):  # the last goes on a little
        assert (nested.stage, nested.begin_ns, nested.end_ns) == (theirs["stage"], theirs["begin_ns"], theirs["end_ns"])


def _get(url: str) -> bytes:
    import urllib.request

    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read()


def test_a_real_client_streams_through_it(own):
    client = openai.OpenAI(base_url=f"{own.url}/v1", api_key="none")
    assert [model.id for model in client.models.list()] == ["splittime-code", "big", "never", "always"]
    stream = client.chat.completions.create(
        model="splittime-code",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=6,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[-1].usage.completion_tokens == 6
    account = own.get("/ledger/requests/" + chunks[0].id)  # by the id in the answer
    assert account["output_tokens"] == 6


def test_the_ledger_file_is_read_by_the_tools_there_are(own):
    own.ask("splittime-code", {"x-request-id": "kept"})
    own.account("kept")
    words = forked.run(["explain", "kept", "--url", own.url], check=True).stdout
    for word in ("route", "upstream", "network", "chosen of ours with 0 requests", "its own account, ms: receive"):
        assert word in words
    until_written(own.folder / "gateway.sqlite", "kept")
    ledger = open_readonly(own.folder / "gateway.sqlite")
    (account,) = ledger.account("kept")
    ledger.close()
    account.verify()
    assert account.attempts[0].nested


def test_what_the_server_refuses_is_told_as_it_says_it(own):
    status, _, body = own.ask("splittime-code", temperature=-1)
    told = json.loads(body)["error"]
    assert (status, told["param"], told["value"]) == (400, "temperature", "-1.0")


def test_a_server_with_a_queue_is_given_fewer_at_once(tmp_path):
    """Sixteen at once for a server of two slots: their accounts say that they waited there, and the limit falls."""
    with served("--max-num-seqs", "2") as url:
        text = upstream("u", url, "splittime-code", kind="splittime", max_in_flight=16, queue_wait_s=0.001)
        with gateway_of(tmp_path, text) as gateway, ThreadPoolExecutor(16) as threads:
            asked = [threads.submit(gateway.ask, "splittime-code", max_tokens=8) for _ in range(48)]
            assert {one.result()[0] for one in asked} == {200}
            assert gateway.get("/stats")["upstreams"][0]["limit"] < 16


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_its_first_tokens_are_looked_at_and_its_answer_is_the_same(own, path, stream):
    body = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "def f("}
    body |= {"max_tokens": 6, "temperature": 0, "stream": stream}
    _, headers, answer, account = ask(own, "never", path, **body)
    assert who(headers) == ("splittime-code", "choice=small; check=sure")
    (attempt,) = account.attempts
    assert (attempt.first_tokens.num_tokens, attempt.nested_fault) == (4, "")
    assert attempt.first_tokens.mean_logprob < 0
    _, _, plain, _ = ask(own, "splittime-code", path, **body)
    assert told_by(answer, stream) == told_by(plain, stream)
    _, headers, answer, account = ask(own, "always", path, **body)
    assert who(headers) == ("big", "choice=small; check=unsure")
    assert ends(account) == [("ours", "unsure"), ("big", "")]
    assert b"tick" in answer


def told_by(answer: bytes, stream: bool) -> tuple[str, list, set]:
    """The text, the reasons to end, and the log-probabilities of an answer, however its tokens came in chunks."""
    told = [json.loads(one) for one in events(answer)[:-1]] if stream else [json.loads(answer)]
    choices = [choice for one in told for choice in one["choices"]]
    piece = [choice.get("delta") or choice.get("message") or {"content": choice.get("text")} for choice in choices]
    text = "".join(one.get("content") or "" for one in piece)
    ended = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return text, ended, {choice["logprobs"] for choice in choices}


def test_real_clients_of_the_other_apis_and_their_accounts(own):
    client = openai.OpenAI(base_url=f"{own.url}/v1", api_key="none", max_retries=0)
    first = client.responses.create(model="splittime-code", input="def f(", max_output_tokens=4)
    assert client.responses.retrieve(first.id).id == first.id
    asked = {"model": "splittime-code", "input": "x", "max_output_tokens": 4}
    *_, end = client.responses.create(**asked, previous_response_id=first.id, stream=True)
    last = end.response
    assert last.previous_response_id == first.id
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    for response in (first, last):
        account = account_from_json(own.account(response.id))
        account.verify()
        assert account.attempts[0].nested_fault == ""
        assert (account.prompt_tokens, account.output_tokens) == (
            response.usage.input_tokens,
            response.usage.output_tokens,
        )
    anthropics = anthropic.Anthropic(base_url=own.url, api_key="none", max_retries=0)
    asked = {"model": "splittime-code", "messages": [{"role": "user", "content": "def f("}]}
    with anthropics.messages.stream(**asked, max_tokens=4) as stream:
        message = stream.get_final_message()
    counted = anthropics.messages.count_tokens(**asked)
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    account = own.account(message.id)
    assert (account["prompt_tokens"], account["output_tokens"]) == (counted.input_tokens, 4)
    with pytest.raises(anthropic.NotFoundError):
        anthropics.messages.create(**{**asked, "model": "none"}, max_tokens=4)
    vectors = client.embeddings.create(model="splittime-code", input=["a b", "c"])
    account = account_from_json(own.account(vectors.model_extra["id"]))
    assert (account.prompt_tokens, account.attempts[0].nested_fault) == (vectors.usage.prompt_tokens, "")
