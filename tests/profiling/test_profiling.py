"""Ceilings, an op's work, and the profile of a step, at small sizes. No test depends on a measured time."""

import io
import json
import re

import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

import fastenc
from fastenc.cli.commands import run as run_command
from fastenc.models import EncoderConfig, MaskedLM
from fastenc.ops import (
    attention,
    bias_gelu,
    block_sparse_attention,
    cross_attention,
    disentangled_attention,
    gemm,
)
from fastenc.ops.block_sparse_attention import BlockPlan
from fastenc.ops.gemm import fastest_product
from fastenc.profiling import Ceilings, Work, models, report
from fastenc.profiling import profile as profiles
from fastenc.profiling.costs import CountWork, encoder_flops
from fastenc.profiling.profile import Profile, Row, profile_step
from tests.helpers import families
from tests.helpers.attention_cases import offsets_of
from tests.helpers.commands import run
from tests.helpers.processes import python

SMALL = EncoderConfig(
    vocab_size=97, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=48, max_positions=40
)
CPU = torch.device("cpu")


def small_ceilings():
    return Ceilings(CPU, copy_bytes=1 << 16, product_size=32)


def count(function):
    with CountWork() as counted:
        function()
    return counted.calls


def test_floor_is_the_larger_of_both_ceilings(monkeypatch):
    ceilings = small_ceilings()
    monkeypatch.setattr(ceilings, "_bandwidth", 1e9)
    monkeypatch.setitem(ceilings._products, torch.float32, 1e12)
    assert ceilings.floor(Work(2e9)) == 2
    assert ceilings.floor(Work(2e9, 3e12)) == 3
    assert ceilings.floor(Work(2e9, 1e12)) == 2


def test_ceilings_report_what_was_measured_only():
    ceilings = small_ceilings()
    assert ceilings.as_json() == {}
    ceilings.floor(Work(10.0))
    assert ceilings.as_json().keys() == {"copy_GB_per_s", "copy_MB"}
    ceilings.floor(Work(10.0, 10.0, torch.bfloat16))
    assert list(ceilings.as_json()["product_TFLOP_per_s"]) == ["bfloat16"]


def test_rates_are_those_of_what_a_call_reads_writes_and_multiplies(monkeypatch):
    """A call of half a second: 64 KiB read and as many written, and 32³ products and sums."""
    ceilings = small_ceilings()
    monkeypatch.setattr(ceilings, "_median", lambda function: 0.5)
    assert ceilings.bandwidth == 2 * 2 * 65536
    assert ceilings.product(torch.float32) == 2 * 2 * 32**3
    measured = ceilings.as_json()
    assert measured["copy_GB_per_s"] == 262144e-9 and measured["copy_MB"] == 0.065536
    assert measured["product_TFLOP_per_s"] == {"float32": 131072e-12}


@pytest.mark.parametrize("emulated", [True, False])
def test_peak_of_emulated_bfloat16_is_that_of_float32(monkeypatch, emulated):
    monkeypatch.setattr("fastenc.ops.gemm.emulates_bfloat16", lambda: emulated)
    a, b = torch.randn(8, 12).bfloat16(), torch.randn(12, 5).bfloat16()
    product = fastest_product(a, b)()
    assert product.dtype == (torch.float32 if emulated else torch.bfloat16)
    torch.testing.assert_close(product.float(), a.float() @ b.float(), atol=0.02, rtol=0.02)


def test_work_counts_each_operand_once_and_views_never():
    a, b = torch.randn(5, 7), torch.randn(7, 3)
    (op_call,) = count(lambda: a @ b)
    assert (op_call.name, op_call.shapes) == ("aten::mm", "5x7 7x3")
    assert op_call.work == Work(4.0 * (35 + 21 + 15), 2 * 5 * 7 * 3, torch.float32)
    (op_call,) = count(lambda: a.mul(a))
    assert op_call.work.bytes == 4 * 35 * 2, "the same operand twice is read once"
    (op_call,) = count(lambda: a.t())
    assert op_call.work.bytes == 0
    (op_call,) = count(lambda: a.add_(1))
    assert op_call.work.bytes == 4 * 35 * 2, "read and written in place"
    (op_call,) = count(lambda: a.zero_())
    assert op_call.work.bytes == 4 * 35
    table, chosen = torch.randn(100, 7), torch.tensor([3, 5])
    (op_call,) = count(lambda: table.index_select(0, chosen))
    assert op_call.work.bytes == 4 * 2 * 14 + 16, "of a table only the rows that are asked for"
    row = torch.randn(1, 7).expand(5, 7)
    (op_call,) = count(lambda: a.copy_(row))
    assert op_call.work.bytes == 4 * (35 + 7), "an expanded row is read once"


def test_work_of_our_own_ops():
    lengths, heads, dim = (5, 0, 12), 2, 16
    qkv = torch.randn(17, 3, heads, dim, requires_grad=True)
    out = []
    calls = count(lambda: out.append(attention(qkv, offsets_of(lengths), 12)))
    calls += count(lambda: out[0].backward(torch.ones_like(out[0])))
    flops = {
        op_call.name: op_call.work.flops for op_call in calls if op_call.name.startswith("fastenc")
    }
    scores = heads * dim * sum(n**2 for n in lengths)
    assert flops == {"fastenc::attention_fwd": 4 * scores, "fastenc::attention_bwd": 10 * scores}
    x = torch.randn(6, 32)
    (op_call,) = count(lambda: bias_gelu(x))
    assert op_call.work == Work(2 * x.nbytes, 0.0, torch.float32)


def test_flops_of_a_model_are_those_that_its_ops_count():
    lengths = [5, 17, 1, 30]
    model = MaskedLM(SMALL)
    step = models.training_step(model, lengths, CPU, autocast=False)
    products = [c for c in count(step) if c.work.flops]
    counted = sum(c.work.flops for c in products)
    rows = {
        int(c.shapes.split("x")[0]) for c in products if c.shapes.endswith(f"{SMALL.vocab_size}")
    }
    (labelled,) = rows
    # The input of the first layer needs its gradient, so every product has two products in the backward.
    model_flops = 3 * encoder_flops(SMALL, lengths, labelled)
    attention_recomputed = SMALL.num_layers * 2 * SMALL.hidden_size * sum(n**2 for n in lengths)
    assert counted == model_flops + attention_recomputed


@pytest.mark.parametrize(
    "family, changes",
    [
        ("bert", {}),
        ("albert", {}),
        ("t5-gated", {"d_kv": 24}),
        ("modernbert", {"local_attention": 80}),  # as wide as the sequences
        ("nomic_bert", {"head_dim": 20}),
        ("qwen3", {}),
        ("embedding_gemma2", {"sliding_window": 80, "embedding_dim": 48}),
    ],
)
def test_flops_of_a_forward_are_those_of_transformers_own_model(family, changes):
    """transformers computes every pair of its padded batch, so all sequences have one length."""
    pytest.importorskip("transformers")
    theirs = families.model(family, attn_implementation="eager", **changes)
    lengths = (12,) * 3
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        theirs(**families.padded_batch(family, lengths), return_dict=True)
    # Products outside the encoder's forward: its pooler, and the angles of rotary positions.
    left_out = re.compile(r"\.(pooler|rotary_emb)$")
    modules = {name: sum(n.values()) for name, n in counter.get_flop_counts().items()}
    other = sum(flops for name, flops in modules.items() if left_out.search(name))
    config = EncoderConfig.from_hf(theirs.config.to_dict())
    assert encoder_flops(config, lengths) == counter.get_total_flops() - other


def test_flops_of_the_masked_lm_head_are_those_of_transformers():
    """ALBERT's embeddings are narrower than its layers."""
    theirs = families.model("albert", "ForMaskedLM", embedding_size=24)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        theirs(**families.padded_batch("albert", (12,) * 3))
    encoder = sum(counter.get_flop_counts()["AlbertForMaskedLM.albert"].values())
    config = EncoderConfig.from_hf(theirs.config.to_dict())
    head = encoder_flops(config, (12,) * 3, labelled=36) - encoder_flops(config, (12,) * 3)
    assert head == counter.get_total_flops() - encoder > 0


@pytest.mark.parametrize("family", ["deberta", "deberta-v2", "big_bird-sparse"])
def test_flops_of_texts_are_those_that_the_ops_count_for_them(family):
    """The difference of two batches of one longest text, whose tables of relative positions are the same."""
    config = EncoderConfig.from_hf(families.config(family).to_dict()).replace(pooler=False)
    encoder = fastenc.Encoder(config)
    counted, expected = [], []
    for lengths in ((30, 17, 9), (30,)):
        step = models.inference_step(encoder, lengths, CPU)
        counted.append(sum(each.work.flops for each in count(step)))
        expected.append(encoder_flops(config, lengths))
    assert counted[0] - counted[1] == expected[0] - expected[1]


@pytest.mark.parametrize("window", [(-1, -1), (0, 0), (2, 3), (-1, 4), (50, 1)])
def test_flops_of_a_window_are_those_of_the_pairs_that_it_leaves(window):
    lengths, heads, dim = [1, 0, 9, 30], 2, 16
    left, right = (side if side >= 0 else 100 for side in window)
    pairs = sum(
        -left <= key - query <= right for n in lengths for query in range(n) for key in range(n)
    )
    qkv = torch.randn(sum(lengths), 3, heads, dim)
    windowed = lambda: attention(qkv, offsets_of(lengths), 30, window_size=window, impl="cpp")
    assert sum(one.work.flops for one in count(windowed)) == 2 * 2 * heads * dim * pairs


def test_flops_of_named_blocks_are_those_of_their_pairs():
    lengths, block_size, heads, dim = [5, 3], 4, 2, 16
    # The first block of the first sequence sees both, the second itself; the last row has no block.
    plan = BlockPlan(
        *(torch.tensor(x).int() for x in ([0, 2, 3, 4, 4], [0, 1, 1, 0], [1, 1, 2, 1]))
    )
    pairs = 4 * (4 + 1) + 1 * 1 + 3 * 3
    qkv = torch.randn(sum(lengths), 3, heads, dim, requires_grad=True)
    attend = lambda: block_sparse_attention(
        qkv, offsets_of(lengths), 5, plan, block_size, impl="cpp"
    )
    counted = [one.work.flops for one in count(lambda: attend().sum().backward())]
    assert [n for n in counted if n] == [2 * n * heads * dim * pairs for n in (2, 5)]


def test_flops_of_relative_positions_are_those_of_their_terms():
    lengths, heads, dim = [1, 0, 9], 2, 16
    qkv = torch.randn(sum(lengths), 3, heads, dim, requires_grad=True)
    keys, slots = torch.randn(4, heads, dim), torch.arange(17).clamp(max=3).int()
    attend = lambda: disentangled_attention(
        qkv, offsets_of(lengths), 9, slots, position_keys=keys, impl="cpp"
    )
    counted = [one.work.flops for one in count(lambda: attend().sum().backward())]
    # One term: one product in the forward; in the backward it again, and the gradients of both its factors.
    assert [n for n in counted if n] == [2 * n * heads * dim * (1 + 81) for n in (3, 8)]


def test_flops_of_a_window_on_other_keys_are_those_of_whole_windows():
    queries, keys, heads, dim = [3, 0, 5], [4, 6, 9], 2, 16
    q, k = torch.randn(8, heads, dim), torch.randn(19, heads, dim)
    offsets = offsets_of(queries), offsets_of(keys)
    windowed = lambda: cross_attention(q, k, k, *offsets, 5, 9, window_size=(2, 3), impl="cpp")
    pairs = 3 * 4 + 5 * 6
    assert sum(one.work.flops for one in count(windowed)) == 2 * 2 * heads * dim * pairs


@pytest.mark.parametrize("training", [False, True])
def test_profile_lists_every_op_of_a_step(training, tmp_path):
    if training:
        step = models.training_step(MaskedLM(SMALL), [9, 4], CPU, autocast=False)
    else:
        step = models.inference_step(fastenc.Encoder(SMALL), [9, 4], CPU)
    ceilings = small_ceilings()
    profile = profile_step(step, CPU, ceilings, tmp_path / "trace.json")
    calls = count(step)
    for row in profile.rows:
        works = [c.work for c in calls if (c.name, c.shapes) == (row.op, row.shapes)]
        assert row.bytes == sum(work.bytes for work in works)
        assert row.flops == sum(work.flops for work in works)
        assert row.floor_seconds == pytest.approx(sum(map(ceilings.floor, works)))
    rows = {row.op: row for row in profile.rows}
    if training:
        wanted = {"fastenc::attention_bwd", "fastenc::layer_norm_bwd", "aten::_fused_adamw_"}
        calls = {"fastenc::attention_fwd": 2, "fastenc::layer_norm_fwd": 5}
    elif gemm.has_vectors():
        wanted, layer = set(), "fastenc::encoder_layer_"
        calls = {layer + "attention": 2, layer + "after_attention": 2}
    else:
        wanted, calls = set(), {"fastenc::attention_fwd": 2, "fastenc::layer_norm_fwd": 4}
    wanted |= calls.keys()
    assert wanted <= rows.keys()
    assert {name: rows[name].calls for name in calls} == calls
    assert rows["fastenc::embedding_layer_norm_fwd"].calls == 1
    assert all(row.seconds > 0 for row in profile.rows) and profile.step_seconds > 0
    seconds = [row.seconds for row in profile.rows]
    assert seconds == sorted(seconds, reverse=True)
    names = {
        event.get("name")
        for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    }
    assert wanted <= names, "the trace holds the ops by name"


def test_a_step_of_training_predicts_the_usual_share_of_the_tokens():
    """Devlin et al. 2018: 15 %."""
    model, given = MaskedLM(SMALL), []
    hook = lambda module, arguments, options: given.append((*arguments, options["max_labels"]))
    model.register_forward_pre_hook(hook, with_kwargs=True)
    models.training_step(model, [40] * 50, CPU, autocast=False)()
    ((batch, labels, max_labels),) = given
    chosen = labels != -100
    assert int(chosen.sum()) == max_labels and torch.equal(labels[chosen], batch.input_ids[chosen])
    assert abs(max_labels / 2000 - 0.15) < 4 * (0.15 * 0.85 / 2000) ** 0.5


def test_kernels_are_matched_to_the_op_that_launched_them():
    """A trace as on a GPU: launches within the op's range on its thread; kernels later, on the device."""
    label = lambda name, ts, dur, tid: {
        "cat": "user_annotation",
        "name": name,
        "ts": ts,
        "dur": dur,
        "tid": tid,
    }
    launch = lambda correlation, ts, tid, cat="cuda_runtime": {
        "cat": cat,
        "name": "launch",
        "ts": ts,
        "dur": 1,
        "tid": tid,
        "args": {"correlation": correlation},
    }
    kernel = lambda correlation, name, dur, cat="kernel": {
        "cat": cat,
        "name": name,
        "ts": 900,
        "dur": dur,
        "tid": 7,
        "args": {"correlation": correlation},
    }
    events = [
        label("0 aten::mm", 10, 5, 1),
        label("1 fastenc::attention_bwd", 30, 9, 2),
        label("step", 0, 500, 1),
        launch(1, 12, 1),
        launch(2, 31, 2, "cuda_driver"),
        launch(3, 35, 2),
        launch(4, 31, 1),
        kernel(1, "gemm", 2e6),
        kernel(2, "kv", 3e6),
        kernel(3, "Memset", 1e6, "gpu_memset"),
        kernel(4, "outside every range", 9e6),
        kernel(5, "without a launch", 9e6),
    ]
    assert profiles._kernels(events) == {
        0: [("aten::mm", "gemm", 2.0)],
        1: [("fastenc::attention_bwd", "kv", 3.0), ("fastenc::attention_bwd", "Memset", 1.0)],
    }


def test_command_writes_table_picture_and_trace(tmp_path, monkeypatch):
    monkeypatch.setitem(models.SIZES, "minilm", SMALL)
    monkeypatch.setattr("fastenc.cli.measure.Ceilings", lambda device: small_ceilings())
    command = ["profile", "minilm", "-o", tmp_path / "p", "--batch-size", 2, "--length", 8]
    output = run(*command)
    assert "fastenc::" in output and "ceilings allow" in output
    assert all(heading in output for heading in report.HEADINGS), "a file gets every column"
    written = json.loads((tmp_path / "p" / "profile.json").read_text())
    assert f"{1e3 * written['rows'][0]['seconds']:.3f}" in output
    assert any("attention" in row["op"] for row in written["rows"])
    assert written["rows"] and written["ceilings"]["copy_MB"] > 0 and written["peak_MB"] is None
    assert (tmp_path / "p" / "profile.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "p" / "trace.json").read_text())["traceEvents"]


LONG = Row(
    "fastenc::linear_bias_gelu",
    "f32[256, 1536] f32[1536, 384] f32[384] int64[3]",
    calls=6,
    seconds=0.0123,
    bytes=1e8,
    flops=2e9,
    floor_seconds=0.05,
)


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200, None])
def test_each_op_has_one_line_of_the_table(width):
    profiled = Profile([LONG] * 3, 0.04, {}, None)
    console = Console(width=width or 1000, file=io.StringIO())
    console.print(report.table(profiled, width), crop=False)
    lines = console.file.getvalue().splitlines()
    rows = [line for line in lines if "12.300" in line]
    assert len(rows) == 3 and len(lines) == 8
    assert all("407 %" in row for row in rows)
    if width is None:
        assert LONG.shapes in rows[0] and "TFLOP/s" in lines[2]
    else:
        assert max(map(len, lines)) <= width
        assert width < 80 or LONG.op in rows[0]


def test_more_than_the_roofline_is_explained():
    below = Row("aten::mm", "", 1, seconds=1.0, floor_seconds=0.5)
    assert "no error" not in report.explanation(Profile([below], 1.0, {}, None))
    text = report.explanation(Profile([below, LONG], 1.0, {}, None))
    assert "More than 100 % is no error" in text and "cache" in text


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["nothing"], "MODEL must be one of minilm, bert-base, bert-large, xlm-r-base"),
        (["minilm", "--length", "900"], "at most 512, the model's number of positions, got 900"),
        (["minilm", "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["minilm", "--precision", "int8"], "--precision must be fp32 or bf16, got 'int8'"),
        (["minilm", "--device", "tpu"], "--device must be cpu or cuda, got 'tpu'"),
    ],
)
def test_bad_arguments(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        run_command(["profile", *arguments, "-o", str(tmp_path / "p")])
    assert not (tmp_path / "p").exists()


def test_benchmarks_outside_a_checkout_are_a_clear_error(monkeypatch, tmp_path):
    monkeypatch.setattr(fastenc, "__file__", str(tmp_path / "site-packages/fastenc/__init__.py"))
    with pytest.raises(ValueError, match="in fastenc's repository, not in the installed package"):
        run_command(["bench"])


def test_bench_hands_its_arguments_on():
    done = python("-m", "fastenc", "bench", "no_such_benchmark")
    assert done.returncode == 2 and "no such benchmark: no_such_benchmark" in done.stderr
