"""A server elsewhere: all forms of prompt log-probabilities, servers that refuse 0 tokens, what is told of errors."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from tables import VOCAB, Bytes, Table, drawn_texts, random_logits, silent

from splittime.core.errors import ConfigError, EngineError, NobodyThere, RequestError
from splittime.lab.quality.margins import Margins
from splittime.lab.quality.run import Gate, Tasks
from splittime.lab.quality.server import ServerModel
from splittime.lab.quality.texts import compare

LOGITS = random_logits()
TEXT = [1 + (5 * place * place) % (VOCAB - 1) for place in range(150)]


class Spelling:
    """Tokens 5 and 6 have one text: what is told of it is of neither."""

    vocab_size = VOCAB

    def text(self, token_id):
        return "twice" if token_id in (5, 6) else f"t{token_id}"


class Fake:
    """How the server answers; `asked` are the bodies that came."""

    def __init__(self):
        self.model, self.form, self.top, self.refuses_zero = Table(LOGITS), "text", 5, False
        self.asked, self.answer = [], None

    def complete(self, body):
        self.asked.append(body)
        if self.refuses_zero and body["max_tokens"] == 0:
            return 400, {"error": {"message": "max_tokens must be at least 1"}}
        if self.answer is not None:
            return self.answer
        if self.form == "vllm" and "prompt_logprobs" in body:
            return 200, {"choices": [self.scored(body["prompt"])]}
        if not body.get("echo"):
            return 200, {"choices": [{"text": f"answer to {body['prompt']}"}]}
        return 200, {"choices": [self.scored(body["prompt"] + [1] * body["max_tokens"])]}

    def scored(self, ids):
        rows = [self.model.logprobs[token] for token in ids[:-1]]
        tops = [sorted(range(VOCAB), key=lambda t, row=row: -row[t])[: self.top] for row in rows]
        values = [float(row[token]) for row, token in zip(rows, ids[1:], strict=True)]
        if self.form == "vllm":
            told = [
                {str(t): {"logprob": float(row[t]), "rank": 1} for t in {*top, token}}
                for row, top, token in zip(rows, tops, ids[1:], strict=True)
            ]
            return {"text": "", "logprobs": None, "prompt_logprobs": [None, *told]}
        name = Spelling().text if self.form == "text" else lambda token: f"token_id:{token}"
        told = [{name(t): float(row[t]) for t in top} for row, top in zip(rows, tops, strict=True)]
        return {"text": "", "logprobs": {"token_logprobs": [None, *values], "top_logprobs": [None, *told]}}


@pytest.fixture
def served():
    """(the fake, its URL)."""
    fake = Fake()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            owner = "vllm" if fake.form == "vllm" else "somebody"
            self.reply(200, {"data": [{"id": "m", "max_model_len": 200, "owned_by": owner}]})

        def do_POST(self):
            length = int(self.headers["Content-Length"])
            self.reply(*fake.complete(json.loads(self.rfile.read(length))))

        def reply(self, status, body):
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield fake, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("form", ["text", "token_id", "vllm"])
@pytest.mark.parametrize("refuses_zero", [False, True])
def test_all_forms_give_the_same_log_probabilities(served, form, refuses_zero):
    fake, url = served
    fake.form, fake.refuses_zero = form, refuses_zero
    model = ServerModel(url + "/v1", Spelling(), VOCAB)
    assert (model.model, model.max_tokens) == ("m", 199)
    local = Table(LOGITS)
    found = compare(TEXT, local.predictions(TEXT, 10, 0), model.predictions(TEXT, 10, 0))
    assert found.candidate_nll == pytest.approx(found.base_nll, abs=1e-9)
    assert found.kl == pytest.approx(0, abs=1e-4)
    assert np.nanmin(found.agrees) == 1.0
    assert ("echo" in fake.asked[-1]) is (form != "vllm")
    assert fake.asked[-1]["max_tokens"] == (1 if refuses_zero else 0)


def test_a_text_that_two_tokens_share_names_neither(served):
    fake, url = served
    model = ServerModel(url, Spelling(), VOCAB)
    tops = [top for piece in model.predictions(TEXT, 0, 0) for top in piece.tops]
    assert {5, 6} & {token for top in tops for token in top} == set()
    fake.form = "token_id"
    tops = [top for piece in model.predictions(TEXT, 0, 0) for top in piece.tops]
    assert {5, 6} & {token for top in tops for token in top}


def test_endings_and_answers(served):
    fake, url = served
    model = ServerModel(url, Spelling(), VOCAB)
    endings = [[3, 4, 5], [9]]
    assert model.continuations(TEXT[:20], endings) == pytest.approx(Table(LOGITS).continuations(TEXT[:20], endings))
    told = []
    assert model.generate(["a", "b"], 7, ["stop"], told.append) == ["answer to a", "answer to b"]
    assert (told, fake.asked[-1]["max_tokens"], fake.asked[-1]["stop"]) == ([1, 2], 7, ["stop"])


def test_a_gate_over_a_server(served):
    fake, url = served
    model = ServerModel(url, Spelling(), VOCAB)
    tasks = Tasks(documents=drawn_texts(LOGITS, 12, 150), lengths=(128,), text_tokens=3000)
    report = Gate(Table(LOGITS), model, Bytes(), Margins(), silent).run(tasks)
    assert report.verdict == "PASS"
    fake.model = Table(LOGITS + random_logits(5, 2.0))
    report = Gate(Table(LOGITS), model, Bytes(), Margins(), silent).run(tasks)
    assert report.verdict == "FAIL"


LLAMA_CPP = {"content": [{"id": 7, "token": "x", "logprob": -1.0, "top_logprobs": []}]}  # of its own output alone


@pytest.mark.parametrize(("answer", "error", "told"), [
    ((400, {"error": {"message": "no logprobs here"}}), RequestError, "no logprobs here"),
    ((500, b"<html>"), EngineError, "answered 500: <html>"),
    ((200, b"no json"), EngineError, "cannot ask"),
    ((200, {"choices": []}), EngineError, "without a choice"),
    ((200, {"choices": None}), EngineError, "no 'choices'"),
    ((200, {"choices": [{"text": "x", "logprobs": None}]}), EngineError, "no log-probabilities of a prompt's"),
    ((200, {"choices": [{"text": "x", "logprobs": LLAMA_CPP}]}), EngineError, "no log-probabilities of a prompt's"),
    ((200, {"choices": [{"logprobs": {"token_logprobs": [None, -1.0]}}]}), EngineError, "2 log-probabilities"),
    ((200, {"choices": [{"prompt_logprobs": [None, *[{"1": {"logprob": -1.0}}] * 149]}]}), EngineError, "left out"),
])  # fmt: skip
def test_servers_that_cannot_tell_are_named(served, answer, error, told):
    fake, url = served
    fake.answer = answer
    model = ServerModel(url, Spelling(), VOCAB)
    with pytest.raises(error, match=told):
        list(model.predictions(TEXT, 0, 0))


def test_nobody_there_is_told():
    with pytest.raises(NobodyThere, match="nothing answers at http://127") as caught:
        ServerModel("http://127.0.0.1:9", Spelling(), VOCAB)
    assert caught.value.info.hint == "is a server running there?"


def test_a_server_without_a_model_is_refused(served, monkeypatch):
    _, url = served
    monkeypatch.setattr(ServerModel, "_ask", lambda self, path, body: {"data": []})
    with pytest.raises(ConfigError, match="no model"):
        ServerModel(url, Spelling(), VOCAB)
