"""The benchmarks' machinery at tiny sizes on a CPU. No test depends on a measured time."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from fastenc.kernels import launch
from torch.nn.attention import flex_attention

from benchmarks import (
    _compare,
    _device,
    _results,
    bench_attention,
    bench_models,
    lengths,
    numerics,
    other_libraries,
    plots,
    speed_chart,
    step_launches,
)
from benchmarks._compare import NOT_INSTALLED, compare, peer, rates
from benchmarks._compare_ops import Provider, compare_op
from benchmarks._results import UNFINISHED, run_groups
from benchmarks.tables import __main__ as tables_main
from benchmarks.tables import guides, page, readme, training
from benchmarks.tables import results as table_results
from fastenc.models import EncoderConfig
from fastenc.profiling import Ceilings, Work, models
from fastenc.testing import CASES, numerics_report
from tests.helpers import ROOT
from tests.helpers.processes import python


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """Few rounds, small ceilings, and a folder of the test's own for results."""
    ceilings = Ceilings("cpu", copy_bytes=1 << 16, product_size=32)
    for module in (_compare, _results):
        monkeypatch.setattr(module, "ceilings", lambda: ceilings)
    monkeypatch.setattr(bench_models, "ceilings", lambda: ceilings)
    monkeypatch.setattr(_compare, "TURN", 1e-4)
    monkeypatch.setattr(_compare, "PAUSE", 0)
    monkeypatch.setattr(_results, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(_results, "END", float("inf"))
    monkeypatch.setattr(_results, "GO_ON", False)
    monkeypatch.setattr(_compare, "compare", hurried)
    monkeypatch.setattr(bench_models, "compare", hurried)
    return ceilings


def hurried(*arguments, **options):
    return compare(*arguments, **options | {"seconds": 0, "min_rounds": 1})


def refuses():
    raise RuntimeError("head_dim 7 is not supported\nmore lines")


def test_only_right_results_get_a_time():
    x = torch.randn(8)
    providers = {
        "right": lambda: x * 2,
        "wrong": lambda: x * 3,
        "refuses": refuses,
        "absent": NOT_INSTALLED,
    }
    check = lambda name, result: None if torch.equal(result, x + x) else "not twice x"
    rows = compare(providers, baseline="right", check=check, seconds=0, work=Work(64.0))
    assert rows["wrong"] == {"wrong": "not twice x"}
    assert rows["refuses"] == {"failed": "RuntimeError: head_dim 7 is not supported"}
    assert rows["absent"] == {"missing": "not installed"}
    right = rows["right"]
    assert right["speedup"] == 1 and right["p20_ms"] <= right["median_ms"] <= right["p80_ms"]
    assert right["bytes"] == 64 and "flops" not in right


def test_rates_divide_the_floor_by_the_time(quick, monkeypatch):
    monkeypatch.setattr(quick, "_bandwidth", 1e9)
    monkeypatch.setitem(quick._products, torch.float32, 1e9)
    figures = rates(Work(1e9, 2e9), 4.0)
    assert figures["percent_of_roofline"] == 50 and figures["floor_ms"] == 2000
    assert figures["GB_per_s"] == 0.25 and figures["TFLOP_per_s"] == pytest.approx(0.0005)


def test_an_absent_library_is_named_and_a_broken_one_says_why(tmp_path, monkeypatch):
    assert peer("no_such_library", lambda module: module) == NOT_INSTALLED
    (tmp_path / "broken_peer.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "no_such_dependency" in peer("broken_peer", lambda module: module)
    assert peer("math", lambda module: module.pi) == pytest.approx(3.14159265)


@pytest.mark.parametrize("gradient_off", [False, True])
def test_compare_op_checks_the_result_and_every_gradient(gradient_off):
    x, weight = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    dout = torch.randn(3, 4)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a * b

        @staticmethod
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            return grad * b, grad * a * (1.01 if gradient_off else 1.0)

    wide = tuple(v.detach().double().requires_grad_() for v in (x, weight))
    cases = compare_op(
        "product",
        {
            "ours": Provider(lambda: Scaled.apply(x, weight), (x, weight), dout),
            "off": Provider(lambda: x * weight * 1.01, (x, weight), dout),
        },
        Provider(lambda: wide[0] * wide[1], wide, dout.double()),
        baseline="ours",
        forward=Work(3.0),
        backward=Work(4.0),
    )
    forward, both = cases["product, forward"], cases["product, forward + backward"]
    assert "median_ms" in forward["ours"] and "result" in forward["off"]["wrong"]
    if gradient_off:
        assert both["ours"] == {"wrong": "gradient 1: relative error 0.01"}
    else:
        assert both["ours"]["bytes"] == 7


FEW = bench_attention.Case("few", [3, 70, 1], heads=2, head_dim=16)
ATTENTION = {
    **{
        name: FEW._replace(variant=name)
        for name in ("window", "ALiBi", "relative bias", "key bias")
    },
    "no padding": FEW._replace(lengths=[70, 70], variant="relative bias"),
    "other keys": FEW._replace(key_lengths=[90, 2, 1]),
}


@pytest.mark.parametrize("case", ATTENTION.values(), ids=ATTENTION)
def test_attentions_providers_agree(case):
    for rows in bench_attention.measure(case).values():
        assert all("median_ms" in row for row in rows.values()), rows


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", ATTENTION.values(), ids=ATTENTION)
def test_flex_attention_is_asked_for_the_same(case):
    batch = bench_attention.Batch(case)
    # On a CPU it has no gradients and takes no inputs that require them.
    batch.packed = tuple(x.detach() for x in batch.packed)
    constant = tuple(x.detach() for x in batch.variant.parameters)
    batch.variant = batch.variant._replace(parameters=constant)
    flex = batch.flex(flex_attention, lambda function: function)
    torch.testing.assert_close(
        flex.forward().double(), batch.truth().forward().detach(), atol=1e-5, rtol=1e-4
    )


def test_a_windows_work_is_that_of_the_tokens_it_shows():
    seen = sum((bench_attention.distances(n, n).abs() <= 64).sum().item() for n in FEW.lengths)
    forward, _ = FEW._replace(variant="window").work()
    assert forward.flops == 4 * 2 * 16 * seen
    assert FEW.work()[0].flops == 4 * 2 * 16 * sum(n * n for n in FEW.lengths)


def test_results_are_written_with_the_ceilings_and_our_failures_end_in_an_error(quick):
    quick.floor(Work(1.0))
    row = {"median_ms": 1.0, "p20_ms": 1.0, "p80_ms": 1.0, "rounds": 1}
    path = _results.write("good", {"case": {"fastenc": row, "peer": {"wrong": "x"}}})
    written = json.loads(path.read_text())
    assert written["ceilings"]["copy_GB_per_s"] > 0 and written["machine"]["versions"]["torch"]
    with pytest.raises(SystemExit, match="wrong or failed: bad: case: fastenc"):
        _results.write("bad", {"case": {"fastenc": {"wrong": "x"}}})
    assert path.with_name("bad.json").exists()


ROW = {"median_ms": 1.0, "p20_ms": 1.0, "p80_ms": 1.0, "rounds": 1}
RIGHT, WRONG = {"fastenc": ROW}, {"fastenc": {"wrong": "x"}}


def written(name: str) -> dict:
    return json.loads((_results.RESULTS / _device.folder_of_device() / f"{name}.json").read_text())


def test_each_part_is_written_at_once_and_an_error_comes_at_the_end():
    def third():
        assert written("some")["cases"] == {"1, a": RIGHT, "1, b": RIGHT, "2": WRONG}
        raise ValueError("no such shape")

    groups = {
        "1": lambda: {"1, a": RIGHT, "1, b": RIGHT},
        "2": lambda: {"2": WRONG},
        "3": third,
        "4": lambda: {"4": RIGHT},
    }
    with pytest.raises(SystemExit, match="wrong or failed: some: 2: fastenc; some: 3: ValueError"):
        run_groups("some", groups)
    assert list(written("some")["cases"]) == ["1, a", "1, b", "2", "4"]


def test_an_unfinished_run_goes_on_with_what_is_not_right_yet(quick, monkeypatch, tmp_path):
    called = []

    def measure(part, row):
        called.append(part)
        quick.floor(Work(1.0))
        return {part: row}

    def last_in_time(part):
        monkeypatch.setattr(_results, "END", 0.0)
        return measure(part, RIGHT)

    groups = {
        "wrong": lambda: measure("wrong", WRONG),
        "right": lambda: last_in_time("right"),
        "late": lambda: measure("late", RIGHT),
        "last": lambda: measure("last", RIGHT),
    }
    with pytest.raises(SystemExit, match="wrong or failed: some: wrong: fastenc"):
        run_groups("some", groups)
    assert called == ["wrong", "right"], "an error, and not only the end of the time"
    monkeypatch.setattr(_results, "END", float("inf"))
    monkeypatch.setattr(_results, "GO_ON", True)
    monkeypatch.setitem(groups, "late", lambda: last_in_time("late"))
    with pytest.raises(SystemExit) as exit_:
        run_groups("some", groups)
    assert exit_.value.code == UNFINISHED and called[2:] == ["late"]
    monkeypatch.setitem(groups, "late", lambda: measure("late", RIGHT))

    def again(go_on):
        called.clear()
        monkeypatch.setattr(_results, "END", float("inf"))
        monkeypatch.setattr(_results, "GO_ON", go_on)
        monkeypatch.setitem(groups, "wrong", lambda: measure("wrong", RIGHT))
        monkeypatch.setitem(groups, "right", lambda: measure("right", RIGHT))
        run_groups("some", groups)
        return list(called)

    assert again(go_on=True) == ["last", "wrong"], "what went wrong comes last"
    assert written("some")["cases"] == dict.fromkeys(groups, RIGHT)
    assert again(go_on=True) == []
    assert again(go_on=False) == list(groups), "new figures are asked for"
    monkeypatch.setattr(launch, "TABLES", tmp_path)
    monkeypatch.setattr(launch, "architecture", lambda device: "sm_00")
    (tmp_path / "sm_00.json").write_text('{"entries": []}')
    assert again(go_on=True) == list(groups), "those there are were measured with other tables"
    assert again(go_on=True) == []


def test_ceilings_of_a_run_in_two_processes_are_joined(quick, monkeypatch):
    def measure(dtype):
        monkeypatch.setattr(quick, "_products", {dtype: 1e9})
        return {str(dtype): RIGHT}

    monkeypatch.setattr(quick, "_bandwidth", 1e9)
    groups = {
        "first": lambda: measure(torch.float32),
        "second": lambda: measure(torch.bfloat16),
    }
    run_groups("some", groups)
    rates = written("some")["ceilings"]["product_TFLOP_per_s"]
    assert rates == {"float32": 0.001, "bfloat16": 0.001}


BENCHMARKS = {
    path.stem.removeprefix("bench_"): import_module(f"benchmarks.{path.stem}")
    for path in sorted((ROOT / "benchmarks").glob("bench_*.py"))
}
OPS = [op for op, module in BENCHMARKS.items() if hasattr(module, "SMALLEST")]
WITHOUT_NAME = {"crf"}
NOT_COMPILED = {"crf", "embedding_layer_norm", "global_window_attention"}


@pytest.mark.parametrize("op", OPS)
def test_an_ops_providers_agree_and_have_a_roofline(op, monkeypatch):
    module = BENCHMARKS[op]
    for name, value in (
        ("ON_GPU", True),
        ("ROWS", 16),
        ("DROPOUTS", (0.0,)),
        ("compiled", lambda function, **how: function),
        ("compare", hurried),
    ):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, value)
    make = module.layer_norm_cases if op == "layer_norm" else module.measure
    cases = make(*(() if op in WITHOUT_NAME else ("case",)), *module.SMALLEST)
    for case, rows in cases.items():
        timed = {name for name, row in rows.items() if "percent_of_roofline" in row}
        absent = {name for name, row in rows.items() if row == {"missing": NOT_INSTALLED}}
        assert timed | absent == set(rows), rows
        assert any(name.startswith("fastenc") for name in timed) and len(timed) > 1
        assert op in NOT_COMPILED or any("torch.compile" in name for name in timed), case


def test_numerics_are_kept_and_a_broken_budget_is_an_error(monkeypatch):
    first, *others = (case for case in CASES if case.op == "segment_pool")
    run = lambda *cases: lambda: numerics_report("cpu", cases=cases)
    monkeypatch.setattr(numerics, "numerics_report", run(first, *others))
    numerics.main()
    row = written("numerics")["cases"]["segment_pool, float32"]["forward"]
    assert row["holds"] and row["error"] <= row["allowed"]
    off = replace(first, ours=lambda **inputs: 1.1 * first.ours(**inputs))
    monkeypatch.setattr(numerics, "numerics_report", run(off, *others))
    with pytest.raises(SystemExit, match="segment_pool, float32: forward"):
        numerics.main()
    assert not written("numerics")["cases"]["segment_pool, float32"]["forward"]["holds"]


def test_lengths_are_the_data_sets_and_always_the_same():
    for name in lengths.NAMES:
        drawn = lengths.lengths(name, 4096)
        assert drawn == lengths.lengths(name, 4096)
        assert sum(drawn) >= 4096 and min(drawn) >= 1 and max(drawn) <= 512
    assert lengths.lengths("full 512", 4096) == [512] * 8
    counts = {int(n): c for n, c in json.loads(lengths.FILE.read_text())["SST-2"].items()}
    mean = sum(n * c for n, c in counts.items()) / sum(counts.values())
    drawn = lengths.lengths("SST-2", 100_000)
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.02)


@pytest.mark.parametrize("family", ["bert", "xlm-roberta"])
def test_whole_models_agree_with_transformers_before_they_are_timed(family, monkeypatch, tmp_path):
    sizes = dict(vocab_size=1100, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=48)
    special = dict(type_vocab_size=1, pad_token_id=1, position_offset=2, eps=1e-5)
    config = EncoderConfig(
        **sizes, **(special if family == "xlm-roberta" else {}), family=family, pooler=False
    )
    monkeypatch.setattr(models, "SIZES", {"minilm": config})
    monkeypatch.setattr(bench_models, "TOKENS", 100)
    monkeypatch.setattr(bench_models, "NAMES", ("WNUT-17",))
    monkeypatch.setattr(bench_models, "GRAPHS", family == "bert")
    monkeypatch.setattr(sys, "argv", ["bench_models", "minilm"])
    bench_models.main()
    for mode in ("inference", "training"):
        (path,) = (tmp_path / "results").glob(f"*/models_minilm_{mode}.json")
        rows = json.loads(path.read_text())["cases"][f"{mode}, WNUT-17"]
        assert rows["Hugging Face flash_attention_2"] == {"missing": "needs a GPU"}
        timed = ["fastenc", "fastenc.patch", "Hugging Face sdpa", "Hugging Face eager"]
        if family == "bert":
            timed.append("fastenc.compile_" + mode)
        else:
            assert rows["fastenc.compile_" + mode] == {"missing": "needs a GPU"}
        for provider in timed:
            assert rows[provider]["tokens_per_s"] > 0 and rows[provider]["MFU_percent"] > 0


def test_a_model_with_other_weights_is_wrong(monkeypatch, tmp_path):
    from fastenc.models import MaskedLM

    sizes = dict(vocab_size=1100, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=48)
    monkeypatch.setattr(bench_models, "TOKENS", 60)
    monkeypatch.setattr(bench_models, "NAMES", ("WNUT-17",))
    ours = MaskedLM(EncoderConfig(**sizes, pooler=False))
    ours.save_pretrained(tmp_path)
    torch.nn.init.normal_(ours.head.bias)
    torch.nn.init.normal_(ours.encoder.layers[0].up.bias)
    (measure,) = bench_models.training(ours, str(tmp_path)).values()
    rows = measure()["training, WNUT-17"]
    assert "instead of" in rows["fastenc"]["wrong"] and "median_ms" in rows["Hugging Face sdpa"]
    measure = bench_models.inference(ours, str(tmp_path))["inference, WNUT-17"]
    rows = measure()["inference, WNUT-17"]
    assert "relative error" in rows["fastenc"]["wrong"]


def results(folder: Path) -> Path:
    """Made-up results with every form of row."""
    row = {"median_ms": 2.0, "p20_ms": 1.5, "p80_ms": 2.5, "rounds": 9, "speedup": 1.5}
    work = {"bytes": 1e6, "flops": 1e9, "TFLOP_per_s": 0.5, "percent_of_roofline": 61.0}
    rows = {
        "fastenc": row | work,
        "liger-kernel": {"missing": "not installed"},
        "sdpa flash, padded": {"failed": "RuntimeError: no"},
        "eager": {"wrong": "error 1"},
    }
    model = {"fastenc": row | {"tokens_per_s": 9e5, "MFU_percent": 55.0, "peak_MB": 2048.0}}
    machine = {"device": "Some GPU", "threads": 2, "versions": {"torch": "9"}, "date": "2000-01-01"}
    ceilings = {"copy_GB_per_s": 4000.0, "product_TFLOP_per_s": {"bfloat16": 700.0}}
    costs = {"seconds": 60.0, "cpu_seconds": 50.0}
    trained = lambda i: (
        costs | {"metric": "f1", "dev": 0.5, "test": 0.8 + 0.02 * i, "peak_memory": 99.0 + i}
    )
    target = folder / "some-gpu"
    target.mkdir(parents=True)
    for name, cases in (
        ("attention", {"a case": rows}),
        ("models_bert-base_training", {"training, SST-2": model}),
        ("masked_cross_entropy", {"rows x vocabulary": rows}),
        (
            "train_long_documents",
            {f"Reviews, seed {i}": {"fastenc, tail": trained(i)} for i in (0, 1)},
        ),
    ):
        content = {"machine": machine, "ceilings": ceilings, "cases": cases}
        (target / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_the_headline_has_the_range_of_the_devices(tmp_path, monkeypatch):
    monkeypatch.setattr(table_results, "RESULTS", tmp_path)
    for device, in_order, by_length, step in (("a", 60.0, 25.0, 32.0), ("b", 40.0, 12.0, 54.0)):
        (tmp_path / device).mkdir()
        ours, peers = (
            {"fastenc": {"median_ms": 10.0}},
            (table_results.BASELINE, table_results.SORTED),
        )
        for name, case, times in (
            ("encoder", "lengths of SST-2", (in_order, by_length)),
            ("mlm_step", "6 x 384, batch 16 x 128", (step,)),
        ):
            rows = ours | {
                peer: {"median_ms": time} for peer, time in zip(peers, times, strict=False)
            }
            content = {"machine": {"device": device, "threads": 2}, "cases": {case: rows}}
            (tmp_path / device / f"{name}.json").write_text(json.dumps(content))
    ranges = re.findall(r"\d\.\d to \d\.\d", readme.headline())
    assert ranges == ["4.0 to 6.0", "1.2 to 2.5", "3.2 to 5.4"]
    assert "on 2 processors" in readme.headline()


def test_the_chart_of_speed_shows_the_committed_results():
    """Its bars' labels, group by group of one format after another, as matplotlib writes them."""
    groups = speed_chart.factors()
    expected = [
        speed_chart.text_of(group[label]) for label in speed_chart.BARS for group in groups.values()
    ]
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", speed_chart.CHART.read_text(encoding="utf-8"))
    assert [text for text in texts if text.endswith("×")] == expected
    assert set(groups) <= set(texts), "python -m benchmarks.speed_chart draws it again"


def test_a_page_of_libraries_has_its_own_cases_and_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(table_results, "RESULTS", tmp_path)
    assert guides.other_libraries("others") == "Not measured yet.\n"
    (tmp_path / "cpu").mkdir()
    machine = {"device": "Some CPU", "threads": 2, "versions": {"torch": "2.13"}, "date": "today"}
    patched = {"speedup": 2.5, "largest_difference": 1.2e-7, "rounds": 5}
    cases = {
        "KeyBERT, extract_keywords": {"patched": patched | {"versions": {"keybert": "0.9.0"}}},
        "SetFit, predict_proba": {"patched": {"missing": "not installed: setfit"}},
        "Trainer, evaluation": {"patched": patched | {"versions": {}}},
    }
    content = {"machine": machine, "cases": cases}
    (tmp_path / "cpu" / "other_libraries.json").write_text(json.dumps(content))
    text = guides.other_libraries("others")
    assert "| KeyBERT, extract_keywords | 2.50× | 1e-07 | keybert 0.9.0 |" in text
    assert "not installed: setfit" in text and "Trainer" not in text
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "with").glob("*.md"))
    assert {*guides.CASES_OF} == {match[3] for match in tables_main.MARKED.finditer(pages)}


def test_the_libraries_results_are_compared_number_by_number():
    outputs = [{"score": 0.5, "word": "bank"}, [{"scores": torch.tensor([0.25, 1.0])}], 2]
    assert other_libraries.numbers(outputs) == [0.5, 0.25, 1.0, 2.0]
    every = tuple(first for several in guides.CASES_OF.values() for first in several)
    assert all(case.startswith(every) for case in other_libraries.CASES)


def test_tables_say_of_every_provider_what_there_is(tmp_path, monkeypatch):
    monkeypatch.setattr(table_results, "RESULTS", results(tmp_path / "results"))
    text = page.tables()
    assert "| a case | 2 ms, 1.50×, 61 % | not installed | failed | wrong |" in text
    assert "copy 4,000 GB/s, bfloat16 product 700 TFLOP/s" in text
    assert (
        "| Reviews: fastenc, tail | f1 (test) 81.0 ± 1.4 | 60 s | 50 s |  | 100 MiB | 2 |" in text
    )
    assert "| fastenc | 900 k/s, MFU 55 %, 2 GB |" in text
    assert "rows x vocabulary" in text


def test_a_seed_that_two_machines_have_counts_once():
    row = lambda score: {"metric": "f1", "dev": 0.1, "test": score}
    first = {"Set, seed 0": {"fastenc": row(0.8), "peer": row(0.7)}}
    second = {"Set, seed 0": {"fastenc": row(0.2)}, "Set, seed 1": {"fastenc": row(0.9)}}
    text = training.scores_of_every_seed([{"cases": first}, {"cases": second}])
    assert "| Set | f1 (test) | 85.0 ± 7.1 (2) | 70.0 (1) |" in text


def test_pictures_are_made_from_the_results(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "RESULTS", results(tmp_path / "results"))
    monkeypatch.setattr(sys, "argv", ["plots", str(tmp_path / "plots")])
    plots.main()
    made = {path.name for path in (tmp_path / "plots" / "some-gpu").iterdir()}
    assert {"attention.png", "models_bert-base_training.png", "roofline.png"} <= made
    for path in (tmp_path / "plots" / "some-gpu").iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")


def test_what_a_visits_sanitizer_runs_names_every_op():
    done = python("-m", "tests.helpers.sanitize", "--device", "cpu", "bias_gelu", "whole_*")
    assert done.returncode == 0, done.stderr
    ran = {line.split()[0] for line in done.stdout.splitlines()}
    assert ran == {"bias_gelu", "whole_model"}


@pytest.mark.parametrize(
    "sizes,tensors,launches",
    [
        ([], 110, 0),
        ([1] * 110, 110, 1),
        ([1] * 111, 110, 2),
        ([320 * 65536], 64, 1),
        ([320 * 65536 + 1], 64, 2),
        ([319 * 65536, 65536, 1], 64, 2),
        ([200 * 65536] * 8, 36, 5),
        ([0, 0], 64, 0),
    ],
)
def test_launches_of_many_tensors_are_counted_as_pytorch_makes_them(sizes, tensors, launches):
    """A launch has at most so many tensors, and 320 blocks of 65,536 elements."""
    assert step_launches.multi_tensor_launches(sizes, tensors) == launches


def test_names_of_benchmarks():
    run = lambda *arguments: subprocess.run(
        [sys.executable, "-m", "benchmarks.run", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert {"attention", "models", "host_costs"} <= set(run("--list").stdout.split())
    assert "fastenc bench --tune" in run("--help").stdout
