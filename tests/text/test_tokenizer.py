"""A model's folder to a tokenizer: the same ids, text and chat prompts as Hugging Face makes of it."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from splittime.assemble import model_source
from splittime.core.errors import ConfigError, RequestError
from splittime.text.foreign_code import byte_alphabet
from splittime.text.tokenizer import Tokenizer

DATA = Path(__file__).parents[3] / "shared" / "data"
TEMPLATE = """{{ bos_token }}{% for message in messages %}
<|{{ message.role }}|>{% generation %}{{ message.content | trim }}{% endgeneration %}
{% if loop.index > 40 %}{% break %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
MESSAGES = [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "Hi <b> & 'ü'"}]


def write_folder(folder: Path, *, bos_in_processor: bool = False, **config: object) -> Path:
    backend = tokenizers.Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|begin|>", "<|end|>"])
    if bos_in_processor:
        backend.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", pair="<|begin|> $A <|begin|> $B", special_tokens=[("<|begin|>", 256)]
        )
    backend.save(str(folder / "tokenizer.json"))
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": {"content": "<|end|>", "__type": "AddedToken"},
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder


def hugging_face(folder: Path):
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize("bos_in_processor", [False, True])
def test_ids_and_text_equal_hugging_face(tmp_path: Path, bos_in_processor: bool) -> None:
    folder = write_folder(tmp_path, bos_in_processor=bos_in_processor)
    ours, theirs = Tokenizer.load(folder), hugging_face(folder)
    for text in ("", "plain", "ünïcode 木 🦙", "a<|end|>b", "  two  spaces "):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        ids = theirs.encode(text)
        decoded = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ours.decode(ids) == decoded
    assert ours.encode("x")[:1] == ([256] if bos_in_processor else [120])


def test_add_bos_token_overrules_the_processor(tmp_path: Path) -> None:
    with_bos = Tokenizer.load(write_folder(tmp_path, add_bos_token=True))
    assert with_bos.encode("x") == [256, 120]
    without = Tokenizer.load(write_folder(tmp_path, bos_in_processor=True, add_bos_token=False))
    assert without.encode("x") == [120]
    assert with_bos.encode("x", add_special_tokens=False) == [120]


def test_chat_prompts_equal_hugging_face(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, chat_template=TEMPLATE)
    ours, theirs = Tokenizer.load(folder), hugging_face(folder)
    for wanted in (True, False):
        expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=wanted)
        assert ours.render_chat(MESSAGES, add_generation_prompt=wanted) == expected


def test_a_template_may_be_a_file_or_a_named_list(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ messages|length }}"}]
    folder = write_folder(tmp_path, chat_template=named)
    assert Tokenizer.load(folder).render_chat(MESSAGES) == "2"
    (folder / "chat_template.jinja").write_text("{{ messages | tojson }}")
    assert json.loads(Tokenizer.load(folder).render_chat(MESSAGES)) == MESSAGES


@pytest.mark.parametrize("other", [{"name": "rag", "template": "{% for %}"}, {"name": "rag"}, {"template": 5}, "rag"])
def test_a_broken_second_template_does_not_stop_a_good_one(tmp_path: Path, other: object) -> None:
    named = [other, {"name": "default", "template": "{{ messages|length }}"}]
    assert Tokenizer.load(write_folder(tmp_path, chat_template=named)).render_chat(MESSAGES) == "2"


def test_a_template_of_the_users_own_comes_first(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, chat_template="{% for %}")
    assert Tokenizer.load(folder, "own").render_chat(MESSAGES) == "own"
    (tmp_path / "own.jinja").write_text("mine")
    assert model_source.load_tokenizer(folder, str(tmp_path / "own.jinja")).render_chat(MESSAGES) == "mine"
    with pytest.raises(ConfigError, match="chat template"):
        model_source.load_tokenizer(folder, str(tmp_path / "missing.jinja"))


@pytest.mark.parametrize("text", ["Once upon", "Once upon ", " Once", "", "x" * 9])
@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE.replace(" | trim", "")], ids=["trimmed", "plain"])
def test_continued_messages_equal_hugging_face(tmp_path: Path, template: str, text: str) -> None:
    folder = write_folder(tmp_path, chat_template=template)
    ours, theirs = Tokenizer.load(folder), hugging_face(folder)
    messages = [*MESSAGES, {"role": "assistant", "content": text}]
    how = {"continue_final_message": True, "add_generation_prompt": False}
    assert ours.render_chat(messages, **how) == theirs.apply_chat_template(messages, tokenize=False, **how)


@pytest.mark.parametrize("is_old", [True, False])
def test_special_tokens_of_the_map_equal_hugging_face(tmp_path: Path, is_old: bool) -> None:
    told = {} if is_old else {"added_tokens_decoder": {}}
    folder = write_folder(tmp_path, **told)
    map_of = {"eos_token": "<|begin|>", "pad_token": {"content": "<|end|>", "lstrip": False}}
    (folder / "special_tokens_map.json").write_text(json.dumps(map_of))
    ours = Tokenizer.load(folder)
    assert ours.eos_token_id == hugging_face(folder).eos_token_id
    assert ours.special_tokens["pad_token"] == "<|end|>"


def test_what_a_template_computes_is_not_computed_at_start(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, chat_template="{{ 'x' * 10**11 }}")
    with pytest.raises(RequestError):
        Tokenizer.load(folder).render_chat(MESSAGES)


def test_what_a_template_raises_is_the_requests_fault(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path, chat_template="{{ raise_exception('nothing here') }}"))
    with pytest.raises(RequestError, match="nothing here"):
        tokenizer.render_chat(MESSAGES)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{{ missing.field }}",
        "{% for i in range(10**9) %}x{% endfor %}",
    ],
)
def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path, chat_template=template))
    with pytest.raises(RequestError):
        tokenizer.render_chat(MESSAGES)


def test_a_model_without_a_template_refuses_chats(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError) as caught:
        tokenizer.render_chat(MESSAGES)
    assert caught.value.info.code == "no_chat_template"


def test_a_broken_template_or_folder_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        Tokenizer.load(tmp_path)
    for template in ("{% for %}", "{% break %}", f"{{{{ {'9' * 5000} }}}}", f"{{{{ {'(' * 3000}1{')' * 3000} }}}}"):
        with pytest.raises(ConfigError, match="does not parse"):  # some of them Python says, of what Jinja made
            Tokenizer.load(write_folder(tmp_path, chat_template=template))


@pytest.mark.parametrize("name", ["stories260K", "babyllama105", "babyllama361"])
def test_shared_models_encode_and_decode_as_expected(name: str) -> None:
    folder = DATA / "models" / name
    if not folder.is_dir():
        pytest.skip("no shared models here")
    tokenizer = Tokenizer.load(folder)
    for entry in json.loads((folder / "expected.json").read_text())["greedy"]:
        assert tokenizer.encode(entry["prompt"]) == entry["prompt_ids"]
        assert tokenizer.decode(entry["prompt_ids"] + entry["greedy_ids"]) == entry["greedy_text"]


def test_the_end_that_only_the_tokenizer_names_ends_answers_too(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path, eos_token="<|end|>"))
    assert tokenizer.with_own_end((), 258) == (257,)
    assert tokenizer.with_own_end([4, 257], 258) == (4, 257)
    assert tokenizer.with_own_end((4,), 257) == (4,)  # no row of the model's
