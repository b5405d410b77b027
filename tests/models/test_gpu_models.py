"""Whole models on a GPU: numbers, gradients, synchronisation, CUDA graphs, autocast, torch.compile, determinism."""

import copy

import pytest
import torch

import fastenc
from fastenc.models import (
    Encoder,
    EncoderConfig,
    MaskedLM,
    QuestionAnswerer,
    SequenceClassifier,
    SpanClassifier,
    TokenClassifier,
)
from fastenc.nn.ways import fused_sublayers
from fastenc.objectives import OBJECTIVES, PACKINGS
from fastenc.ops import library
from fastenc.packing import pack, pack_sequences
from fastenc.train import TrainConfig, Trainer
from tests.helpers.families import FAMILIES, model, padded_batch
from tests.helpers.gpu import deterministic, no_waiting
from tests.helpers.patching import assert_same_gradients, assert_same_outputs, labels_for
from tests.helpers.training_run import documents, small_model, tokenizer_of

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
CONFIG = EncoderConfig(97, 64, 2, 2, 128, 40)
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)


def a_batch(*lengths, seed=0):
    draw = torch.Generator().manual_seed(seed)
    rows = [torch.randint(1, 97, (n,), generator=draw).tolist() for n in lengths]
    return pack_sequences(rows).to(CUDA)


def a_gradient(batch):
    """A gradient of last_hidden_state. A sum of squares would not do, because the last norm keeps it constant."""
    return torch.randn(batch.total_tokens, CONFIG.hidden_size, device=CUDA)


def moved(batch):
    return {k: v.to(CUDA) if hasattr(v, "to") else v for k, v in batch.items()}


def gradients(m, loss):
    m.zero_grad(set_to_none=True)
    loss(m).backward()
    return {n: p.grad.clone() for n, p in m.named_parameters() if p.grad is not None}


@EVERY_FAMILY
def test_encoder_agrees_with_transformers(family, tmp_path):
    theirs = model(family)
    theirs.save_pretrained(tmp_path)
    batch = padded_batch(family)
    mask = batch["attention_mask"].bool()
    packed = pack(batch["input_ids"], mask, batch.get("token_type_ids")).to(CUDA)
    with torch.inference_mode():
        exact = theirs.double()(**batch).last_hidden_state[mask]
        ours = Encoder.from_pretrained(tmp_path).to(CUDA)
        result = ours(packed).last_hidden_state
        torch.testing.assert_close(result.cpu().double(), exact, rtol=0, atol=1e-4)
        for dtype in (torch.float16, torch.bfloat16):
            plain = theirs.to(CUDA, dtype)(**moved(batch)).last_hidden_state[mask.to(CUDA)]
            result = ours.to(dtype)(packed).last_hidden_state
            assert result.dtype == dtype
            error = lambda y: (y.cpu().double() - exact).abs()
            step = torch.finfo(dtype).eps * exact.abs().mean()
            assert error(result).mean() <= 2 * (error(plain).mean() + step / 2)
            theirs.double(), ours.float()


@EVERY_FAMILY
@pytest.mark.parametrize("task", ["Model", "ForMaskedLM", "ForSequenceClassification"])
def test_patched_models_agree_with_transformers(family, task):
    theirs = model(family, task).to(CUDA)
    ours = fastenc.patch(copy.deepcopy(theirs))
    batch = moved(padded_batch(family))
    mask = batch["attention_mask"]
    with torch.inference_mode():
        a, b = ours(**batch), theirs(**batch)
        assert_same_outputs(
            type(a)(**{k: v.cpu() for k, v in a.items()}),
            type(b)(**{k: v.cpu() for k, v in b.items()}),
            mask.cpu(),
        )
    if task == "Model":
        weight = torch.randn(32, device=CUDA) * mask[..., None]
        loss = lambda m: (m(**batch).last_hidden_state * weight).sum()
    else:
        name = "MaskedLM" if task == "ForMaskedLM" else task
        labels = moved(labels_for(name, {"attention_mask": mask.cpu()}))
        loss = lambda m: m(**batch, **labels).loss
    for m in (ours, theirs):
        loss(m).backward()
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "autocast"])
def test_fused_sublayers_have_the_gradients_of_single_ops(dtype, monkeypatch):
    m, batch = Encoder(CONFIG).to(CUDA).train(), a_batch(5, 33, 1)
    upstream = a_gradient(batch)

    def loss(m):
        torch.manual_seed(1)
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
            hidden = m(batch).last_hidden_state
        assert hidden.dtype == dtype
        return (hidden.float() * upstream).sum()

    ours = gradients(m, loss)
    monkeypatch.setattr(fused_sublayers, "unsupported_reason", lambda *_: "of the test")
    theirs = gradients(m, loss)
    largest = max(g.norm() for g in theirs.values())
    for name, expected in theirs.items():
        assert ours[name].dtype == torch.float32
        error = (ours[name] - expected).norm() / torch.maximum(expected.norm(), largest / 1000)
        assert error < 16 * torch.finfo(dtype).eps, f"{name}: {error:.2g}"


def test_inference_does_not_wait():
    m = SequenceClassifier(CONFIG).to(CUDA).eval()
    patched = fastenc.patch(model("bert").to(CUDA))
    batches = [a_batch(5, 33, 1), a_batch(7, 7)]
    ids = torch.randint(5, 97, (2, 12), device=CUDA)
    with torch.inference_mode():
        run = lambda: ([m(batch).logits for batch in batches], patched(input_ids=ids))
        run()  # compiles the kernels
        with no_waiting():
            run()


def test_a_training_step_does_not_wait():
    m, batch = SequenceClassifier(CONFIG).to(CUDA).train(), a_batch(5, 33, 1)
    labels = torch.tensor([0, 1, 1], device=CUDA)
    optimizer = torch.optim.AdamW(m.parameters(), fused=True)

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss = m(batch, labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    step()
    with no_waiting():
        losses = [step() for _ in range(3)]
    assert torch.stack(losses).isfinite().all()


def check_steps_do_not_wait(m, arguments):
    """Autocast, loss, gradients and an optimiser's step, after a first step that compiles the kernels."""
    optimizer = torch.optim.AdamW(m.parameters(), fused=True)

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss = m(**arguments).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    step()
    with no_waiting():
        losses = [step() for _ in range(2)]
    assert torch.stack(losses).isfinite().all()


@pytest.mark.skipif(not library.HAS_CUDA, reason="the extension was compiled without CUDA")
@pytest.mark.parametrize("name", OBJECTIVES)
def test_steps_of_every_objective_do_not_wait(name):
    tokenizer, chosen = tokenizer_of(name), OBJECTIVES[name]
    examples = PACKINGS[chosen.packings[0]](documents(20), tokenizer, 32, show_progress=False)
    m = small_model(name, tokenizer, dropout=0.1)
    options = {"start_id": m.decoder_start_token_id} if chosen.has_decoder else {}
    if "probability" in chosen.options:
        options["probability"] = 0.3
    arguments = chosen.collator(tokenizer, examples, 0, **options)(examples[:4], 0)
    m = m.to(CUDA).train()
    check_steps_do_not_wait(m, moved(arguments))


@pytest.mark.parametrize("make", [QuestionAnswerer, TokenClassifier, SpanClassifier])
def test_steps_of_every_task_do_not_wait(make):
    batch = a_batch(5, 33, 1)
    named = {} if make is QuestionAnswerer else {"label_names": ["O", "X"]}
    index = lambda *values: torch.tensor(values, device=CUDA)
    arguments = {
        QuestionAnswerer: {"labels": index([0, 1], [3, 30], [0, 0])},
        TokenClassifier: {"labels": torch.arange(39, device=CUDA) % 2},
        SpanClassifier: {
            "labels": index(0, 1, 0),
            "word_rows": index(1, 6, 7),
            "windows": index([0, 0], [1, 2], [2, 2]),
            "starts": index(0, 1, 1),
            "ends": index(0, 1, 2),
        },
    }[make]
    check_steps_do_not_wait(make(CONFIG, **named).to(CUDA).train(), {"batch": batch, **arguments})


CLASSIFIERS_THAT_WAIT = {
    "deberta": "transformers' own loss reads which labels there are",
    "deberta-v2": "transformers' own loss reads which labels there are",
    "longformer": "the mask of the global tokens has to be read",
}


@EVERY_FAMILY
@pytest.mark.parametrize("task", ["ForMaskedLM", "ForSequenceClassification"])
def test_patched_training_does_not_wait_where_the_collator_noted_the_sizes(family, task):
    if task == "ForSequenceClassification" and family in CLASSIFIERS_THAT_WAIT:
        pytest.skip(CLASSIFIERS_THAT_WAIT[family])
    m = fastenc.patch(model(family, task), labelled_logits_only=task == "ForMaskedLM")
    batch = padded_batch(family)
    name = "MaskedLM" if task == "ForMaskedLM" else task
    collated = fastenc.DataCollatorWithSeqlens(dict)({**batch, **labels_for(name, batch)})
    check_steps_do_not_wait(m.to(CUDA).train(), moved(collated))


def test_the_trainers_steps_do_not_wait(tmp_path):
    labels = torch.zeros(2, dtype=torch.long)
    trainer = Trainer(
        SequenceClassifier(CONFIG),
        TrainConfig(str(tmp_path), max_steps=6, batch_size=2, accumulation=2, log_every=6),
        [[1, 2, 3], [4]] * 8,
        [3, 1] * 8,
        lambda examples, step: {"batch": pack_sequences(examples), "labels": labels},
    )
    step = trainer._optimiser_step

    def watched(window):
        if trainer.step < 2:
            return step(window)
        with no_waiting():
            return step(window)

    trainer._optimiser_step = watched
    trainer.train()
    assert trainer.step == 6


def test_recorded_graphs_give_the_models_results():
    m = SequenceClassifier(CONFIG).to(CUDA).eval()
    runner = fastenc.compile_inference(m)
    with torch.no_grad():
        for seed, lengths in enumerate([(5, 3), (4, 4), (2, 6), (1,), (40, 40, 40), (5, 3)]):
            batch = a_batch(*lengths, seed=seed)
            expected = m(batch).logits
            torch.testing.assert_close(runner(batch).logits, expected, rtol=1e-4, atol=1e-5)
        assert len(runner) == 3
        m.head["out"].weight.mul_(2)
        again = a_batch(3, 5)
        torch.testing.assert_close(runner(again).logits, m(again).logits, rtol=1e-4, atol=1e-5)
        first = runner(again).logits
        kept = first.clone()
        with no_waiting():
            runner(again)
        runner(a_batch(6, 2))
        assert torch.equal(first, kept)
        assert len(runner) == 3


def test_recorded_steps_are_those_of_a_plain_loop():
    ours = MaskedLM(CONFIG).to(CUDA).train()
    theirs = copy.deepcopy(ours)
    new = lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-3, fused=True)
    runner, optimizer = fastenc.compile_training(ours, new(ours), max_grad_norm=1.0), new(theirs)
    for seed, lengths in enumerate([(5, 3), (4, 4), (2, 6), (40, 40, 40), (5, 3), (7, 2)]):
        batch = a_batch(*lengths, seed=seed)
        arguments = {"batch": batch, "labels": batch.input_ids, "max_labels": batch.total_tokens}
        for several in (False, True):
            micro_batches = [arguments] * (1 + several)
            torch.manual_seed(seed)
            result = runner(*micro_batches)
            torch.manual_seed(seed)
            for each in micro_batches:
                (theirs(**each).loss / len(micro_batches)).backward()
            norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            torch.testing.assert_close(result.grad_norm, norm.double(), rtol=1e-2, atol=1e-4)
            for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert len(runner) > 3
    with no_waiting():
        runner(arguments)


def test_a_model_compiles_as_one_dynamic_graph():
    m = Encoder(EncoderConfig(97, 64, 2, 2, 128, 40, hidden_dropout_p=0, attention_dropout_p=0))
    m = m.to(CUDA).train()
    compiled = torch.compile(m, fullgraph=True, dynamic=True)
    for lengths in ((5, 3), (33, 1, 7)):
        batch = a_batch(*lengths)
        grads = []
        for each in (compiled, m):
            m.zero_grad(set_to_none=True)
            each(batch).pooled.square().sum().backward()
            grads.append({name: p.grad for name, p in m.named_parameters()})
        largest = max(g.norm() for g in grads[1].values())
        for name, expected in grads[1].items():
            error = (grads[0][name] - expected).norm()
            assert error <= 1e-4 * torch.maximum(expected.norm(), largest / 1000), name


def test_training_is_deterministic_when_asked_for():
    m, batch = Encoder(CONFIG).to(CUDA).train(), a_batch(5, 33, 1)
    upstream = a_gradient(batch)

    def loss(m):
        torch.manual_seed(1)
        return (m(batch).last_hidden_state * upstream).sum()

    with deterministic():
        first, second = gradients(m, loss), gradients(m, loss)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_inference_is_deterministic():
    m, batch = Encoder(CONFIG).to(CUDA).eval(), a_batch(5, 33, 1)
    with torch.no_grad():
        first = m(batch).last_hidden_state
        assert all(torch.equal(m(batch).last_hidden_state, first) for _ in range(5))
