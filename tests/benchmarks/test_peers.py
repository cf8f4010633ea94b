"""The race beside other engines: who cannot take part, dies or hangs is left out with a line, and the rest goes on.

The contenders here are small programs that obey `benchmarks/peers/protocol.py`, as the engines do.
"""

import argparse
import asyncio
import json
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from aiohttp import web
from rich.console import Console
from safetensors.torch import save_file

from benchmarks import report
from benchmarks.peers import ceilings, compressed, contenders, http_load, run, servers, show, speculation
from benchmarks.peers.ceilings import ARITHMETIC, Prober, Shape, bounds
from benchmarks.peers.contenders import OURS, Contender, Ended, Entry, brought_up, started

ANSWERS = """
import json, os, signal, sys, time
rate, dies_at, how = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
print(json.dumps({"ready": True, "load_s": 0.1, "about": {"rate": rate}}), flush=True)
for number, line in enumerate(sys.stdin):
    if number == dies_at:
        if how == "signal":
            os.kill(os.getpid(), signal.SIGILL)
        if how == "hang":
            time.sleep(60)
        if how == "error":
            print(json.dumps({"error": "no such cell"}), flush=True)
            continue
        sys.exit("out of memory in /a/folder/of/mine")
    print(json.dumps({"seconds": 1.0, "tokens_per_s": rate}), flush=True)
"""
NEVER = 10**6
CELLS = {"decode:1": {"cell": "decode", "batch": 1, "prompt_tokens": 16, "new_tokens": 8}}
SHAPE = Shape(layer_weights=10**9, head_weights=2 * 10**8, kv_numbers_a_token=16_384)


def program(rate: float, dies_at: int = NEVER, how: str = "exit") -> list[str]:
    return [sys.executable, "-c", ANSWERS, str(rate), str(dies_at), how]


def entry(name: str, rate: float, dies_at: int = NEVER, how: str = "exit") -> Entry:
    return Entry(name, program(rate, dies_at, how), [])


@pytest.fixture(scope="module")
def prober(tmp_path_factory) -> SimpleNamespace:
    """One that measures once, and says the same ever after: a probe takes most of a second of each thread."""
    with Prober(1, tmp_path_factory.mktemp("prober"), 1 << 20) as found:
        limits, by_threads = found.probe(), found.by_threads()
    return SimpleNamespace(probe=lambda: limits, by_threads=lambda: by_threads)


@pytest.fixture(autouse=True)
def settles_at_once(monkeypatch):
    monkeypatch.setattr(run, "SETTLE_S", 0.0)


def raced(found: list[Entry], prober: SimpleNamespace, folder: Path, repeats: int = 3) -> tuple[run.Book, dict]:
    book = run.Book(CELLS)
    with started(found, folder) as (racing, about):
        list(run.race(racing, about, prober, book, repeats))
    return book, about


def test_who_dies_in_the_race_is_left_out_from_there_and_keeps_what_it_had(prober, tmp_path):
    trial = len(contenders.TRIAL)
    book, about = raced([entry(OURS, 10.0), entry("a", 5.0), entry("b", 20.0, trial + 1, "signal")], prober, tmp_path)
    cell = book.figures(SHAPE, "int8")["decode:1"]
    assert len(cell["tokens_per_s"][OURS]["samples"]) == len(cell["tokens_per_s"]["a"]["samples"]) == 3
    assert cell["tokens_per_s"]["b"]["samples"] == [20.0]
    assert about["b"]["left_out"] == "from decode:1, round 2: ended by SIGILL"
    assert book.errors == {"b, decode:1": "ended by SIGILL"}
    assert (cell["best_peer"], cell["ours_over_best_peer"]["median"]) == ("b", 0.5)
    assert "left out: b: from decode:1, round 2: ended by SIGILL" in show.notes(about)


def test_a_race_whose_contenders_all_die_ends(prober, tmp_path):
    book, about = raced([entry("a", 5.0, len(contenders.TRIAL), "exit")], prober, tmp_path)
    assert about["a"]["left_out"] == "from decode:1, round 1: ended with status 1. out of memory in mine"
    assert book.figures(SHAPE, "int8")["decode:1"]["tokens_per_s"] == {}


def test_who_fails_the_trial_or_is_not_there_never_starts(tmp_path):
    absent = Entry("c", program(1.0), [tmp_path / "venv" / "python"])
    found = [entry(OURS, 1.0), entry("a", 1.0, 1, "error"), entry("b", 1.0, 0, "exit"), absent]
    with started([*found, Entry("d", program(1.0), [], "no instructions")], tmp_path) as (racing, about):
        assert list(racing) == [OURS]
    assert about["a"]["absent"] == "as it is by default: failed the trial: no such cell"
    assert about["b"]["absent"] == "as it is by default: ended with status 1. out of memory in mine"
    assert (about["c"]["absent"], about["d"]["absent"]) == ("no python", "no instructions")


def test_the_other_way_is_taken_and_told(tmp_path):
    found = Entry("llama", program(1.0, 0, "signal"), [], otherwise=("without repacked weights", program(7.0)))
    contender, about = brought_up(found, tmp_path)
    assert contender is not None
    assert contender.ask({})["tokens_per_s"] == 7.0
    contender.stop()
    assert about["runs"] == "without repacked weights"
    assert about["because"] == {"as it is by default": "ended by SIGILL"}
    told = "llama runs without repacked weights, because as it is by default: ended by SIGILL"
    assert show.notes({"llama": about}) == [told]


def test_who_hangs_is_ended(tmp_path):
    contender = Contender("a", program(1.0, 0, "hang"), tmp_path / "log")
    contender.read(30)
    with pytest.raises(Ended, match="no answer in 0 s"):
        contender.ask({}, limit_s=0.2)
    contender.stop(patience_s=0.1)


def test_a_folder_without_any_peer_is_raced_by_ours_alone(tmp_path):
    """So is one whose llama.cpp was not built to its end."""
    (tmp_path / "build" / "llama" / "bin").mkdir(parents=True)
    found = contenders.entries(tmp_path, "m", "int4", 2, {})
    assert [one.name for one in found] == [
        OURS,
        "llama.cpp q4_0",
        "llama.cpp q4_k_m",
        "openvino int4",
        "vllm w4a8",
        "vllm w4a16",
    ]
    assert all(one.absent for one in found)
    assert "does not compile" in found[1].absent or "was not compiled" in found[1].absent


def test_of_a_file_both_read_the_same(tmp_path):
    ours, llama = contenders.entries(tmp_path, "m", "q6_k", 2, {})
    assert str(tmp_path / "gguf" / "m-q6_k.gguf") in ours.command
    assert str(tmp_path / "gguf" / "m-q6_k.gguf") in llama.command


def test_vllm_is_in_each_class_and_wants_instructions_for_two_of_its_kinds(monkeypatch):
    classes = contenders.CLASSES
    assert {name for name, chosen in classes.items() if not chosen["vllm"]} == set(contenders.OF_FILE)
    monkeypatch.setattr(contenders, "cpu_flags", lambda: {"avx2"})
    found = {kind: contenders.vllm_model(Path("f"), "m", kind) for kind in contenders.VLLM}
    assert {kind for kind, one in found.items() if one.why_not} == {"bfloat16", "w4a8"}
    assert found["w8a8"].dtype == "float32"
    monkeypatch.setattr(contenders, "cpu_flags", lambda: {"avx2", "amx_bf16", "amx_int8"})
    found = {kind: contenders.vllm_model(Path("f"), "m", kind) for kind in contenders.VLLM}
    assert not any(one.why_not for one in found.values())
    assert found["w8a8"].dtype == "bfloat16"
    assert {one.checkpoint.name for one in found.values()} == {"m", "m-w8a8", "m-w4"}


# ---- ceilings


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_the_prober_measures_every_kind_that_this_processor_has(tmp_path):
    with Prober(2, tmp_path, 1 << 22) as prober:
        by_threads = prober.by_threads()
        assert list(by_threads) == ["1", "2"]
        for limits in by_threads.values():
            assert limits["read_gb_per_s"] > 0.1
            assert limits["fma_gflop_per_s"] > 0.1
            flags = report.cpu_flags()
            assert ("int8_gop_per_s" in limits) == ("avx2" in flags)
            held = {ceilings.held_name(name) for name in limits["by"] if name != run.READ}
            assert set(limits) == {"by", *limits["by"], *held}
            assert all(limits[name] > 0.1 for name in held)
        if "amx_int8" in flags:
            assert by_threads["2"]["by"]["int8_gop_per_s"] in ("amx tdpbssd", "avx512 vpdpbusd")


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_a_prober_that_is_no_more_costs_the_bounds_and_not_the_race(tmp_path):
    book = run.Book(CELLS)
    with started([entry(OURS, 10.0), entry("a", 5.0)], tmp_path) as (racing, about), Prober(1, tmp_path, 1 << 60) as no:
        assert no.by_threads() == {"1": {}}  # so much memory there is not
        list(run.race(racing, about, no, book, 2))
    cell = book.figures(SHAPE, "bf16")["decode:1"]
    assert cell["ours_over_best_peer"]["median"] == 2.0
    assert (cell["roofline_tokens_per_s"], cell["bounds_tokens_per_s"]) == (None, {})


def test_bounds_take_the_fastest_arithmetic_of_the_class():
    limits = {"read_gb_per_s": 10.0, "fma_gflop_per_s": 100.0, "bf16_gflop_per_s": 5000.0, "int8_gop_per_s": 9000.0}
    cell = {"cell": "decode", "batch": 4, "prompt_tokens": 0, "new_tokens": 0}
    found = {kind: bounds(SHAPE, cell, kind, limits) for kind in ARITHMETIC}
    assert [found[kind]["bandwidth"] for kind in ("bf16", "int8", "int4")] == pytest.approx([16.67, 33.33, 66.67], 1e-3)
    operations = 2 * 1.2e9
    assert found["float32"]["arithmetic"] == pytest.approx(100e9 / operations)
    assert found["bf16"]["arithmetic"] == pytest.approx(5000e9 / operations)
    assert found["int4"]["arithmetic"] == found["int8"]["arithmetic"] == pytest.approx(9000e9 / operations)
    slow = bounds(SHAPE, cell, "bf16", {**limits, "bf16_gflop_per_s": 50.0})
    assert slow["arithmetic"] == pytest.approx(100e9 / operations)  # bfloat16 instructions may be the slower ones
    kept_up = bounds(SHAPE, cell, "int8", {**limits, "int8_held_gop_per_s": 4500.0})
    assert kept_up == found["int8"] | {"held": pytest.approx(4500e9 / operations)}
    assert bounds(SHAPE, cell, "int8", {"read_gb_per_s": 10.0}) == {"bandwidth": pytest.approx(33.33, 1e-3)}


# ---- what is filed


@pytest.mark.parametrize(
    ("cpu", "flags", "name"),
    [
        ("AMD EPYC (family 25, model 1)", ["avx2"], "amd-epyc-family-25-model-1-avx2"),
        (
            "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz (family 6, model 143)",
            ["amx_tile", "avx2", "avx512_bf16", "avx512f"],
            "intel-xeon-platinum-8481c-family-6-model-143-amx-tile",
        ),
        ("Intel(R) Xeon(R) Processor (family 6, model 85)", [], "intel-xeon-family-6-model-85"),
    ],
)
def test_a_kind_of_processor_has_a_name_for_files(cpu, flags, name):
    assert report.processor({"cpu": cpu, "flags": flags}) == name


def test_results_of_one_kind_of_processor_leave_another_s_alone(prober, tmp_path, monkeypatch, capsys):
    """Run as the command line does, as two processors; `show` tells both with their dates, the later one last."""
    for module in (report, run, show):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(show, "DOCS", tmp_path)
    (tmp_path / "models" / "m").mkdir(parents=True)
    config = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    config |= {"head_dim": 32, "num_hidden_layers": 1, "vocab_size": 100}
    (tmp_path / "models" / "m" / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(run, "entries", lambda *_: [entry(OURS, 12.0), entry("vllm x", 4.0)])
    command = ["run", "--folder", str(tmp_path), "--model", "m", "--precision", "int8", "--repeats", "2"]
    monkeypatch.setattr(sys, "argv", [*command, "--threads", "1", "--cells", "decode:1,2", "prefill:8"])
    monkeypatch.setattr(run, "Prober", lambda *_: nullcontext(prober))
    for cpu, date in (("Zen (family 26, model 2)", "2026-12-02 UTC"), ("Xeon (family 6, model 1)", "2026-11-01 UTC")):
        found = {**report.conditions(), "cpu": cpu, "date": date}
        for module in (report, run):
            monkeypatch.setattr(module, "conditions", lambda found=found: found)
        run.main()
    assert len(list((tmp_path / "results").iterdir())) == 2
    assert [show.heading(results).split(",")[0] for results in show.filed("m").values()] == [
        "Xeon (family 6",
        "Zen (family 26",
    ]
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["show", "--model", "m", "--markdown"])
    show.main()
    told = capsys.readouterr().out
    assert told.index("measured 2026-11-01") < told.index("measured 2026-12-02")
    assert told.count("| 3.00 (3.00-3.00) |") == 6
    [figures] = [results[0]["figures"] for kind, results in show.filed("m").items() if "zen" in kind]
    assert show.geometric_means(figures["cells"]) == pytest.approx({"decode": 3.0, "prefill": 3.0, "all": 3.0})
    Console(file=None, quiet=True).print(show.table(figures))


def test_the_cells_of_the_goals_are_the_default():
    cells = run.parse_cells(run.DEFAULT_CELLS)
    assert list(cells) == [f"decode:{n}" for n in (1, 2, 4, 8, 16, 32)] + [f"prefill:{n}" for n in (128, 512, 2048)]


# ---- the checkpoints for vLLM


def test_a_rounded_checkpoint_says_what_was_in_it(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "model.embed_tokens.weight": torch.randn(48, 256, generator=generator),
        "model.layers.0.mlp.down_proj.weight": torch.randn(32, 256, generator=generator),
        "model.layers.0.input_layernorm.weight": torch.ones(256),
    }
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    weight = tensors["model.layers.0.mlp.down_proj.weight"].float()
    for kind, loss in (("w8a8", 0.01), ("w4", 0.15)):
        compressed.write(tmp_path, tmp_path / kind, kind)
        config = json.loads((tmp_path / kind / "config.json").read_text())
        assert not config["tie_word_embeddings"]
        assert "re:.*lm_head" in config["quantization_config"]["config_groups"]["group_0"]["targets"]
        back = read_back(tmp_path / kind, kind, "model.layers.0.mlp.down_proj.weight")
        assert 0 < (back - weight).norm() / weight.norm() < loss
        head = read_back(tmp_path / kind, kind, "lm_head.weight")
        assert (head - tensors["model.embed_tokens.weight"].float()).norm() / head.norm() < loss


def read_back(folder: Path, kind: str, name: str) -> torch.Tensor:
    """As compressed-tensors defines it."""
    from safetensors.torch import load_file

    found = load_file(folder / "model.safetensors")
    if kind == "w8a8":
        return found[name].float() * found[f"{name}_scale"].float()
    packed, scale = found[f"{name}_packed"].to(torch.int64), found[f"{name}_scale"].float()
    rows, columns = found[f"{name}_shape"].tolist()
    numbers = (packed[:, :, None] >> torch.arange(0, 32, 4)) & 15
    return ((numbers.reshape(rows, columns) - 8).view(rows, -1, compressed.GROUP) * scale[:, :, None]).view(rows, -1)


# ---- over HTTP


def figures(rate: float, ttft_ms: float, stall_ms: float) -> dict[str, float]:
    return {"output_tokens_per_s": rate, "ttft_p99_ms": ttft_ms, "max_stall_ms": stall_ms}


def test_the_best_peer_is_another_in_each_figure_and_a_failed_run_counts_in_no_ratio():
    runs = {
        OURS: {0: figures(30.0, 100.0, 10.0), 1: figures(30.0, 100.0, 10.0), 2: figures(90.0, 100.0, 10.0)},
        "a": {0: figures(20.0, 200.0, 40.0), 2: figures(20.0, 200.0, 40.0)},
        "b": {0: figures(10.0, 50.0, 80.0), 1: figures(10.0, 50.0, 80.0)},
    }
    found = http_load.ours_over_best(runs)
    assert {key: one["best_peer"] for key, one in found.items()} == {
        "output_tokens_per_s": "a",
        "ttft_p99_ms": "b",
        "max_stall_ms": "a",
    }
    assert found["output_tokens_per_s"]["samples"] == [1.5, 4.5]
    assert found["ttft_p99_ms"]["median"] == 2.0
    assert found["max_stall_ms"]["median"] == 0.25
    assert http_load.ours_over_best({OURS: runs[OURS]}) == {}


def test_a_server_that_does_not_come_up_is_left_out_with_its_last_words(tmp_path, monkeypatch):
    dead = servers.ServerEntry("a", [sys.executable, "-c", "raise SystemExit('no memory')"], [])
    dead.otherwise = ("plainly", [sys.executable, "-c", "raise SystemExit('none either')"])
    missing = servers.ServerEntry("b", ["x"], [tmp_path / "x"])
    unfit = servers.ServerEntry("c", ["x"], [], why_not="no tiles")
    monkeypatch.setattr(http_load, "server_entries", lambda *_: [dead, missing, unfit])
    settings = {"folder": tmp_path, "model": "m", "precision": "int8", "threads": 1, "setting": [], "only": None}
    asked = argparse.Namespace(**settings, clients=[1], repeats=1, requests=1, lock=None)
    with pytest.raises(SystemExit, match="no server came up") as told:
        http_load.compare(asked, Console(stderr=True, quiet=True))
    for words in ("no memory", "none either", "no x", "no tiles"):
        assert words in str(told.value)


# ---- speculation


def test_each_engine_is_tried_with_each_of_its_methods(tmp_path):
    found = {entry.name: entry for entry in speculation.entries(tmp_path, 2, 3)}
    of_vllm = ["vllm bfloat16", "vllm bfloat16 + ngram", "vllm bfloat16 + suffix", "vllm bfloat16 + draft_model"]
    assert [name for name in found if name.startswith("vllm")] == of_vllm
    assert {speculation.without_drafts(name) for name in found} == {OURS, "llama.cpp bf16", "vllm bfloat16"}
    plain, drafting = found["llama.cpp bf16"], found["llama.cpp bf16 + draft-simple"]
    assert "-md" not in plain.command + plain.otherwise[1]
    assert drafting.command[-1] == drafting.otherwise[1][-1] == str(tmp_path / "gguf" / "code-draft-bf16.gguf")
    assert "arctic-inference" in found["vllm bfloat16 + suffix"].absent
    (tmp_path / "venv/vllm/lib/python3/site-packages/arctic_inference").mkdir(parents=True)
    again = {entry.name: entry.absent for entry in speculation.entries(tmp_path, 2, 3)}
    assert "arctic-inference" not in (again["vllm bfloat16 + suffix"] or "")


def test_prompts_are_so_long_and_none_comes_twice():
    cells = [speculation.Cell(kind, size) for kind in ("code", "extraction") for size in (1, 6)]
    asked = speculation.drawn(cells, 2, 64)
    assert [[len(prompts) for prompts in asked[cell]] for cell in cells] == [[4, 4], [6, 6]] * 2
    every = [tuple(prompt) for rounds in asked.values() for prompts in rounds for prompt in prompts]
    assert {len(prompt) for prompt in every} == {64}
    assert len(set(every)) == len(every)


def turn(rate: float, *texts: str, drafts: float = 0.0, right: float = 0.0) -> speculation.Turn:
    return speculation.Turn(rate, list(texts), drafts, right)


def test_drafts_are_compared_with_the_same_engine_in_the_same_round():
    found = speculation.summary(
        {
            OURS: {1: turn(10.0, "a", "b"), 2: turn(20.0, "c", "d")},
            f"{OURS} + ngram": {1: turn(30.0, "a", "b", drafts=8, right=6), 2: turn(20.0, "c", "d", drafts=2)},
            "x": {1: turn(1.0, "a", "z"), 2: turn(1.0, "y", "z")},
            "x + ngram": {2: turn(3.0, "y", "other", drafts=1, right=1), 3: turn(9.0, "k", "l")},
            "x + failed": {},
        }
    )
    assert "as_ours" not in found[OURS]
    assert "x + failed" not in found
    assert found["x"]["as_ours"] == {"answers": 4, "count": 1}
    ours, other = found[f"{OURS} + ngram"], found["x + ngram"]
    assert (ours["over_without"]["samples"], ours["drafts"], ours["right"]) == ([3.0, 1.0], 10, 6)
    assert ours["other_text"] == {"answers": 4, "count": 0}
    assert (other["over_without"]["samples"], other["other_text"]) == ([3.0], {"answers": 2, "count": 1})


@pytest.mark.timing
@pytest.mark.parametrize("in_answers", [True, False])
def test_a_turn_leaves_out_what_comes_before_the_first_token_and_what_was_verified_before(in_answers):
    """As llama.cpp says it, in its answers, and as we and vLLM do, in metrics."""
    counters = [100.0, 50.0]

    async def complete(request: web.Request) -> web.Response:
        tokens = (await request.json())["max_tokens"]
        await asyncio.sleep(0.4 + 0.1 * (tokens - 1))
        told = {"timings": {"draft_n": 5, "draft_n_accepted": 3}} if in_answers and tokens > 1 else {}
        if not in_answers and tokens > 1:
            counters[0], counters[1] = counters[0] + 5, counters[1] + 3
        return web.json_response({"choices": [{"text": "t"}], "usage": {"completion_tokens": tokens}, **told})

    async def metrics(_: web.Request) -> web.Response:
        lines = [f'{name}{{engine="0"}} {count}' for name, count in zip(speculation.COUNTERS, counters, strict=True)]
        return web.json_response({"error": {}}, status=501) if in_answers else web.Response(text="\n".join(lines))

    async def taken() -> speculation.Turn:
        made, server = web.Application(), servers.ServerEntry("a", [], [])
        made.add_routes([web.post("/v1/completions", complete), web.get("/metrics", metrics)])
        runner = web.AppRunner(made)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", server.port).start()
        try:
            return await speculation.take_turn(server, [[1, 2]] * 4, 2, 5)
        finally:
            await runner.cleanup()

    found = asyncio.run(taken())
    assert (found.drafts, found.right, found.texts) == (20, 12, ["t"] * 4)
    assert 12 < found.tokens_per_s < 23  # two at once, 100 ms a token
