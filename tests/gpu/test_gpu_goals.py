"""The summary of a card's run: what is met, missed and by how much, and what has not run. On made-up results."""

import copy
import json

import pytest

from benchmarks.gpu import collect, figures, goals


def step(share, idle=0.01):
    host = {"plan_commit_us": {"p50": 100.0, "p99": 300.0}, "hidden_us": {"p50": 200.0, "p99": 500.0}}
    return {"share_of_floor": share, "share_of_bandwidth": share, "tokens_per_s": 200.0, "step_ms": 5.0, "idle": idle,
            "host": host, "profiled": {"idle": idle}}  # fmt: skip


def engine(share, idle=0.01):
    by_count = {count: step(share, idle) for count in ("1", "16", "64", "256")}
    return {
        "arms": {"ahead": by_count, "captured": {count: step(share / 2, idle * 4) for count in by_count}},
        "prompts": {tokens: {"share_of_matrix_rate": 0.7, "tokens_per_s": 9e4} for tokens in ("2048", "8192")},
    }


def attention(share):
    shapes = [("decode", int(c), int(b)) for c in figures.CONTEXTS for b in figures.BATCHES]
    shapes += [("prefill", tokens, 1) for tokens in (2048, 8192)]
    return {
        "results": [
            {"kind": kind, "context": context, "rows": rows, "us": {"chosen": 12.0, "torch sdpa": 20.0, "flex": None},
             "share": {"chosen": share}}
            for kind, context, rows in shapes
        ]
    }  # fmt: skip


def values(**figures):
    return {name: {"median": value} for name, value in figures.items()}


def compared(ratios, **arms):
    return {**arms, "ratio": ratios}


SHARED = compared({"ttft_p50_ms": 0.2, "prefill_tokens": 0.5})
RESULTS = {
    "parity": {
        "models": {
            "code": {
                "float32": {"tokens": 512, "arms": {"one by one": {"equal": True, "differences": []}}},
                "bfloat16": {part: {"tokens": 100, "kl": 1e-4} for part in ("all", "chunks", "decoded")},
            }
        }
    },
    "engine_8b": engine(0.9),
    "engine_8b_int4": engine(0.75),
    "engine_0.6b": engine(0.5, 0.05),
    "engine_30b_a3b": engine(0.5),
    "engine_70b_int4": engine(0.5),
    "attention": attention(0.9),
    "attention_peers": attention(0.9),
    "reversals_weights": {
        "reversals": {
            "weights": {
                "arms": {"16 bits": {"1": values(tokens_per_s=100)}, "int4": {"1": values(tokens_per_s=250)}},
                "crossover": 128,
            }
        }
    },
    "reversals_cache": {
        "reversals": {
            "cache": {
                "arms": {
                    "bfloat16, memory for all": values(tokens_per_s=100, running_mean=64),
                    "bfloat16, memory for 16 of 64": values(tokens_per_s=50, running_mean=16),
                    "float8_e4m3fn, memory for all": values(tokens_per_s=99, running_mean=64),
                    "float8_e4m3fn, the same memory": values(tokens_per_s=80, running_mean=32),
                }
            }
        }
    },
    "reversals_mechanisms": {
        "reversals": {
            "batching": compared({"tokens_per_s": 2.5, "steps": 0.4}),
            "reservation": {"in one piece": values(held_share=0.55, running_mean=64),
                            "in blocks": values(held_share=0.93, running_mean=110)},
            "chunking": compared({"max_stall_ms": 0.1, "computed_tokens_per_s": 0.9}),
            **{f"prefix_cache_{share}": SHARED for share in ("0%", "50%", "90%")},
        }
    },
    "generate": {
        "concurrent": {
            count: {"splittime": {"tokens_per_s": 400.0}, "generate": {"tokens_per_s": 200.0},
                    "continuous": {"error": "no memory"}} for count in ("1", "16", "64", "256")
        }
    },
}  # fmt: skip


def write(folder, results, **more):
    lines = [
        {"part": part, "exit": 0, "seconds": 9.0, "result": result, "errors": ""} for part, result in results.items()
    ]
    (folder / "first.jsonl").write_text("\n".join(json.dumps(line | more) for line in lines))
    return str(folder)


def judged(folder, results, capsys):
    status = goals.main([write(folder, results), "--json"])
    return status, {one["figure"]: one for one in json.loads(capsys.readouterr().out)}


def test_all_met(tmp_path, capsys):
    status, found = judged(tmp_path, RESULTS, capsys)
    assert status == 0
    assert {one["state"] for one in found.values()} == {goals.MET, goals.SHOWN}
    assert found["tokens/s over transformers' best, 64 at once"]["value"] == 2.0
    assert found["fp8 cache, memory for a quarter: tokens/s"]["value"] == pytest.approx(1.6)
    assert found["attention's time over its best peer's"]["value"] == pytest.approx(0.6)
    assert found["4 bits lose from so many streams on"]["value"] == 128
    assert found["plan + commit p99, 64 streams, us"]["value"] == 300


def test_the_best_arm_counts_and_a_missed_goal_says_by_how_much(tmp_path, capsys):
    results = RESULTS | {"engine_8b": engine(0.68)}
    status, found = judged(tmp_path, results, capsys)
    assert status == 1
    missed = {name: one for name, one in found.items() if one["state"] == goals.MISSED}
    assert set(missed) == {
        "decode 1, 8B bfloat16, of the bandwidth",
        "decode 64, 8B, 1k of context, of the floor",
        "decode 256, 8B, 1k of context, of the floor",
    }
    assert missed["decode 1, 8B bfloat16, of the bandwidth"]["short_by"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("part", "path", "value", "figure"),
    [
        ("parity", ("models", "code", "bfloat16", "all", "kl"), 2e-3, "KL a token, bfloat16"),
        ("parity", ("models", "code", "float32", "arms", "one by one", "equal"), False, "greedy tokens"),
        ("engine_8b", ("arms", "ahead", "64", "idle"), 0.2, "device idle, 8B"),
        ("engine_8b", ("prompts", "8192", "share_of_matrix_rate"), 0.6, "prefill 8192, 8B"),
        ("attention", ("results", 7, "share", "chosen"), 0.8, "attention, decode at 8192"),
        ("reversals_mechanisms", ("reversals", "batching", "ratio", "tokens_per_s"), 1.4, "continuous batching"),
        ("reversals_mechanisms", ("reversals", "reservation", "in blocks", "held_share", "median"), 0.8, "in blocks"),
    ],
)
def test_one_figure_that_misses_its_goal(part, path, value, figure, tmp_path, capsys):
    results = copy.deepcopy(RESULTS)
    place = results[part]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    status, found = judged(tmp_path, results, capsys)
    (missed,) = [name for name, one in found.items() if one["state"] == goals.MISSED]
    assert (status, figure in missed) == (1, True)


@pytest.mark.parametrize("part", RESULTS)
def test_a_part_that_has_not_run_is_named(part, tmp_path, capsys):
    status, found = judged(tmp_path, {name: one for name, one in RESULTS.items() if name != part}, capsys)
    missing = [one for one in found.values() if one["state"] == goals.NOT_RUN]
    assert status == 3
    assert missing
    assert all(one["note"] == f"no part {part}" for one in missing)


def test_what_ran_in_its_smallest_form_meets_no_goal(tmp_path, capsys):
    tiny = {name: one | {"settings": {"tiny": True}} for name, one in RESULTS.items()}
    status, found = judged(tmp_path, tiny, capsys)
    assert status == 3
    assert {one["state"] for one in found.values()} == {goals.NOT_RUN}


def test_a_part_that_ended_early_gives_what_it_had(tmp_path, capsys):
    early = copy.deepcopy(RESULTS["engine_8b"])
    for by_count in early["arms"].values():
        del by_count["256"]
    early["prompts"] = {}
    status, found = judged(tmp_path, RESULTS | {"engine_8b": early}, capsys)
    assert status == 3
    assert {name for name, one in found.items() if one["state"] == goals.NOT_RUN} == {
        "decode 256, 8B, 1k of context, of the floor",
        "prefill 2048, 8B, of the matrix rate",
        "prefill 8192, 8B, of the matrix rate",
    }
    some = copy.deepcopy(RESULTS["attention"])
    del some["results"][3]  # a batch of 64 at 1k
    _, found = judged(tmp_path, RESULTS | {"attention": some}, capsys)
    assert found["attention, decode at 1024, of the bandwidth"]["state"] == goals.NOT_RUN


@pytest.mark.parametrize("result", [None, {}, [], {"arms": None}, {"models": {}}, {"results": []}])
def test_any_result_can_be_judged(result, tmp_path, capsys):
    status, found = judged(tmp_path, dict.fromkeys(RESULTS, result), capsys)
    assert status == 3
    assert {one["state"] for one in found.values()} == {goals.NOT_RUN}


def test_the_table(tmp_path, capsys):
    folder = write(tmp_path, RESULTS | {"engine_8b": engine(0.68)})
    assert goals.main([folder]) == 1
    told = capsys.readouterr().out
    assert "short by 20%" in told
    assert "parity: exit 0 after 9 s" in told
    assert goals.main([write(tmp_path, {})]) == 3


def test_lines_of_several_calls_are_read_together(tmp_path):
    (tmp_path / "first.jsonl").write_text('{"part": "a", "exit": 1}\n\n{"part": "b", "exit": 0}\n')
    (tmp_path / "second.jsonl").write_text('{"part": "a", "exit": 0}\n')
    assert {name: line["exit"] for name, line in collect.read([tmp_path]).items()} == {"a": 0, "b": 0}
    assert set(collect.read([tmp_path / "second.jsonl"])) == {"a"}


def test_what_a_part_printed_is_kept():
    assert collect.line_of("a", 0, 1.0, '{"x": 1}', "")["result"] == {"x": 1}
    failed = collect.line_of("a", 1, 1.0, "3 failed", "x" * 9000)
    assert (failed["text"], len(failed["errors"])) == ("3 failed", collect.KEPT)
    assert "3 failed" in collect.errors_of(failed)
