import errno
import json
import math
import os
import shutil
from itertools import islice
from pathlib import Path

import pytest
import torch

from fastenc.models import EncoderConfig, MaskedLM
from fastenc.train import TrainConfig, Trainer, fine_tuning_lr, loop, run_report
from fastenc.train import checkpoint as checkpoints
from fastenc.train.evaluations import Evaluations
from fastenc.train.log import read_log
from fastenc.train.optimizer import lr_factor, parameter_groups
from tests.helpers.curves import with_curves
from tests.helpers.training_run import assert_bitwise_equal, build, build_task, weights


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    with with_curves():
        return folder, build(folder).train()


def test_loss_falls_and_the_best_model_is_left(uninterrupted):
    folder, metrics = uninterrupted
    lines = read_log(folder / "log.jsonl")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 21 and sum(losses[-5:]) < 0.95 * sum(losses[:5])
    assert all(line["tokens_per_s"] > 0 for line in lines if "loss" in line)
    evaluations = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert len(evaluations) == 3 and metrics["loss"] == min(evaluations)
    assert metrics["perplexity"] == pytest.approx(2.718281828 ** metrics["loss"], rel=1e-6)
    best = json.loads((folder / "metrics.json").read_text())
    assert best == {"step": 7 * (evaluations.index(metrics["loss"]) + 1), **metrics}
    assert_bitwise_equal(weights(folder), weights(checkpoints.folder_of(folder, best["step"])))
    assert len(checkpoints.checkpoints(folder)) in (2, 3)
    assert (folder / "curves.png").stat().st_size > 5000
    files = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert files == {".safetensors", ".json", ".jsonl", ".png", ".md"}, "no pickles"


@pytest.mark.parametrize("higher, step", [(True, 2), (False, 3)])
def test_the_best_model_is_that_of_the_best_value(tmp_path, higher, step):
    """NaN, such as an undefined correlation, is worse than any number."""
    values = iter([math.nan, 0.9, 0.1, 0.5, math.nan])
    trainer = build(tmp_path, max_steps=5, eval_every=1)
    trainer.evaluate = lambda model: {"accuracy": next(values)}
    trainer.evaluations = Evaluations("accuracy", higher)
    best = {"accuracy": 0.9 if higher else 0.1}
    assert trainer.train() == best
    assert json.loads((tmp_path / "metrics.json").read_text()) == {"step": step, **best}
    assert_bitwise_equal(weights(tmp_path), weights(checkpoints.folder_of(tmp_path, step)))


@pytest.mark.parametrize("metric, best", [("accuracy", 0.9), ("loss", 0.1)])
def test_the_best_model_of_a_task_has_the_highest_accuracy_or_the_lowest_loss(
    metric, best, tmp_path
):
    values = iter([0.3, 0.9, 0.1])
    trainer = build_task(
        tmp_path, "sequence-classification", metric=metric, max_steps=3, eval_every=1
    )
    trainer.evaluate = lambda model: {metric: next(values)}
    assert trainer.train()[metric] == best


def test_a_batch_of_whole_texts_has_the_tokens_of_a_full_batch_of_cut_texts(tmp_path):
    tokens = lambda task, **options: build_task(tmp_path, task, **options).config.batch_tokens
    assert tokens("chunks") == 32 * 512
    assert tokens("chunks", batch_tokens=99) == 99
    assert tokens("sequence-classification") is None


def test_dropout_is_on_in_every_step_and_off_in_evaluations(tmp_path):
    trainer = build(tmp_path, max_steps=3, eval_every=1)
    model, modes = trainer.plain_model.eval(), []  # as a model that is loaded
    model.register_forward_hook(lambda *_: modes.append(model.training))
    trainer.evaluate = lambda model: {"loss": float(model.training)}
    assert trainer.train() == {"loss": 0.0}
    assert modes == [True] * 6, "two micro-batches a step"


def test_an_evaluation_does_not_change_what_dropout_drops_after_it(tmp_path):
    """An evaluation may draw random numbers, such as a task that samples."""
    for name, drawn in (("none", 0), ("some", 5)):
        trainer = build(tmp_path / name, max_steps=4, eval_every=2)
        trainer.evaluate = lambda model, drawn=drawn: {"loss": float(torch.rand(drawn).sum())}
        trainer.train()
    none, some = (weights(checkpoints.folder_of(tmp_path / name, 4)) for name in ("none", "some"))
    assert_bitwise_equal(none, some)


class OfAnotherProcess:
    """An accelerator as the process of this index has it."""

    def __init__(self, accelerator, index):
        self._accelerator, self.process_index = accelerator, index

    def __getattr__(self, name):
        return getattr(self._accelerator, name)


def test_each_process_drops_other_units(tmp_path, monkeypatch):
    """From the beginning, and after a run was resumed with another number of processes."""
    seeds = []
    made = loop._accelerator
    for index in (0, 1):
        monkeypatch.setattr(
            loop, "_accelerator", lambda config, index=index: OfAnotherProcess(made(config), index)
        )
        trainer = build(tmp_path, seed=7)
        seeds.append(torch.initial_seed())
        trainer.processes = 2
        for step in (4, 5):
            trainer._restore_random_states({"0.cpu": torch.get_rng_state()}, step)
            seeds.append(torch.initial_seed())
    assert len(set(seeds)) == 6


def test_the_log_counts_passes_that_are_done(tmp_path):
    trainer = build(tmp_path, batch_size=None, batch_tokens=30)
    trainer.train()
    steps = [trainer.schedule.steps(epoch) for epoch in range(3)]
    expected = [e + done / steps[e] for e in range(3) for done in range(1, steps[e] + 1)]
    lines = read_log(tmp_path / "log.jsonl")
    assert [line["epoch"] for line in lines if "epoch" in line] == expected
    assert expected[-1] == 3.0
    assert trainer.schedule.sampler._counts.keys() == {0, 1, 2}, (
        "counting an epoch costs a pass over it"
    )


@pytest.mark.parametrize(
    "options, steps, expected",
    [
        ({}, 499, [499]),
        ({}, 500, [125, 250, 375, 500]),
        ({}, 2105, [527, 1053, 1579, 2105]),
        ({"eval_every": 800}, 2105, [800, 1600]),
    ],
)
def test_long_epochs_have_an_evaluation_each_quarter(options, steps, expected):
    config = TrainConfig("runs", **options)
    due = [done for done in range(1, steps + 1) if config.evaluation_due(done, done, steps)]
    assert due == expected


@pytest.mark.parametrize(
    "options, processes, steps",
    [
        ({}, 1, 3 * 2105),
        (dict(epochs=1, batch_size=16, accumulation=2), 4, 527),
        (dict(batch_size=None, batch_tokens=4096), 1, 3 * 2105),
        (dict(max_steps=7), 1, 7),
    ],
)
def test_steps_of_a_run_are_known_before_it(options, processes, steps):
    assert TrainConfig("runs", **options).steps_over(67349, processes) == steps


def test_the_sequences_of_a_step_are_divided_over_the_processes():
    config = TrainConfig("runs", batch_size=8, global_batch_size=96)
    assert [config.micro_batches(processes) for processes in (1, 2, 3)] == [12, 6, 4]
    assert TrainConfig("runs", accumulation=5).micro_batches(3) == 5
    for size, processes in ((100, 1), (96, 5), (4, 1)):
        config = TrainConfig("runs", batch_size=8, global_batch_size=size)
        with pytest.raises(
            ValueError, match=rf"must be a multiple .*got {size} and 8 \* {processes}:"
        ):
            config.micro_batches(processes)


def test_warm_up_steps_replace_their_share_from_none_to_all():
    of = lambda steps: TrainConfig("runs", warmup=0.5, warmup_steps=steps).warmup_of(10)
    assert [of(steps) for steps in (None, 0, 3, 10)] == [5, 0, 3, 10]
    with pytest.raises(ValueError, match="at most the run's 10 steps, got 11: give fewer"):
        of(11)


@pytest.mark.parametrize("higher", [True, False])
def test_of_equal_evaluations_the_first_is_the_best(higher):
    evaluations = Evaluations("f1", higher)
    for step in (1, 2, 3):
        evaluations.add(step, {"f1": 0.5})
    assert evaluations.best["step"] == 1 and evaluations.since_best == 2


def test_the_default_rate_falls_with_width_and_length():
    assert fine_tuning_lr(768) == fine_tuning_lr(768, steps=1000) == 5e-5
    assert fine_tuning_lr(384, "lora", steps=200) == pytest.approx(1e-3)
    assert fine_tuning_lr(768, steps=4000) == pytest.approx(5e-5 / 4**0.32)


@pytest.mark.parametrize("seconds, plots", [(10.0, 1), (0.0, 4)])
def test_curves_are_drawn_after_evaluations_but_not_too_often_and_at_the_end(
    seconds, plots, tmp_path, monkeypatch
):
    drawn = []
    monkeypatch.setattr(run_report, "SECONDS_BETWEEN_PLOTS", seconds)
    monkeypatch.setattr(run_report, "plot_log", lambda *given, **options: drawn.append(given))
    build(tmp_path, max_steps=3, eval_every=1).train()
    assert len(drawn) == plots


def test_without_a_terminal_the_logs_lines_are_printed(tmp_path, capsys):
    trainer = build(tmp_path, max_steps=4, eval_every=4, log_every=2)
    trainer.report.show_progress = None
    trainer.train()
    lines = capsys.readouterr().err.splitlines()
    assert [line[:11] for line in lines] == [
        "4 optimiser",
        "step 2 of 4",
        "step 4 of 4",
        "step 4 of 4",
    ]
    for name in ("epoch 0.2857", "loss ", "tokens_per_s ", "left "):
        assert name in lines[1]
    assert "eval_loss " in lines[3]


def test_the_result_loads_in_transformers(uninterrupted):
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    folder, _ = uninterrupted
    theirs = AutoModelForMaskedLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(["the cat sat on the mat"], return_tensors="pt")
    ours = MaskedLM.from_pretrained(folder)
    from fastenc.packing import pack

    result = ours(pack(batch["input_ids"])).logits
    torch.testing.assert_close(result, theirs.eval()(**batch).logits[0], rtol=0, atol=1e-5)


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path, monkeypatch):
    import safetensors.torch

    real = safetensors.torch.save_file

    def full(tensors, path, **options):
        if len(checkpoints.checkpoints(tmp_path)) == 1:
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(tensors, path, **options)

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    message = r"checkpoint at step 6 could not be written.*No space left.*last good checkpoint is .*checkpoint-00000003"
    with pytest.raises(OSError, match=message):
        build(tmp_path).train()
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["checkpoint-00000003"]
    assert not list(tmp_path.rglob("*.tmp")), "temporary files were left"
    weights(tmp_path / "checkpoint-00000003")


def test_a_write_that_fails_without_a_full_disk_leaves_nothing_half_done(tmp_path, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "write_optimizer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path).train()
    assert not checkpoints.checkpoints(tmp_path) and not list(tmp_path.rglob("*.tmp"))


def test_a_run_is_replaced_when_that_is_asked_for(uninterrupted, tmp_path):
    """Like a notebook cell that runs twice. Files that belong to no run stay."""
    whole = uninterrupted[0]
    build(tmp_path, max_steps=3, learning_rate=0.5).train()
    (tmp_path / "modules.json").write_text("of the first run")
    newest = checkpoints.latest_checkpoint(tmp_path)
    (newest / "modules.json").write_text("of the first run")
    (tmp_path / "mine.txt").write_text("not of a run")
    with pytest.raises(ValueError, match="resume=True or replaced with overwrite=True, got both"):
        build(tmp_path).train(resume=True, overwrite=True)
    assert newest.exists()
    build(tmp_path).train(overwrite=True)
    assert not newest.exists() and not (tmp_path / "modules.json").exists()
    assert (tmp_path / "mine.txt").read_text() == "not of a run"
    assert_bitwise_equal(weights(tmp_path), weights(whole))
    assert [line.get("step") for line in read_log(tmp_path / "log.jsonl")] == [
        line.get("step") for line in read_log(whole / "log.jsonl")
    ]
    build(tmp_path / "new", max_steps=1).train(overwrite=True)  # also if there is no earlier run


def test_a_model_without_checkpoints_is_replaced_only_when_that_is_asked_for(tmp_path):
    build(tmp_path, max_steps=1).train()
    for folder in checkpoints.checkpoints(tmp_path):  # to save space, say
        shutil.rmtree(folder)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for resume in (False, True):
        with pytest.raises(ValueError, match=r"holds a model, and no checkpoint .* overwrite=True"):
            build(tmp_path, max_steps=2).train(resume=resume)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files
    build(tmp_path, max_steps=2).train(overwrite=True)
    assert json.loads((tmp_path / "metrics.json").read_text())["step"] == 2


def test_resuming_with_other_settings_is_refused(uninterrupted):
    folder, _ = uninterrupted
    with pytest.raises(
        ValueError,
        match=r"holds a run \(checkpoint-00000021\): continue it with resume=True, replace it",
    ):
        build(folder).train()
    for options, message in (
        (dict(learning_rate=0.02), "learning_rate=0.01, this run has 0.02. Resuming would"),
        (dict(max_steps=30), "max_steps=None, this run has 30"),
        (dict(dropout=0.2), "model.hidden_dropout_p=0.1, this run has 0.2"),
        (dict(probability=0.2), "probability=0.3, this run has 0.2"),
        (dict(texts=59), "data='50 examples of .* this run has '49 examples of"),
    ):
        with pytest.raises(ValueError, match=rf"checkpoint-00000021 was written with {message}"):
            build(folder, **options).train(resume=True)


def test_a_finished_run_resumed_does_nothing(uninterrupted):
    folder, metrics = uninterrupted
    before = weights(folder)
    assert build(folder, log_every=7, save_every=None).train(resume=True) == metrics
    assert_bitwise_equal(weights(folder), before)


def test_without_an_evaluation_the_last_weights_are_the_result(tmp_path):
    trainer = build(tmp_path, max_steps=4)
    trainer.evaluate = None
    assert trainer.train() == {}
    assert_bitwise_equal(weights(tmp_path), weights(tmp_path / "checkpoint-00000004"))
    assert json.loads((tmp_path / "metrics.json").read_text()) == {"step": 4}


def test_a_corrupt_checkpoint_is_named(tmp_path):
    build(tmp_path, max_steps=2, eval_every=2).train()
    for name in ("optimizer.safetensors", "model.safetensors", "state.json"):
        path = tmp_path / "checkpoint-00000002" / name
        whole = path.read_bytes()
        path.write_bytes(whole[:100])
        with pytest.raises(ValueError, match=r"checkpoint-00000002 is corrupt .*: remove it"):
            build(tmp_path, max_steps=2, eval_every=2).train(resume=True)
        path.write_bytes(whole)


def test_a_run_whose_best_checkpoint_was_deleted_is_not_resumed(tmp_path):
    values = iter([0.1, 0.2])
    trainer = build(tmp_path, max_steps=2, eval_every=1)
    trainer.evaluate = lambda model: {"loss": next(values)}
    trainer.train()
    shutil.rmtree(tmp_path / "checkpoint-00000001")
    with pytest.raises(ValueError, match=r"checkpoint-00000001 must be there, .* put it back"):
        build(tmp_path, max_steps=2, eval_every=1).train(resume=True)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    trainer = build(tmp_path)
    with torch.no_grad():
        trainer.plain_model.head.bias.fill_(float("nan"))
    with pytest.raises(
        FloatingPointError, match=r"the loss must be finite, got nan at step 1: .*: none yet"
    ):
        trainer.train()


def test_a_gradient_that_is_not_finite_never_reaches_the_weights(tmp_path):
    trainer = build(tmp_path)
    bias = trainer.plain_model.head.bias
    bias.register_hook(lambda grad: grad * float("inf") if trainer.step == 4 else grad)
    message = r"the gradient's norm must be finite, got (nan|inf) at step 5: .*checkpoint: .*checkpoint-00000003"
    with pytest.raises(FloatingPointError, match=message):
        trainer.train()
    assert all(parameter.isfinite().all() for parameter in trainer.plain_model.parameters())


def test_where_losses_are_read_late_the_weights_are_those_before_the_broken_step(tmp_path):
    """As on a GPU: the next step must not change the weights either."""
    trainer = build(tmp_path, eval_every=100, log_every=7)
    trainer.reads_every_step = False
    bias, seen = trainer.plain_model.head.bias, []
    bias.register_hook(lambda grad: grad * float("inf") if trainer.step == 4 else grad)
    step = trainer._optimiser_step

    def watched(window):
        seen.append([p.detach().clone() for p in trainer.plain_model.parameters()])
        step(window)

    trainer._optimiser_step = watched
    with pytest.raises(
        FloatingPointError, match=r"the gradient's norm must be finite, got (nan|inf) at step 5"
    ):
        trainer.train()
    assert len(seen) == 6
    for before, now in zip(seen[4], trainer.plain_model.parameters(), strict=True):
        assert torch.equal(before, now)
    assert not torch.equal(seen[3][0], seen[4][0])


def test_losses_read_late_give_the_same_log(tmp_path):
    logs = []
    for late in (False, True):
        trainer = build(tmp_path / str(late), log_every=3)
        trainer.reads_every_step = not late
        trainer.train()
        lines = read_log(tmp_path / str(late) / "log.jsonl")
        logs.append([{k: v for k, v in line.items() if "_per_" not in k} for line in lines])
    assert logs[0] == logs[1] and len(logs[0]) > 2


def test_micro_batches_count_by_their_labelled_tokens(tmp_path):
    """The gradient of two unequal micro-batches is that of the mean loss over all their labelled tokens (no
    dropout)."""
    trainer = build(tmp_path, accumulation=2, max_steps=1, dropout=0.0, max_grad_norm=0.0)
    model, gradients = trainer.plain_model, {}
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda: (
        gradients.update({n: p.grad.clone() for n, p in model.named_parameters()}),
        step(),
    )
    first = list(trainer.schedule.sampler.epoch(0))[:2]
    reference = MaskedLM(model.config)
    reference.load_state_dict(model.state_dict())
    trainer.evaluate = None
    trainer.train()
    losses, counts = [], []
    for serial, indices in enumerate(first):
        example = trainer.collate([trainer.examples[i] for i in indices], serial)
        logits = reference(example["batch"]).logits
        losses.append(torch.nn.functional.cross_entropy(logits, example["labels"], reduction="sum"))
        counts.append(int((example["labels"] != -100).sum()))
    assert counts[0] != counts[1]
    (sum(losses) / sum(counts)).backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("warm_up", [{"warmup": 0.35}, {"warmup_steps": 4}], ids=str)
def test_a_run_is_that_of_a_plain_loop_in_torch(tmp_path, warm_up):
    """torch's AdamW and clipping, with each parameter's settings written out, and transformers' learning rates."""
    from transformers import get_linear_schedule_with_warmup

    options = dict(betas=(0.7, 0.9), adam_eps=1e-3, weight_decay=0.3, layer_decay=0.5, **warm_up)
    trainer = build(tmp_path, dropout=0.0, max_steps=10, max_grad_norm=0.5, **options)
    trainer.evaluate = None
    plain = MaskedLM(trainer.plain_model.config)
    plain.load_state_dict(trainer.plain_model.state_dict())
    factors = {"embeddings.": 0.25, "layers.0.": 0.5}
    groups = [
        {
            "params": [parameter],
            "lr": 1e-2 * next((f for part, f in factors.items() if part in name), 1.0),
            "weight_decay": 0.3 if parameter.dim() == 2 else 0.0,
        }
        for name, parameter in plain.named_parameters()
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.7, 0.9), eps=1e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 4, 10)
    rates, losses, norms = [], [], []
    for step, micro_batches in enumerate(islice(trainer.schedule.batches_from(0), 10)):
        loss = count = 0
        for number, indices in enumerate(micro_batches, 2 * step):
            arguments = trainer.collate([trainer.examples[i] for i in indices], number)
            logits, labels = plain(arguments["batch"]).logits, arguments["labels"]
            loss = loss + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            count += int((labels != -100).sum())
        (loss / count).backward()
        losses.append(float(loss.detach() / count))
        norms.append(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)))
        rates.append(schedule.get_last_lr()[-1])
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    assert sum(norm > 0.5 for norm in norms) > 3, "clipping must matter"
    trainer.train()
    lines = [line for line in read_log(tmp_path / "log.jsonl") if "loss" in line]
    assert [line["learning_rate"] for line in lines] == pytest.approx(rates)
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-4)
    for name, parameter in trainer.plain_model.named_parameters():
        expected = plain.get_parameter(name)
        torch.testing.assert_close(parameter, expected, rtol=0, atol=2e-5, msg=name)


def test_bf16_trains_fp32_weights(tmp_path):
    trainer = build(tmp_path, precision="bf16", max_steps=4)
    batch = trainer.collate(trainer.examples[:2], 0)["batch"]
    model, dtypes = trainer.plain_model, []
    hook = model.encoder.register_forward_hook(
        lambda module, inputs, output: dtypes.append(output.last_hidden_state.dtype)
    )
    metrics = trainer.train()
    hook.remove()
    assert set(dtypes) == {torch.bfloat16}
    assert model(batch).logits.dtype == torch.float32, "autocast ends with the training"
    assert 0 < metrics["loss"] < 10
    assert {value.dtype for value in weights(tmp_path).values()} == {torch.float32}


def test_schedule_is_transformers():
    from transformers import get_linear_schedule_with_warmup

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_linear_schedule_with_warmup(optimizer, 7, 50)
    for step in range(50):
        assert lr_factor(step, 7, 50) == pytest.approx(schedule.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        schedule.step()


def test_decay_groups_are_transformers(tmp_path):
    from transformers.trainer_pt_utils import get_parameter_names

    from tests.helpers.families import model

    theirs = model("bert", "ForMaskedLM")
    decayed = get_parameter_names(theirs, [torch.nn.LayerNorm], ["bias"])
    groups = parameter_groups(theirs, 0.1)
    ids = {id(p) for p in groups[0]["params"]}
    assert {n for n, p in theirs.named_parameters() if id(p) in ids} == {
        n for n, _ in theirs.named_parameters() if n in decayed
    }
    assert groups[0]["weight_decay"] == 0.1 and groups[1]["weight_decay"] == 0.0


def test_bad_settings_are_named(tmp_path):
    for options, message in (
        (dict(batch_size=0), "batch_size must be at least 1, got 0"),
        (dict(learning_rate=0.0), "learning_rate must be positive and finite, got 0.0"),
        (dict(learning_rate=math.inf), "learning_rate must be positive and finite, got inf"),
        (dict(learning_rate=math.nan), "learning_rate must be positive and finite, got nan"),
        (dict(weight_decay=math.nan), "weight_decay must be finite and not negative, got nan"),
        (dict(max_grad_norm=-1.0), "max_grad_norm must be finite and not negative, got -1.0"),
        (dict(adam_eps=0.0), "adam_eps must be positive and finite, got 0.0: 1e-8 is usual"),
        (dict(adam_eps=math.inf), "adam_eps must be positive and finite, got inf"),
        (dict(warmup=2.0), r"warmup must be a share of the steps in \[0, 1\], got 2.0"),
        (dict(precision="fp8"), "precision must be one of .* got 'fp8'"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainConfig(str(tmp_path), **options)
    frozen = MaskedLM(
        EncoderConfig(vocab_size=20, hidden_size=8, num_layers=1, num_heads=1)
    ).requires_grad_(False)
    with pytest.raises(ValueError, match="there is nothing to train"):
        Trainer(frozen, TrainConfig(str(tmp_path)), [[1, 2]], [2], lambda examples, step: {})
