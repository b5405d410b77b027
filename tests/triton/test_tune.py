"""The tuner and the tables that it fills, on interpreted kernels with a made-up clock."""

import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from fastenc.kernels import (
    attention,
    attention_backward,
    attention_config,
    attention_short_config,
    bias_gelu,
    bias_glu,
    embedding_layer_norm,
    launch,
    layer_norm_config,
    linear_gelu,
)

from benchmarks import (
    _tuning,
    bench_attention,
    bench_bias_gelu,
    bench_bias_glu,
    bench_embedding_layer_norm,
    bench_layer_norm,
    bench_linear_gelu,
    run,
    tune,
)

WIDTH = 70


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """An empty folder of tables, for a device of architecture sm_00."""
    monkeypatch.setattr(launch, "TABLES", tmp_path)
    monkeypatch.setattr(launch, "architecture", lambda device: "sm_00")
    forget()
    yield tmp_path
    forget()


def forget():
    launch.table.cache_clear()
    for tunable in launch.registry.values():
        tunable._chosen.cache_clear()


def problem():
    return bench_bias_gelu.gelu_problem(6, WIDTH, torch.float32)


def clock_of(cost, x):
    """Seconds of the launch that is being tried: cost(forward's parameters) + cost(backward's parameters)."""

    def clock(operation, prepare):
        chosen = [bias_gelu.config(WIDTH, like=x, backward=b) for b in (False, True)]
        return sum(map(cost, chosen))

    return clock


def distance(parameters):
    return 1 + abs(parameters["ROWS"] - 4) + abs(parameters["BLOCK"] - 512) / 256


def test_the_fastest_right_candidate_fills_the_table(triton_target, tables):
    made = problem()
    x = made.inputs[0]
    tuner = tune.Tuner(tables / "sm_00.json", clock_of(distance, x), impl=triton_target.impl)
    tuner.tune(made)
    written = json.loads((tables / "sm_00.json").read_text())
    assert [entry["op"] for entry in written["entries"]] == ["bias_gelu"] * 2
    keys = [entry["key"] for entry in written["entries"]]
    assert {"backward": True, "dtype": "float32", "width": WIDTH} in keys
    for entry in written["entries"]:
        assert (entry["launch"]["ROWS"], entry["launch"]["BLOCK"]) == (4, 512)
        assert entry["us"] < entry["rule_us"]
    assert written["machine"]["versions"]["torch"]
    # The launcher now uses the table, and the rule for launches that are not in the table.
    forget()
    assert bias_gelu.config(WIDTH, like=x, backward=True)["ROWS"] == 4
    rule = bias_gelu.config(WIDTH)
    assert bias_gelu.config(WIDTH, like=x.half(), backward=True) == rule
    assert bias_gelu.config(WIDTH + 1, like=x, backward=True) == bias_gelu.config(WIDTH + 1)


def test_an_ops_candidates_are_tried_before_single_changes(triton_target, tables, monkeypatch):
    """Here every single change of the rule is slower, so single changes would not find the best launch."""
    rule = bias_gelu.config(WIDTH)
    wanted = {"ROWS": 2, "BLOCK": 512}
    assert all(rule[name] != value for name, value in wanted.items())

    def cost(parameters):
        changed = sum(parameters[name] != rule[name] for name in wanted)
        return 0.5 if parameters.items() >= wanted.items() else 1 + changed

    made = problem()
    clock = clock_of(cost, made.inputs[0])
    tuner = tune.Tuner(tables / "sm_00.json", clock, impl=triton_target.impl)
    monkeypatch.setattr(launch.registry["bias_gelu"], "candidates", (wanted,))
    tuner.tune(made)
    backward = next(e for e in tuner.entries.values() if e["key"]["backward"])
    assert backward["launch"].items() >= wanted.items()


def test_wrong_and_failing_candidates_are_never_timed(triton_target, tables):
    made = problem()
    x = made.inputs[0]
    timed = []

    def run_op(x, bias, impl):
        y = made.run(x, bias, impl=impl)
        parameters = bias_gelu.config(WIDTH, like=made.inputs[0], backward=False)
        if impl != "reference" and parameters["ROWS"] == 4:
            return y * 1.01
        if impl != "reference" and parameters["ROWS"] == 8:
            raise RuntimeError("out of resources")
        return y

    def clock(operation, prepare):
        parameters = bias_gelu.config(WIDTH, like=x, backward=False)
        timed.append(parameters["ROWS"])
        return distance(parameters)

    tuner = tune.Tuner(tables / "sm_00.json", clock, impl=triton_target.impl)
    tuner.tune(made._replace(run=run_op))
    assert set(timed) <= {1, 2, 16, bias_gelu.config(WIDTH)["ROWS"]} and 2 in timed
    forward = next(e for e in tuner.entries.values() if not e["key"]["backward"])
    assert forward["launch"]["ROWS"] == 2


def test_a_rule_that_fails_is_an_error(triton_target, tables):
    def fails(x, bias, impl):
        return x + bias if impl == "reference" else x + bias + 1

    tuner = tune.Tuner(
        tables / "sm_00.json", lambda operation, prepare: 1.0, impl=triton_target.impl
    )
    made = problem()

    def run_op(x, bias, impl):
        made.run(x, bias, impl=impl)
        return fails(x, bias, impl)

    with pytest.raises(RuntimeError, match=r"the rule's own .* fails or is wrong"):
        tuner.tune(made._replace(run=run_op))
    assert not (tables / "sm_00.json").exists()


def test_less_than_two_percent_is_noise(triton_target, tables):
    made = problem()
    rule = bias_gelu.config(WIDTH)
    cost = lambda parameters: 1.0 if parameters == rule else 0.99
    clock = clock_of(cost, made.inputs[0])
    tuner = tune.Tuner(tables / "sm_00.json", clock, impl=triton_target.impl)
    tuner.tune(made)
    assert all(entry["launch"] == rule for entry in tuner.entries.values())


def test_an_interrupted_run_goes_on_and_keeps_what_is_there(triton_target, tables):
    path, made = tables / "sm_00.json", problem()
    first = tune.Tuner(path, lambda operation, prepare: 1.0, impl=triton_target.impl)
    assert not first.tune(made, until=0.0)
    assert not path.exists(), "the time was up before the first launch"
    assert first.tune(made)
    before = path.read_text()

    def no_clock(operation, prepare):
        raise AssertionError("timed again")

    again = tune.Tuner(path, no_clock, impl=triton_target.impl)
    assert again.tune(made, until=0.0), "there was nothing left to do"
    assert path.read_text() == before
    forced = tune.Tuner(
        path, clock_of(distance, made.inputs[0]), impl=triton_target.impl, keep=False
    )
    forced.tune(made)
    assert path.read_text() != before


def test_lengths_go_by_buckets(tables):
    entry = {
        "op": "attention",
        "key": {
            "kernel": "forward",
            "head_dim": 64,
            "precision": "half",
            "biased": False,
            "warp_groups": False,
            "max_seqlen": 512,
            "dropout": False,
            "dtype": "float16",
        },
        "launch": {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3},
    }
    (tables / "sm_00.json").write_text(json.dumps({"entries": [entry]}))
    qkv = torch.empty(0, dtype=torch.float16)
    key = ("forward", 64, "half", False, False)
    ask = lambda length, p: attention_config.config(*key, p, like=qkv, max_seqlen=length)
    assert ask(512, False) == ask(257, False) == entry["launch"]
    assert ask(256, False) == ask(512, True) == attention_config.config(*key, False)
    assert [launch.bucket(n) for n in (0, 1, 16, 17, 512, 513)] == [16, 16, 16, 32, 512, 1024]


def test_a_run_that_is_not_finished_says_so(triton_target, tables, monkeypatch, capsys):
    monkeypatch.setattr(tune, "ON_GPU", True)
    monkeypatch.setattr(tune, "kernel_clock", lambda: lambda operation, prepare: 1.0)
    monkeypatch.setattr(tune, "problems", lambda dtype: iter([problem]))
    monkeypatch.setattr(tune, "Tuner", partial(tune.Tuner, impl=triton_target.impl))
    assert tune.main(["--seconds", "0", "--processes", "0"]) == tune.UNFINISHED
    assert "the next run goes on here" in capsys.readouterr().out
    assert tune.main(["--processes", "0"]) == 0 and (tables / "sm_00.json").exists()


def test_candidates_are_compiled_ahead(triton_target, tables, monkeypatch):
    """Those that differ from the rule in one parameter, of the forward's launch and of the backward's."""
    monkeypatch.setattr(tune, "problems", lambda dtype: iter([problem]))
    values = sum(map(len, launch.registry["bias_gelu"].grid.values()))
    assert tune.compile_candidates(0, "float32", impl=triton_target.impl) == 2 * values


SMALL = {
    "layer_norm": lambda: bench_layer_norm.norm_problem(4, 64, torch.float32, 0.1),
    "attention": lambda: bench_attention.attention_problem(
        [20, 9], 1, 32, torch.float32, 0.1, (4, 4)
    ),
    "bias_gelu": problem,
    "embedding_layer_norm": lambda: bench_embedding_layer_norm.embedding_problem(
        5, 64, torch.float32, 0.1
    ),
    "attention_short": lambda: bench_attention.attention_problem(
        [20, 9], 1, 32, torch.float16, 0.0
    ),
    "bias_glu": lambda: bench_bias_glu.glu_problem(3, 70, torch.float32),
    "linear_gelu": lambda: bench_linear_gelu.epilogue_problem(3, 16, 24, torch.float16),
}


@pytest.mark.parametrize("op", SMALL)
def test_each_op_asks_for_a_launch_forward_and_one_backward(triton_target, tables, monkeypatch, op):
    monkeypatch.setattr(bench_embedding_layer_norm, "VOCABULARY", 20)
    monkeypatch.setattr(launch.registry[op], "grid", {})
    monkeypatch.setattr(launch.registry[op], "candidates", ())
    tuner = tune.Tuner(
        tables / "sm_00.json", lambda operation, prepare: 1.0, impl=triton_target.impl
    )
    tuner.tune(SMALL[op]())
    assert [entry["op"] for entry in tuner.entries.values()] == [op, op]


@pytest.mark.parametrize("mode", ["tf32", "deterministic"])
def test_attention_is_tuned_in_modes_of_its_own(triton_target, tables, monkeypatch, mode):
    monkeypatch.setattr(launch.registry["attention"], "grid", {})
    monkeypatch.setattr(launch.registry["attention"], "candidates", ())
    made = bench_attention.attention_problem(
        [20, 9],
        1,
        32,
        torch.float32,
        0.1,
        mode=getattr(_tuning, mode),
        tolerance=_tuning.TF32_TOLERANCE,
    )
    tuner = tune.Tuner(
        tables / "sm_00.json", lambda operation, prepare: 1.0, impl=triton_target.impl
    )
    tuner.tune(made)
    keys = [entry["key"] for entry in tuner.entries.values()]
    asked = {(key["kernel"], key["precision"]) for key in keys}
    if mode == "tf32":
        assert asked == {("forward", "tf32"), ("backward_kv", "tf32")}
    else:
        assert {kernel for kernel, _ in asked} == {"forward", "backward_kv", "backward_q"}
    assert not torch.are_deterministic_algorithms_enabled()


def test_attentions_backward_is_tried_with_wider_blocks_and_in_two_kernels(
    triton_target, tables, monkeypatch
):
    """A table in which two kernels are faster makes the backward take them."""
    monkeypatch.setattr(launch.registry["attention"], "grid", {})
    started, tried, run_kernel = {}, [], attention.run

    def noting(kernel, grid, *arguments, **named):
        started[kernel] = named.get("BLOCK_N")
        run_kernel(kernel, grid, *arguments, **named)

    def clock(operation, prepare):
        argument = () if prepare is None else (prepare(),)
        started.clear()
        operation(*argument)
        tried.append(dict(started))
        return 0.5 if attention_backward.attention_bwd_q_kernel in started else 1.0

    monkeypatch.setattr(attention, "run", noting)
    tolerance = _tuning.TF32_TOLERANCE
    made = bench_attention.attention_problem(
        [20, 9], 1, 32, torch.float32, 0.0, mode=_tuning.tf32, tolerance=tolerance
    )
    tuner = tune.Tuner(tables / "sm_00.json", clock, impl=triton_target.impl)
    tuner.tune(made)
    in_one, in_two = (
        attention_backward.attention_bwd_kv_kernel,
        attention_backward.attention_bwd_q_kernel,
    )
    assert any(kernels.get(in_one) == 128 and in_two not in kernels for kernels in tried)
    assert any(in_two in kernels for kernels in tried)
    # Only the backward over the keys has the choice of two kernels.
    chosen = {e["key"]["kernel"]: e["launch"].get("ATOMIC") for e in tuner.entries.values()}
    assert chosen == {"forward": None, "backward_kv": False}
    forget()
    with made.mode():
        out = made.run(*made.inputs, impl=triton_target.impl)
        started.clear()
        out.sum().backward()
    assert {in_one, in_two} <= started.keys()


@pytest.mark.parametrize("dtype", tune.DTYPES.values(), ids=tune.DTYPES)
def test_every_problem_can_be_made(monkeypatch, dtype):
    files = [*Path(tune.__file__).parent.glob("bench_*.py")]
    expected = {p.stem.removeprefix("bench_") for p in files if "def tuned(" in p.read_text()}
    assert expected >= SMALL.keys() - {"attention_short"}
    for name in expected:
        monkeypatch.setattr(f"benchmarks.bench_{name}.TOKENS", 512)
    monkeypatch.setattr(bench_embedding_layer_norm, "VOCABULARY", 20)
    made = [make() for make in tune.problems(dtype)]
    in_two_bytes = {"linear_gelu"} if dtype == torch.float32 else set()
    assert {m.op for m in made} == expected - in_two_bytes
    assert {m.inputs[0].dtype for m in made} == {dtype}


def shape_of(problem):
    """What tells a problem from others: the op, and what its function was made with."""
    cells = zip(problem.run.__code__.co_freevars, problem.run.__closure__ or (), strict=True)
    values = {name: getattr(c.cell_contents, "max_seqlen", c.cell_contents) for name, c in cells}
    return (
        problem.op,
        [tuple(x.shape) for x in problem.inputs],
        {name: v for name, v in values.items() if isinstance(v, (int, float, tuple))},
    )


def test_problems_are_the_same_one_by_one_and_listed_first():
    """The tuner lists them, so that other processes know them by number."""
    problems = lambda: bench_attention.tuned(torch.bfloat16)
    one_by_one = [shape_of(make()) for make in problems()]
    assert [shape_of(make()) for make in list(problems())] == one_by_one
    assert len({str(shape) for shape in one_by_one}) == len(one_by_one)


def test_processes_that_compile_end_with_the_tuner():
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    begun = pool.submit(time.sleep, 600)
    while not begun.running():
        time.sleep(0.01)
    tune.terminate(pool)
    assert not multiprocessing.active_children()


def test_one_dtype_is_tuned_unless_another_is_named(tables, monkeypatch):
    asked = []
    monkeypatch.setattr(tune, "ON_GPU", True)
    monkeypatch.setattr(tune, "kernel_clock", lambda: None)
    monkeypatch.setattr(tune, "problems", lambda dtype: asked.append(dtype) or iter(()))
    assert tune.main([]) == tune.main(["--dtype", "float16"]) == 0
    assert asked == [torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    "tunable,arguments",
    [
        (bias_gelu.config, (768,)),
        (bias_glu.config, (768,)),
        (linear_gelu.config, (3072, 768, True)),
        (layer_norm_config.config, (768, 2, True)),
        (embedding_layer_norm.config, (768, 2, True)),
        (attention_config.config, ("forward", 64, "half", False, True, True)),
        (attention_short_config.config, (64, 64, True, False, True)),
    ],
)
def test_only_parameters_that_the_rule_gives_are_tried(tunable, arguments):
    assert tunable.grid.keys() <= tunable.rule(*arguments).keys()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
def test_without_a_gpu_tuning_is_a_clear_error(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["run", "--tune"])
    with pytest.raises(SystemExit) as exit_:
        run.main()
    assert exit_.value.code == 2
    assert "torch sees none here" in capsys.readouterr().err
