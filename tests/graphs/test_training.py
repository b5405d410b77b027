"""Recorded training steps. A recorder that repeats the step replaces CUDA graphs."""

import copy

import pytest
import torch

import fastenc
from fastenc.graphs import TrainingRunner
from fastenc.graphs.recorded_steps import RecordedSteps
from fastenc.graphs.token_buckets import bucket_of, pad_to
from fastenc.models import Encoder, EncoderConfig, MaskedLM, SequenceClassifier, TokenClassifier
from fastenc.packing import check_cu_seqlens, pack_sequences
from tests.helpers.recording import Repeat

LONGEST = 40
CONFIG = EncoderConfig(97, 32, 2, 2, 48, LONGEST, classifier_dropout_p=0.0)


def an_optimizer(model, **options):
    # A large eps: where a gradient is 0, such as that of a key's bias, Adam scales rounding noise up to whole steps.
    options = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3, "fused": True, **options}
    return torch.optim.AdamW(model.parameters(), **options)


def a_runner(model, optimizer=None, max_grad_norm=1.0, max_tokens=4096, max_graphs=8):
    optimizer = optimizer or an_optimizer(model)
    return TrainingRunner(model.train(), optimizer, max_grad_norm, Repeat(), max_tokens, max_graphs)


def a_batch(*lengths, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return pack_sequences([torch.randint(1, 97, (n,), generator=draw).tolist() for n in lengths])


def for_masked_lm(*lengths, seed=0, counted=True):
    batch = a_batch(*lengths, seed=seed)
    labels = torch.where(torch.arange(batch.total_tokens) % 3 == 0, batch.input_ids, -100)
    arguments = {"batch": batch, "labels": labels}
    return {**arguments, "max_labels": int((labels >= 0).sum())} if counted else arguments


def for_classes(*lengths, seed=0):
    return {"batch": a_batch(*lengths, seed=seed), "labels": torch.arange(len(lengths)) % 2}


def for_tokens(*lengths, seed=0):
    batch = a_batch(*lengths, seed=seed)
    return {"batch": batch, "labels": batch.input_ids % 3}


SUBJECTS = {
    "masked LM": (lambda: MaskedLM(CONFIG), for_masked_lm),
    "sequences": (lambda: SequenceClassifier(CONFIG, num_labels=2), for_classes),
    "tokens": (lambda: TokenClassifier(CONFIG, label_names=["a", "b", "c"]), for_tokens),
}
LENGTHS = ((5, 3), (4, 4), (9,), (40, 40, 40), (1, 2, 1, 3, 1), (7, 2), (16, 16))


def plain_step(model, optimizer, *micro_batches, max_grad_norm=1.0):
    """The same step as in any training loop."""
    total = 0.0
    for arguments in micro_batches:
        loss = model(**arguments).loss / len(micro_batches)
        loss.backward()
        total += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total, norm


def assert_same_weights(ours, theirs):
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("seed", range(3))
def test_a_batch_of_a_buckets_size_has_no_padding_and_others_little(seed):
    draw = torch.Generator().manual_seed(seed)
    for count in (1, 2, 3, 4, 16, 31):
        for lengths in ([32] * count, torch.randint(1, 33, (count,), generator=draw).tolist()):
            batch = a_batch(*lengths)
            if batch.total_tokens == count:
                continue
            bucket = bucket_of(batch, LONGEST, 4096, per_doubling=8, may_be_full=True)
            padded = pad_to(batch, bucket, 0)
            assert (padded.total_tokens, padded.num_sequences, padded.max_seqlen) == bucket
            check_cu_seqlens(padded.cu_seqlens, padded.total_tokens, padded.max_seqlen)
            assert padded.cu_seqlens.diff().min() >= 1
            least = max(32, batch.total_tokens + bucket.num_sequences - count)
            assert bucket.total_tokens <= least * 9 / 8
            if lengths == [32] * count and count in (2, 4, 16):
                assert bucket.total_tokens == batch.total_tokens


@pytest.mark.parametrize("subject", SUBJECTS)
def test_steps_are_those_of_a_plain_loop(subject):
    """With dropout: a mask does not depend on the padding after a token."""
    make, arguments_of = SUBJECTS[subject]
    model = make().train()
    peer = copy.deepcopy(model)
    runner, optimizer = a_runner(model), an_optimizer(peer)
    for seed, lengths in enumerate(LENGTHS):
        arguments = arguments_of(*lengths, seed=seed)
        torch.manual_seed(seed)
        loss, norm = plain_step(peer, optimizer, arguments)
        torch.manual_seed(seed)
        result = runner(arguments)
        torch.testing.assert_close(result.loss, loss.double(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(result.grad_norm, norm.double(), rtol=1e-3, atol=1e-5)
        assert_same_weights(model, peer)
    assert len(runner) < len(LENGTHS)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("subject", SUBJECTS)
def test_several_micro_batches_make_one_step(subject):
    make, arguments_of = SUBJECTS[subject]
    model = make().train()
    peer = copy.deepcopy(model)
    runner, optimizer = a_runner(model), an_optimizer(peer)
    steps = [((5, 3), (9,)), ((4, 4), (7, 2), (40,)), ((6, 2), (10,)), ((5, 3),), ((8,), (5, 3))]
    for seed, lengths in enumerate(steps):
        micro_batches = [arguments_of(*each, seed=seed) for each in lengths]
        torch.manual_seed(seed)
        loss, norm = plain_step(peer, optimizer, *micro_batches)
        torch.manual_seed(seed)
        result = runner(*micro_batches)
        torch.testing.assert_close(result.loss, loss.double(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(result.grad_norm, norm.double(), rtol=1e-3, atol=1e-5)
        assert_same_weights(model, peer)


def test_weights_of_micro_batches_make_the_mean_over_items():
    whole = for_masked_lm(6, 9)
    parts = []
    for first, last in ((0, 6), (6, 15)):
        ids, labels = whole["batch"].input_ids[first:last], whole["labels"][first:last]
        parts.append({"batch": pack_sequences([ids.tolist()]), "labels": labels})
    counts = [int((part["labels"] >= 0).sum()) for part in parts]
    config = dict(hidden_dropout_p=0.0, attention_dropout_p=0.0)
    model, peer = (MaskedLM(CONFIG.replace(**config)).train() for _ in range(2))
    peer.load_state_dict(model.state_dict())
    one, several = (
        a_runner(peer)(whole),
        a_runner(model)(*parts, weights=[n / sum(counts) for n in counts]),
    )
    torch.testing.assert_close(one, several, rtol=1e-4, atol=1e-5)
    assert_same_weights(model, peer)


def test_recording_changes_nothing():
    """It changes no weights, moments or random numbers, and no gradient of earlier micro-batches."""
    model = MaskedLM(CONFIG).train()
    before, state = copy.deepcopy(model), torch.get_rng_state()
    optimizer = an_optimizer(model)
    parts, sums = [], torch.ones(1, dtype=torch.float64)

    def micro_batch(arguments, factors):
        parts.append("backward")
        loss = model(**arguments).loss.double() * factors
        loss.backward()
        return loss.detach()

    def finish(sums):
        parts.append("update")
        return sums.clone()

    def only_record(run):
        run(), run()
        return run(), lambda: None

    steps = RecordedSteps(model, optimizer, micro_batch, finish, only_record, 4096, 8)
    steps([for_masked_lm(5, 3)], torch.ones(1, 1, dtype=torch.float64))
    assert parts == ["backward", "update"] * 3
    assert_same_weights(model, before)
    assert torch.equal(torch.get_rng_state(), state)
    for entries in optimizer.state.values():
        assert all(not value.any() for value in entries.values())
    steps([for_masked_lm(5, 3)] * 2, torch.ones(2, 1, dtype=torch.float64))
    assert steps._gradients and not any(gradient.any() for gradient in steps._gradients.values())
    assert_same_weights(model, before)
    assert not steps._sums.any() and steps.found_inf == 0 and sums == 1


def test_batches_of_one_bucket_share_a_recording():
    runner = a_runner(MaskedLM(CONFIG))
    for seed, lengths in enumerate(((5, 3), (4, 4), (2, 7))):
        runner(for_masked_lm(*lengths, seed=seed))
    assert len(runner) == runner.steps._recorder.recorded == 1
    first = runner(for_masked_lm(5, 3))
    kept = first.loss.clone()
    runner(for_masked_lm(4, 4, seed=9))
    assert first.loss == kept
    runner(for_masked_lm(5, 3), for_masked_lm(4, 4))
    assert len(runner) == 3  # with several, the first and the last have recordings of their own


def test_the_recording_not_used_for_longest_makes_room():
    runner = a_runner(MaskedLM(CONFIG), max_graphs=2)
    small, middle, large = (for_masked_lm(*n) for n in ((3,), (20, 20), [30] * 6))
    for arguments in (small, middle, small, large, small):
        runner(arguments)
    assert len(runner) == 2 and runner.steps._recorder.recorded == 3


def test_learning_rates_and_other_settings_follow_the_optimizer():
    model = MaskedLM(CONFIG).train()
    peer = copy.deepcopy(model)
    optimizer, theirs = an_optimizer(model), an_optimizer(peer)
    runner = a_runner(model, optimizer)
    schedules = [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 4) for o in (optimizer, theirs)]

    def both(seed):
        arguments = for_masked_lm(5, 3, seed=seed)
        torch.manual_seed(seed), plain_step(peer, theirs, arguments)
        torch.manual_seed(seed), runner(arguments)
        assert_same_weights(model, peer)

    for seed in range(3):
        both(seed)
        [schedule.step() for schedule in schedules]
    assert runner.steps._recorder.recorded == 1
    for each in (optimizer, theirs):
        each.param_groups[0]["lr"] = 0.02
    both(4)
    assert runner.steps._recorder.recorded == 1
    for each in (optimizer, theirs):
        each.param_groups[0]["weight_decay"] = 0.5
    both(5)
    assert runner.steps._recorder.recorded == 2


def test_weights_changed_in_place_are_seen_and_replaced_or_frozen_ones_recorded_anew():
    model = MaskedLM(CONFIG).train()
    runner = a_runner(model)
    runner(for_masked_lm(5, 3))
    model.load_state_dict({name: value + 0.01 for name, value in model.state_dict().items()})
    peer = copy.deepcopy(model)
    torch.manual_seed(1)
    expected = peer(**for_masked_lm(5, 3)).loss
    torch.manual_seed(1)
    torch.testing.assert_close(
        runner(for_masked_lm(5, 3)).loss, expected.double(), rtol=1e-4, atol=1e-5
    )
    assert runner.steps._recorder.recorded == 1
    model.encoder.embeddings.requires_grad_(False)
    kept = model.encoder.embeddings.word.weight.clone()
    runner(for_masked_lm(5, 3))
    assert runner.steps._recorder.recorded == 2
    assert torch.equal(model.encoder.embeddings.word.weight, kept)


def test_a_step_that_is_not_finite_changes_nothing_and_the_next_one_does():
    model = SequenceClassifier(CONFIG, num_labels=2).train()
    runner, arguments = a_runner(model), for_classes(5, 3)
    runner(arguments)
    bias = model.head["out"].bias
    with torch.no_grad():
        bias[0] = float("nan")
    before = copy.deepcopy(model.encoder)
    assert runner(arguments).loss.isnan()
    assert_same_weights(model.encoder, before)
    with torch.no_grad():
        bias[0] = 0.0
    assert runner(arguments).loss.isfinite()
    assert not torch.equal(next(model.encoder.parameters()), next(before.parameters()))


def test_it_may_be_called_inside_autocast():
    model = MaskedLM(CONFIG).train()
    peer = copy.deepcopy(model)
    runner, optimizer = a_runner(model), an_optimizer(peer)
    for seed in range(3):
        arguments = for_masked_lm(5, 3, seed=seed)
        torch.manual_seed(seed)
        with torch.autocast("cpu", torch.bfloat16):
            result = runner(arguments)
        torch.manual_seed(seed)
        with torch.autocast("cpu", torch.bfloat16):
            loss = peer(**arguments).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
        optimizer.step(), optimizer.zero_grad()
        torch.testing.assert_close(result.loss, loss.detach().double(), rtol=0.02, atol=0.02)
    runner(for_masked_lm(5, 3))
    assert len(runner) == 2


def test_batches_beyond_the_buckets_run_as_they_are():
    model = MaskedLM(CONFIG)
    runner = a_runner(model, max_tokens=16)
    for lengths in ((10, 10), (1, 1, 1)):
        assert runner(for_masked_lm(*lengths)).loss.isfinite()
    assert len(runner) == 0
    with pytest.raises(ValueError, match="at most 40 tokens, the model's positions, got 41"):
        runner(for_masked_lm(41))


def test_on_a_cpu_steps_run_as_they_are():
    model = MaskedLM(CONFIG).train()
    peer = copy.deepcopy(model)
    step = fastenc.compile_training(model, an_optimizer(model), max_grad_norm=1.0)
    optimizer = an_optimizer(peer)
    for seed in range(3):
        torch.manual_seed(seed)
        loss, _ = plain_step(peer, optimizer, for_masked_lm(5, 3, seed=seed))
        torch.manual_seed(seed)
        assert step(for_masked_lm(5, 3, seed=seed)).loss == loss.double()
    assert len(step) == 0
    for a, b in zip(model.parameters(), peer.parameters(), strict=True):
        assert torch.equal(a, b)


def test_what_cannot_be_recorded_is_named():
    model = MaskedLM(CONFIG).train()
    arguments = for_masked_lm(5, 3)
    handle = model.encoder.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"the hooks of module 'encoder.layers.0' once only"):
        a_runner(model)(arguments)
    handle.remove()
    handle = model.head.bias.register_hook(lambda gradient: gradient)
    with pytest.raises(ValueError, match=r"the hooks of parameter 'head.bias' once only"):
        a_runner(model)(arguments)
    handle.remove()
    model.encoder.gradient_checkpointing = True
    with pytest.raises(ValueError, match="'encoder' has gradient_checkpointing on"):
        a_runner(model)(arguments)
    model.encoder.gradient_checkpointing = False
    with pytest.raises(
        ValueError, match=r"must be int64 labels.*got spans, torch.int64 of shape \(2, 2\)"
    ):
        a_runner(model)({**arguments, "spans": torch.zeros(2, 2, dtype=torch.long)})
    with pytest.raises(ValueError, match=r"got labels, torch.float32 of shape \(8,\)"):
        a_runner(model)({**arguments, "labels": torch.zeros(8)})
    with pytest.raises(ValueError, match=r"call model.train\(\)"):
        runner = a_runner(model)
        model.eval()
        runner(arguments)


def test_bad_input_is_named():
    model = MaskedLM(CONFIG)
    optimizer = an_optimizer(model)
    with pytest.raises(ValueError, match=r"takes fastenc's own models, got Linear"):
        fastenc.compile_training(torch.nn.Linear(1, 1), optimizer)
    with pytest.raises(ValueError, match="max_graphs must be at least 1, got 0"):
        fastenc.compile_training(model, optimizer, max_graphs=0)
    for wrong, received in (
        (torch.optim.SGD(model.parameters(), fused=True), "SGD"),
        (torch.optim.AdamW(model.parameters()), "AdamW without it"),
    ):
        with pytest.raises(
            ValueError, match=f"Adam or AdamW with fused=True, got {received}: make"
        ):
            fastenc.compile_training(model, wrong)
    with pytest.raises(ValueError, match=r"make it from model.parameters\(\)"):
        fastenc.compile_training(model, an_optimizer(MaskedLM(CONFIG)))
    for other in (
        Encoder(CONFIG),
        SequenceClassifier(CONFIG, num_labels=1),
        TokenClassifier(CONFIG, label_names=["a", "b"], crf=True),
    ):
        with pytest.raises(ValueError, match="loss must be a mean over labelled items, got this"):
            fastenc.compile_training(other, an_optimizer(other))
    step = fastenc.compile_training(model.train(), optimizer)
    with pytest.raises(ValueError, match="at least one micro-batch"):
        step()
    with pytest.raises(ValueError, match="a number for each of the 1 micro-batches, got 2"):
        step(for_masked_lm(3), weights=[0.5, 0.5])
    with pytest.raises(ValueError, match="no loss"):
        step({"batch": a_batch(3)})
