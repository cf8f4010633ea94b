"""A model of this process: its figures are the runner's own, in whatever way a text is cut; what it reads is counted.

And the real thing on the packaged model: honest rounding passes; one broken scale, a cache whose scales are not read,
and a claim that is not borne out each fail.
"""

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import tiny_checkpoint
import torch
from safetensors.torch import load_file
from tables import silent

from benchmarks.scenarios.quality_gate import SPOILT, enlarge_scales, write_eight_bits, write_four_bits
from splittime.assemble.model_source import locate
from splittime.core.sampling import SamplingParams
from splittime.core.step import Admitted, Row, StepPlan
from splittime.lab.quality.documents import python_documents
from splittime.lab.quality.local import LocalModel, rounded_base
from splittime.lab.quality.margins import EIGHT_BITS, standard
from splittime.lab.quality.run import Gate, Tasks, unread
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig
from splittime.text.tokenizer import Tokenizer

IDS = [(7 * place * place + 3 * place) % 61 for place in range(120)]
PACKAGED = locate("code")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_checkpoint.write(folder)
    return folder


def tiny(folder, **changes):
    config = RunnerConfig(model_path=str(folder), max_num_seqs=2, num_threads=1, packed_cache="off", **changes)
    return LocalModel("tiny", load_torch_runner(config), None)


def following(model, begin=0, decode_tokens=0):
    """The log-probability of each token of `IDS` from begin + 1 on."""
    found = {}
    for piece in model.predictions(IDS, begin, decode_tokens):
        for line, row in enumerate(piece.logprobs):
            found[piece.begin + line + 1] = row[IDS[piece.begin + line + 1]]
    return [found[place] for place in sorted(found)]


def by_the_runner(runner):
    """What a request with `prompt_logprobs` is told."""
    sampling = SamplingParams(temperature=0.0, seed=0, prompt_logprobs=0)
    plan = StepPlan(0, (Row("r", 0, tuple(IDS), tuple(range(8)), 1),), (Admitted("r", tuple(IDS), 0, sampling, ()),))
    scores = runner.run(plan).rows[0].prompt_logprobs
    runner.run(StepPlan(0, (), released=("r",)))
    return [score.logprob for score in scores]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("changes", [{}, {"quantization": "int8", "kv_cache_dtype": "int8"}])
def test_predictions_are_what_the_runner_tells_of_prompts(tiny_folder, kernels, changes):
    model = tiny(tiny_folder, kernels=kernels, **changes)
    want = by_the_runner(model.runner)
    assert following(model) == pytest.approx(want, abs=1e-4)
    assert following(model, begin=50) == pytest.approx(want[50:], abs=1e-4)
    assert following(model, begin=50, decode_tokens=9) == pytest.approx(want[50:], abs=2e-3)
    assert len(model.runner.slots) == 0


def test_endings_share_their_prompt(tiny_folder):
    model = tiny(tiny_folder)
    prompt, endings = IDS[:70], [IDS[70:75], IDS[90:91], IDS[80:92], IDS[70:75]]
    found = model.continuations(prompt, endings)
    for ending, value in zip(endings, found, strict=True):
        whole = [*prompt, *ending]
        alone = 0.0
        for piece in model.predictions(whole, len(prompt) - 1, 0):
            places = piece.begin + 1 + np.arange(len(piece.logprobs))
            alone += sum(row[whole[place]] for row, place in zip(piece.logprobs, places, strict=True))
        assert value == pytest.approx(alone, abs=1e-3)
    assert found[0] == found[3]


def test_what_it_reads_is_counted_apart_and_as_claimed(tiny_folder):
    plain, rounded = tiny(tiny_folder), tiny(tiny_folder, quantization="int8", kv_cache_dtype="int8")
    assert (plain.reads.claims, rounded.reads.claims) == ((), ("weights.int8", "kv.int8"))
    for model in (plain, rounded, plain):
        list(model.predictions(IDS, 0, 8))
    assert plain.reads.read.get("weights.int8", 0) == plain.reads.read.get("kv.int8", 0) == 0
    assert unread("it", plain.reads) == unread("it", rounded.reads) == []
    assert rounded.reads.read["kv.int8"] >= rounded.reads.kv_least > 0
    assert rounded.reads.read["weights.int8"] >= rounded.reads.weights_least > 0


def test_texts_of_one_chunk_read_nothing_back(tiny_folder):
    model = tiny(tiny_folder, kv_cache_dtype="int8")
    list(model.predictions(IDS[:40], 0, 0))
    assert any("no text was long enough" in reason for reason in unread("it", model.reads))


# ---- the packaged model


@cache
def tasks() -> Tasks:
    return Tasks(documents=python_documents(60)[:24], lengths=(128,), text_tokens=2000)


def settings_of(folder, **changes):
    return RunnerConfig(
        model_path=str(folder), max_num_seqs=2, num_threads=1, packed_cache="off", max_model_len=512, **changes
    )


def packaged(folder=PACKAGED, **changes):
    return LocalModel("code", load_torch_runner(settings_of(folder, **changes)), Tokenizer.load(PACKAGED))


@pytest.fixture(scope="module")
def base():
    return packaged()


def judged(base, candidate):
    return Gate(base, candidate, base.tokenizer, standard(candidate.reads.claims), silent).run(tasks())


def test_the_base_against_itself_passes(base):
    report = judged(base, packaged())
    assert report.verdict == "PASS", report.reasons
    assert all(check.estimate.high == 0 for check in report.checks if check.rule.startswith("kl"))


def test_honest_rounding_passes(base):
    report = judged(base, packaged(quantization="int8", kv_cache_dtype="int8"))
    assert report.verdict == "PASS", report.reasons
    assert report.candidate.read["kv.int8"] > 0


@pytest.mark.sweep
def test_a_cache_whose_scales_are_not_read_fails(base):
    """Each step finds one scale for all that is in the cache, as if nobody had kept them."""
    candidate = packaged(kv_cache_dtype="int8")
    run = candidate.runner.run

    @torch.inference_mode()
    def unscaled(plan):
        for layer in candidate.runner.store.layers:
            layer.scales[layer.scales != 0] = 1 / 127
        return run(plan)

    candidate.runner.run = unscaled
    report = judged(base, candidate)
    assert report.verdict == "FAIL"
    assert any("beyond its margin" in reason for reason in report.reasons)


@pytest.mark.sweep
def test_a_claim_that_nothing_bears_out_fails(base):
    candidate = packaged()
    candidate.reads = replace(candidate.reads, claims=("weights.int8",))
    report = judged(base, candidate)
    assert report.verdict == "FAIL"
    assert report.reasons == ["code claims weights.int8, and its kernels read no byte of it"]


def test_greedy_answers_come_from_the_same_runner(base):
    told = []
    texts = base.generate(["import ", "def f(", "class A"], 8, ("\n\n",), told.append)
    assert told == [1, 2, 3]
    assert texts == base.generate(["import ", "def f(", "class A"], 8, ("\n\n",), told.append)
    assert all(texts)


def break_scale(tensors):
    tensors[f"{SPOILT}.scales"][:, 108] *= 8


def swap_zero_points(tensors):
    """Each group's with its neighbour's, in one weight of each layer."""
    for name in [name for name in tensors if name.endswith("o_proj.qzeros")]:
        tensors[name] = tensors[name].unflatten(0, (-1, 2)).flip(1).flatten(0, 1).contiguous()


@pytest.mark.parametrize(("spoil", "verdict"), [
    (lambda tensors: None, "PASS"), (break_scale, "FAIL"), (swap_zero_points, "FAIL"),
])  # fmt: skip
def test_a_checkpoint_of_four_bits_and_what_spoils_it(base, tmp_path, spoil, verdict):
    candidate = packaged(write_four_bits(tmp_path, spoil))
    assert candidate.reads.claims == ("weights.int4",)
    report = judged(base, candidate)
    assert report.verdict == verdict, report.reasons
    assert unread("it", candidate.reads) == []
    assert verdict == "PASS" or any("KL, mean is beyond its margin" in reason for reason in report.reasons)


def with_floats_too(tensors):
    """A file that has both: the loader takes the integers."""
    plain = load_file(PACKAGED / "model.safetensors")
    tensors.update({name: plain[name] for name in plain if "proj.weight" in name})


@pytest.mark.sweep
def test_a_loader_that_falls_back_to_floats_is_found_by_the_file_s_claim(base, tmp_path, monkeypatch):
    folder = write_four_bits(tmp_path, with_floats_too)
    assert packaged(folder).reads.claims == ("weights.int4",)
    monkeypatch.setattr("splittime.models.weights.formats.read.take", lambda *of_a_weight: None)
    report = judged(base, packaged(folder))
    assert {check.verdict for check in report.checks if check.rule == "kl"} == {"PASS"}, "nothing is lost"
    assert report.verdict == "FAIL"
    assert report.reasons == ["code claims weights.int4, and its kernels read no byte of it"]


def leave_down_proj(tensors):
    """As floats, in every layer."""
    plain = load_file(PACKAGED / "model.safetensors")
    names = [name for name in plain if "down_proj.weight" in name]
    for name in names:
        for suffix in ("qweight", "qzeros", "scales"):
            del tensors[name.replace("weight", suffix)]
        tensors[name] = plain[name]


def test_a_checkpoint_of_which_a_part_is_left_as_floats_is_held_to_the_other_part(base, tmp_path):
    folder = write_four_bits(tmp_path, leave_down_proj)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["down_proj"]
    (folder / "config.json").write_text(json.dumps(config))
    candidate = packaged(folder)
    assert candidate.facts["stored"] == "awq, 4 bits: 24 of 28 linear weights of the layers"
    report = judged(base, candidate)
    assert report.verdict == "PASS", report.reasons
    assert candidate.reads.read["weights.int4"] >= candidate.reads.weights_least > 0


@pytest.mark.parametrize("layer", [None, 1, 2])
@pytest.mark.sample(1)
def test_scales_a_fifth_too_large_are_noted_beside_the_base_rounded(base, tmp_path, layer):
    """Their KL is below twice what 8 bits cost the worst model: what they cost this one is the yardstick."""
    spoil = (lambda tensors: None) if layer is None else enlarge_scales(layer)
    folder = write_eight_bits(tmp_path, spoil)
    candidate = packaged(folder)
    rounded = rounded_base(base, settings_of(PACKAGED), candidate, settings_of(folder))
    report = Gate(base, candidate, base.tokenizer, EIGHT_BITS, silent, rounded).run(tasks())
    assert "FAIL" not in {check.verdict for check in report.checks}
    noted = [note for note in report.notes if "look for a broken scale" in note]
    assert bool(noted) is (layer is not None), report.notes


def test_what_is_rounded_at_loading_is_its_own_yardstick(base):
    asked = settings_of(PACKAGED, quantization="int8")
    assert rounded_base(base, settings_of(PACKAGED), packaged(quantization="int8"), asked) is None
    assert rounded_base(base, settings_of(PACKAGED), packaged(), settings_of(PACKAGED)) is None
