"""No forward, backward or training step reads a device tensor's values on the host.

Tensors on the meta device have no values, so reading one raises (item, tolist, bool, nonzero, indexing by a mask). The
library checks values of CPU tensors only. So on meta everything takes the path of a GPU, with each kernel's fake
implementation.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo  # keeps a table of torch's functions, made before one of them is replaced here
from torch.utils._python_dispatch import TorchDispatchMode

import fastenc
from fastenc.integrations.transformers import batch_metadata
from fastenc.models import (
    Encoder,
    EncoderConfig,
    MaskedLM,
    QuestionAnswerer,
    SentenceEmbedder,
    SequenceClassifier,
    SpanClassifier,
    TokenClassifier,
)
from fastenc.models.heads.span_classifier import REPRESENTATIONS
from fastenc.objectives import Electra
from fastenc.ops import dispatch, linear_masked_cross_entropy, masked_cross_entropy
from fastenc.packing import pack, pack_documents, pack_sequences
from fastenc.text.long_texts import AGGREGATIONS
from fastenc.train import TrainConfig, Trainer
from tests.helpers.families import FAMILIES, model, padded_batch

META = torch.device("meta")
SIZES = (97, 32, 2, 2, 48, 40)  # as an EncoderConfig's first fields


@pytest.fixture(autouse=True)
def kernels_on_meta(monkeypatch):
    """Meta tensors use the GPU's implementations."""
    elsewhere = dispatch.unsupported_reason

    def reason(op, impl, x, cpp_limit, triton_limit):
        if x.device == META and impl in dispatch.DECLARED[op].implementations and impl != "cpp":
            return triton_limit if impl == "triton" else None
        return elsewhere(op, impl, x, cpp_limit, triton_limit)

    monkeypatch.setattr(dispatch, "unsupported_reason", reason)
    # torch has no autocast for meta tensors and raises if code asks for it.
    monkeypatch.setattr(dispatch, "autocast_dtype", lambda device: None)


def a_batch():
    return pack_sequences([[1, 2, 3], [4], [5, 6, 7, 8]], [[0, 0, 1], [0], [0, 1, 1, 1]]).to(META)


def on_meta(cls, config=None, **options):
    with META:
        return cls(config or EncoderConfig(*SIZES), **options)


def test_the_device_catches_reads():
    values = torch.ones(3, device=META)
    for read in (
        lambda: values.sum().item(),
        lambda: values.tolist(),
        lambda: bool(values.all()),
        lambda: values.nonzero(),
        lambda: values[values > 0],
        lambda: values.cpu(),
        lambda: torch.repeat_interleave(values, values.long()),
    ):
        with pytest.raises(RuntimeError):
            read()


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    "family, values",
    [
        ("bert", {}),
        ("roberta", {"position_offset": 2}),
        ("distilbert", {"type_vocab_size": 0, "pooler": False}),
        ("electra", {"pooler": False}),
    ],
    ids=["bert", "roberta", "distilbert", "electra"],
)
def test_models(family, values, training):
    config = EncoderConfig(*SIZES, family=family, embedding_size=16, **values)
    labels = torch.zeros(3, dtype=torch.long, device=META)
    for m in (
        on_meta(Encoder, config),
        on_meta(MaskedLM, config),
        on_meta(SequenceClassifier, config, num_labels=3),
    ):
        m.train(training)
        with torch.set_grad_enabled(training):
            is_classifier = isinstance(m, SequenceClassifier)
            output = m(a_batch(), labels) if is_classifier else m(a_batch())
        if training:
            result = output.loss if is_classifier else next(iter(vars(output).values()))
            result = output.logits if result is None else result
            result.sum().backward()
            assert any(p.grad is not None for p in m.parameters())


def test_one_long_sequence_among_short_ones():
    batch = pack_sequences([[1] * 200, [2] * 3]).to(META)
    encoder = on_meta(Encoder, EncoderConfig(*SIZES[:5], 256)).train()
    encoder(batch).last_hidden_state.sum().backward()
    assert all(p.grad is not None for p in encoder.layers.parameters())


@pytest.mark.parametrize("representation", REPRESENTATIONS)
def test_span_classifier(representation):
    m = on_meta(SpanClassifier, label_names=["X", "Y"], representation=representation).train()
    index = lambda *values: torch.tensor(values, device=META)
    spans = dict(word_rows=index(1, 5, 6), windows=index([0, 0], [1, 2], [2, 2]))
    spans |= dict(starts=index(0, 1, 1, 2), ends=index(0, 1, 2, 2))
    m(a_batch(), index(0, 1, 0, 2), **spans).loss.backward()
    assert all(p.grad is not None for p in m.parameters())


def test_token_classifier_and_question_answerer():
    tags = torch.zeros(8, dtype=torch.long, device=META)
    indices = torch.zeros((3, 2), dtype=torch.long, device=META)
    for m, labels in (
        (on_meta(TokenClassifier, label_names=["O", "X"]).train(), tags),
        (on_meta(QuestionAnswerer).train(), indices),
    ):
        m(a_batch(), labels).loss.backward()
        assert all(p.grad is not None for p in m.parameters())
        with torch.no_grad():
            assert m.eval()(a_batch()).logits.shape == (8, 2)


def test_electra():
    m = on_meta(Electra, EncoderConfig(*SIZES, family="electra", embedding_size=16)).train()
    labels = torch.zeros(8, dtype=torch.long, device=META)
    m(a_batch(), labels, torch.zeros(5, dtype=torch.float64, device=META)).loss.backward()
    assert all(p.grad is not None for p in m.parameters())


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_documents_in_chunks(aggregation, training):
    m = on_meta(SequenceClassifier, num_labels=3, long_texts={"chunks": aggregation}).train(
        training
    )
    batch, documents = a_batch(), pack_documents([[3], [1, 4]], 4).to(META)
    with torch.set_grad_enabled(training):
        output = m(batch, torch.zeros(2, dtype=torch.long, device=META), documents)
        assert m(batch).logits.shape == (3, 3), "each sequence a document"
    assert output.logits.shape == (2, 3)
    if training:
        output.loss.backward()
        assert all(p.grad is not None for p in m.parameters())


@pytest.mark.parametrize("max_labels", [None, 5, 8], ids=["all rows", "5 rows", "8 rows"])
def test_masked_lm_with_labels(max_labels):
    m = on_meta(MaskedLM).train()
    m(a_batch(), torch.zeros(8, dtype=torch.long, device=META), max_labels).loss.backward()
    assert all(p.grad is not None for p in m.parameters())


def test_a_step_that_is_recorded(monkeypatch):
    """Without AdamW's kernel, which has no fake implementation, and without autocast."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    m = on_meta(MaskedLM).train()
    optimizer = torch.optim.AdamW(m.parameters(), fused=True)
    monkeypatch.setattr(optimizer, "step", lambda: None)
    step = fastenc.compile_training(m, optimizer, max_grad_norm=1.0)
    labels = torch.zeros(8, dtype=torch.long, device=META)
    arguments = {"batch": a_batch(), "labels": labels, "max_labels": 5}
    for micro_batches in ([arguments], [arguments] * 2):
        assert step(*micro_batches).loss.device == META


@pytest.mark.parametrize("loss_name", ["ranking", "cosent", "cosine"])
def test_sentence_embeddings(loss_name):
    losses = {} if loss_name == "ranking" else {"similarity_loss": loss_name}
    m = on_meta(SentenceEmbedder, symmetric=True, **losses).train()
    batch = pack_sequences([[1, 2, 3], [4], [5, 6, 7, 8], [9]]).to(META)
    scores = torch.zeros(
        2, dtype=torch.long if loss_name == "ranking" else torch.float32, device=META
    )
    ids = torch.zeros((2, 2), dtype=torch.long, device=META)
    m(batch, scores, ids).loss.backward()
    assert all(p.grad is not None for p in m.parameters())


def test_every_op_took_its_kernel():
    """If the models ran the references, the tests above would prove little about a GPU."""
    called = set()

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            if function.namespace == "fastenc":
                called.add(function._schema.name.split("::")[1])
            return function(*arguments, **(keywords or {}))

    m = on_meta(Encoder).train()
    with Record():
        m(a_batch()).last_hidden_state.sum().backward()
    ops = ("attention", "layer_norm", "bias_gelu")
    assert called >= {f"{op}_{way}" for op in ops for way in ("fwd", "bwd")}


@pytest.mark.parametrize("max_labels", [None, 2, 8])
def test_masked_lm_loss(max_labels):
    m = on_meta(MaskedLM).train()
    labels = torch.zeros(8, dtype=torch.long, device=META)
    m(a_batch(), labels, max_labels).loss.backward()
    assert all(p.grad is not None for p in m.parameters())


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_masked_cross_entropy(reduction):
    make = lambda *shape: torch.randn(shape, device=META).bfloat16().requires_grad_()
    labels = torch.zeros(8, dtype=torch.long, device=META)
    logits = make(8, 37)
    masked_cross_entropy(logits, labels, reduction=reduction).sum().backward()
    assert logits.grad.shape == (8, 37)
    for max_labels in (None, 3, 8):
        for max_logits_bytes in (2**31, 100):
            tensors = make(8, 16), make(37, 16), make(37)
            loss = linear_masked_cross_entropy(
                *tensors,
                labels,
                max_labels=max_labels,
                max_logits_bytes=max_logits_bytes,
                reduction=reduction,
            )
            loss.sum().backward()
            assert [t.grad.shape for t in tensors] == [t.shape for t in tensors]


@pytest.mark.parametrize("noted", [False, True], ids=["", "noted by the collator"])
@pytest.mark.parametrize("task", ["Model", "ForMaskedLM", "ForSequenceClassification"])
@pytest.mark.parametrize("family", FAMILIES)
def test_patched_models_read_the_mask_once_or_never(family, task, noted, monkeypatch):
    if (family, task) == ("longformer", "ForSequenceClassification"):
        pytest.skip("transformers' head makes a mask of global tokens, whose number is read")
    # Without a problem type, DeBERTa's own head reads the labels.
    theirs = model(family, task, problem_type="single_label_classification")
    ours = fastenc.patch(theirs, labelled_logits_only=task == "ForMaskedLM")
    batch = padded_batch(family)
    if task == "ForMaskedLM":
        batch["labels"] = torch.where(batch["attention_mask"].bool(), batch["input_ids"], -100)
    if task == "ForSequenceClassification":
        batch["labels"] = torch.zeros(4, dtype=torch.long)
    collated = fastenc.DataCollatorWithSeqlens(dict)(batch)
    metadata, readings = collated["batch_metadata"], []

    def read(mask, labels, ids):
        readings.append(mask)
        return metadata

    monkeypatch.setattr(batch_metadata, "read_metadata", read)
    arguments = {k: v.to(META) if hasattr(v, "to") else v for k, v in collated.items()}
    if not noted:
        del arguments["batch_metadata"]
    output = ours.to(META).train()(**arguments)
    (output[0] if task == "Model" else output.loss).sum().backward()
    assert len(readings) == (0 if noted else 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_patched_models_without_a_mask_read_nothing(family):
    ours = fastenc.patch(model(family, "ForMaskedLM"), labelled_logits_only=True).to(META).train()
    ids = torch.zeros((2, 7), dtype=torch.long, device=META)
    ours(input_ids=ids, labels=ids).loss.backward()
    assert any(p.grad is not None for p in ours.parameters())


def test_packing_with_known_sizes():
    batch = padded_batch("bert")
    expected = pack(**batch)
    on_device = pack(
        **{name: value.to(META) for name, value in batch.items()},
        total_tokens=expected.total_tokens,
        max_seqlen=expected.max_seqlen,
    )
    assert on_device.input_ids.shape == expected.input_ids.shape
    assert on_device.max_seqlen == expected.max_seqlen
    again = pack(**batch, total_tokens=expected.total_tokens, max_seqlen=expected.max_seqlen)
    for name, value in vars(expected).items():
        same = torch.equal(value, getattr(again, name)) if isinstance(value, torch.Tensor) else None
        assert same is not False, name


def test_a_training_step(tmp_path, monkeypatch):
    """All of the Trainer's own work, without AdamW's kernel, which has no fake implementation."""
    labels = torch.zeros(2, dtype=torch.long)
    collate = lambda examples, step: {"batch": pack_sequences(examples), "labels": labels}
    config = EncoderConfig(*SIZES)
    trainer = Trainer(
        SequenceClassifier(config),
        TrainConfig(str(tmp_path), max_steps=2, batch_size=2),
        [[1, 2, 3], [4]] * 4,
        [3, 1] * 4,
        collate,
    )
    monkeypatch.setattr(type(trainer.accelerator), "device", property(lambda self: META))
    step = trainer.optimizer_step
    trainer.model = step.model = on_meta(SequenceClassifier, config)
    step.found_inf = step.found_inf.to(META)
    trainer.reads_every_step = False
    steps = []
    step.optimizer = SimpleNamespace(
        step=lambda: steps.append([p.grad for p in trainer.model.parameters()]),
        zero_grad=lambda set_to_none: None,
    )
    added = []
    trainer.statistics = SimpleNamespace(
        add=lambda step, names, figures: added.append((step, figures))
    )
    trainer._optimiser_step(trainer._collate_step((0, [[0, 1], [2, 3]])))
    assert len(steps) == 1 and all(grad is not None for grad in steps[0])
    assert added[0][0] == 1 and added[0][1].device == META
