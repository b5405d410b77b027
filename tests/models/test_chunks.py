"""Documents in chunks: how a classifier computes a result from their vectors."""

import copy
import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from fastenc.adapt import Lora, add_adaptation, freeze_encoder
from fastenc.data import LabelledData
from fastenc.models import EncoderConfig, SequenceClassifier
from fastenc.models.heads.chunk_aggregation import chunk_aggregator
from fastenc.packing import pack_documents, pack_sequences
from fastenc.tasks import SequenceClassification
from fastenc.testing import assert_within_budget
from fastenc.text import LongTexts
from fastenc.text.long_texts import AGGREGATIONS
from fastenc.train import TrainConfig, task_trainer
from fastenc.train.optimizer import parameter_groups
from tests.helpers.compiled import compiled_once
from tests.helpers.training_run import WORDS, assert_bitwise_equal, weights, word_tokenizer

# The lengths of the chunks, for each document.
LENGTHS = [[9, 9, 4], [7], [9] * 8, [3, 9]]
WIDE = EncoderConfig(
    vocab_size=20,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=48,
    max_positions=16,
    hidden_dropout_p=0.0,
    attention_dropout_p=0.0,
)
# The values in the configurations of the families' own checkpoints.
FAMILIES = {
    "bert": {},
    "roberta": dict(pad_token_id=1, position_offset=2, type_vocab_size=1),
    "distilbert": dict(type_vocab_size=0),
    "electra": {},
}
every_aggregation = pytest.mark.parametrize("aggregation", AGGREGATIONS)


def long_texts(aggregation, **changes):
    return LongTexts(
        **{**dict(max_length=9, chunks=aggregation, stride=2, max_chunks=8), **changes}
    )


def disturb(module):
    """Moves parameters away from 0 and 1, so that a mistake shows."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def classifier(aggregation, family="bert", **changes):
    torch.manual_seed(0)
    config = WIDE.replace(family=family, **FAMILIES[family], **changes)
    model = SequenceClassifier(config, num_labels=3, long_texts=long_texts(aggregation))
    return disturb(model).eval()


def documents(lengths=LENGTHS):
    draw = torch.Generator().manual_seed(3)
    return [
        [torch.randint(20, (n,), generator=draw).tolist() for n in document] for document in lengths
    ]


def packed(chunks, tokens_at_once=16_384):
    batch = pack_sequences([ids for document in chunks for ids in document])
    return batch, pack_documents([[len(ids) for ids in each] for each in chunks], tokens_at_once)


def aggregate_by_loop(aggregation, module, vectors, counts):
    """Each document by itself in plain torch; the transformer with torch.nn's modules."""
    results = []
    for v in vectors.split(counts):
        if aggregation == "mean":
            results.append(v.mean(0))
        elif aggregation == "max":
            results.append(v.max(0).values)
        elif aggregation == "attention":
            keys = torch.tanh(v @ module.key.weight.T + module.key.bias)
            keys, parts = (x.view(len(v), 2, 16).unbind(1) for x in (keys, v))
            heads = zip(keys, parts, module.query, strict=True)
            results.append(torch.cat([(k @ q).softmax(0) @ part for k, part, q in heads]))
        else:
            x = v + module.positions.weight[: len(v)]
            x = F.layer_norm(x, (32,), module.norm.weight, module.norm.bias, WIDE.eps)
            for block in module.blocks:
                x = torch_layer(block, x)
            results.append(x.mean(0))
    return torch.stack(results)


def torch_layer(block, x):
    peer = torch.nn.TransformerEncoderLayer(
        32, 2, 48, 0.0, "gelu", layer_norm_eps=WIDE.eps, batch_first=True, dtype=x.dtype
    )
    names = {
        "self_attn.in_proj_weight": block.qkv.weight,
        "self_attn.in_proj_bias": block.qkv.bias,
        "self_attn.out_proj.weight": block.attention_out.weight,
        "self_attn.out_proj.bias": block.attention_out.bias,
        "linear1.weight": block.up.weight,
        "linear1.bias": block.up.bias,
        "linear2.weight": block.down.weight,
        "linear2.bias": block.down.bias,
        "norm1.weight": block.attention_norm.weight,
        "norm1.bias": block.attention_norm.bias,
        "norm2.weight": block.out_norm.weight,
        "norm2.bias": block.out_norm.bias,
    }
    return torch.func.functional_call(peer, names, (x[None],))[0]


@every_aggregation
def test_aggregation_is_a_loop_over_documents(aggregation):
    """Outputs and every gradient against the loop in float64; the budget comes from the loop in float32."""
    module = chunk_aggregator(aggregation, WIDE, 8)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    lengths = 16 * LENGTHS  # enough sums for the errors of both sides to be alike
    counts = [len(document) for document in lengths]
    vectors, dy = torch.randn(sum(counts), 32), torch.randn(len(counts), 32)
    described = pack_documents(lengths)

    def run(function, dtype):
        own, x = copy.deepcopy(module).to(dtype), vectors.to(dtype, copy=True).requires_grad_()
        y = function(own, x)
        y.backward(dy.to(dtype))
        return {"y": y, "vectors": x.grad} | {n: p.grad for n, p in own.named_parameters()}

    loop = lambda own, x: aggregate_by_loop(aggregation, own, x, counts)
    ours = run(lambda own, x: own(x, described), torch.float32)
    plain, truth = run(loop, torch.float32), run(loop, torch.float64)
    assert len(ours) == {"mean": 2, "max": 2, "attention": 5, "transformer": 29}[aggregation]
    for name, value in ours.items():
        assert_within_budget(value, plain[name], truth[name], name)


@pytest.mark.parametrize("family", ["megatron-bert", "esm"])
def test_the_transformer_over_chunks_is_torchs_also_where_the_encoder_is_pre_norm(family):
    module = chunk_aggregator("transformer", WIDE.replace(family=family), 8)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    vectors, counts = torch.randn(14, 32), [len(document) for document in LENGTHS]
    with torch.no_grad():
        ours = module(vectors, pack_documents(LENGTHS))
        expected = aggregate_by_loop("transformer", module, vectors, counts)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_heads_of_the_mean_of_what_it_takes(family):
    """The head and the encoder compute the same as in a model without chunks, one document and one chunk at a time."""
    model, chunks = classifier("mean", family), documents()
    plain = SequenceClassifier(model.config, num_labels=3).eval()
    plain.load_state_dict(model.state_dict())
    expected = []
    for document in chunks:
        taken = torch.cat([plain._vectors(pack_sequences([ids])) for ids in document]).mean(0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plain, "_vectors", partial(lambda mean, _: mean[None], taken))
            expected.append(plain(pack_sequences([[1]])).logits)
    batch, described = packed(chunks)
    logits = model(batch, documents=described).logits
    torch.testing.assert_close(logits, torch.cat(expected), rtol=1e-5, atol=1e-5)


@every_aggregation
def test_the_loss_is_a_mean_over_documents(aggregation):
    model, (batch, described) = classifier(aggregation), packed(documents())
    labels = torch.tensor([0, 2, 1, 1])
    output = model(batch, labels, described)
    alone = [model(*args[:1], documents=args[1]).logits for args in map(packed, zip(documents()))]
    torch.testing.assert_close(output.logits, torch.cat(alone), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output.loss, F.cross_entropy(torch.cat(alone), labels))


@every_aggregation
def test_order_of_documents_does_not_matter(aggregation):
    model, chunks, order = classifier(aggregation), documents(), [2, 0, 3, 1]
    batch, described = packed(chunks)
    first = model(batch, documents=described).logits
    batch, described = packed([chunks[index] for index in order])
    again = model(batch, documents=described).logits
    torch.testing.assert_close(again, first[order], rtol=1e-5, atol=1e-5)


def test_order_of_chunks_matters_to_the_transformer_alone():
    chunks = documents([[9, 9, 9]])
    for aggregation in AGGREGATIONS:
        model = classifier(aggregation)
        results = []
        for order in ([0, 1, 2], [2, 0, 1]):
            batch, described = packed([[chunks[0][index] for index in order]])
            results.append(model(batch, documents=described).logits)
        assert torch.allclose(*results, atol=1e-5) == (aggregation != "transformer")


@pytest.mark.parametrize("family", ["bert", "electra"])
@every_aggregation
def test_inference_in_groups_gives_the_same_in_bounded_memory(aggregation, family):
    model, chunks = classifier(aggregation, family), documents([*LENGTHS, [9] * 6])
    seen = []
    model.encoder.register_forward_pre_hook(lambda _, args: seen.append(args[0].total_tokens))
    batch, described = packed(chunks)
    whole = model(batch, documents=described).logits
    assert seen == [batch.total_tokens]
    for limit in (1, 20, 50):
        seen.clear()
        with torch.no_grad():
            parts = model(batch, documents=packed(chunks, limit)[1]).logits
        assert sum(seen) == batch.total_tokens and max(seen) <= max(limit, 9) and len(seen) > 2
        torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)
    seen.clear()
    model(batch, documents=packed(chunks, 20)[1]).logits.sum().backward()
    assert seen == [batch.total_tokens], "training packs all chunks into one batch"


@pytest.mark.parametrize("aggregation,training", [("transformer", True)])
def test_compiles_without_breaks(aggregation, training):
    torch.compiler.reset()
    # A layer takes seconds to compile.
    model = classifier(aggregation, num_layers=1).train(training)
    compiled = compiled_once(model)
    for lengths in (LENGTHS, [[9, 3], [5] * 4]):
        batch, described = packed(documents(lengths), 20)
        with torch.set_grad_enabled(training):
            logits = compiled(batch, documents=described).logits
            expected = model(batch, documents=described).logits
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("aggregation", ["mean", "max", "attention"])
def test_a_document_of_one_chunk_is_a_text(aggregation):
    model, chunks = classifier(aggregation), documents([[9], [4], [7]])
    plain = SequenceClassifier(model.config, num_labels=3).eval()
    plain.load_state_dict(model.state_dict(), strict=False)
    batch, described = packed(chunks)
    for logits in (model(batch, documents=described).logits, model(batch).logits):
        torch.testing.assert_close(logits, plain(batch).logits, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
@every_aggregation
def test_saved_and_loaded(aggregation, family, tmp_path):
    import transformers

    model = classifier(aggregation, family)
    model.save_pretrained(tmp_path)
    loaded = SequenceClassifier.from_pretrained(tmp_path)
    assert loaded.long_texts == model.long_texts == long_texts(aggregation)
    assert_bitwise_equal(dict(loaded.state_dict()), dict(model.state_dict()))
    batch, described = packed(documents())
    assert torch.equal(
        loaded(batch, documents=described).logits, model(batch, documents=described).logits
    )
    theirs, report = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert bool(report["unexpected_keys"]) == (aggregation in ("attention", "transformer"))
    if aggregation != "transformer":
        batch = pack_sequences([documents()[1][0]])
        torch.testing.assert_close(
            theirs(batch.input_ids[None]).logits, model(batch).logits, rtol=1e-4, atol=1e-5
        )


def test_a_new_task_begins_without_the_old_chunks(tmp_path):
    """The options of the training count; the other class of model does not know the old ones."""
    classifier("attention").save_pretrained(tmp_path)
    again = SequenceClassifier.from_pretrained(tmp_path, long_texts=None)
    assert again.aggregator is None and again.long_texts == LongTexts()
    values = json.loads((tmp_path / "config.json").read_text())
    values["architectures"] = ["BertModel"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert SequenceClassifier.from_pretrained(tmp_path).aggregator is None


@pytest.mark.parametrize("aggregation", ["mean", "attention", "transformer"])
def test_beside_an_adaptation_the_aggregation_is_saved_with_the_head(aggregation, tmp_path):
    SequenceClassifier(WIDE, num_labels=3, long_texts=long_texts(aggregation)).save_pretrained(
        tmp_path / "base"
    )
    model = SequenceClassifier.from_pretrained(tmp_path / "base")
    add_adaptation(model, Lora(rank=2, alpha=4.0))
    disturb(model.aggregator)
    disturb(model.head)
    batch, described = packed(documents())
    model.train()
    model(batch, torch.tensor([0, 2, 1, 1]), described).loss.backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert all(("adaptations." in n) or n.startswith(("head.", "aggregator.")) for n in trained)
    assert {n for n, _ in model.named_parameters() if n.startswith("aggregator.")} <= trained
    model.eval().save_pretrained(tmp_path / "adapted")
    loaded = SequenceClassifier.from_pretrained(tmp_path / "adapted")
    torch.testing.assert_close(
        loaded(batch, documents=described).logits, model(batch, documents=described).logits
    )


def test_the_aggregation_is_not_frozen_and_learns_at_the_heads_rate():
    model = classifier("transformer")
    freeze_encoder(model, 2)
    assert all(parameter.requires_grad for parameter in model.aggregator.parameters())
    names = {id(p): name for name, p in model.named_parameters()}
    for group in parameter_groups(model, 0.1, layer_decay=0.5):
        for parameter in group["params"]:
            if names[id(parameter)].startswith(("aggregator.", "head.")):
                assert group["lr_scale"] == 1.0, names[id(parameter)]


def test_bad_input_is_named():
    batch, described = packed(documents())
    with pytest.raises(ValueError, match="need a model that aggregates chunks, got one without"):
        SequenceClassifier(WIDE)(batch, documents=described)
    batch, described = packed(documents([[3] * 9]))
    with pytest.raises(ValueError, match=r"at most 8 chunks, the positions .* got 9: cut it first"):
        classifier("transformer")(batch, documents=described)
    model = classifier("mean")
    model.tokenizer = word_tokenizer()
    data = LabelledData(["cat " * 40], [], [])
    with pytest.raises(ValueError, match="must be mean, as the model was trained with, got max"):
        SequenceClassification(chunks="max").encode(data, model)
    model = classifier("transformer")
    model.tokenizer = word_tokenizer()
    with pytest.raises(
        ValueError, match=r"at most 3 chunks, .* got 8 for text 1 of 1: give max_chunks"
    ):
        model.long_texts = long_texts("transformer", max_chunks=3)
        SequenceClassification(max_chunks=20).encode(data, model)
    with pytest.raises(ValueError, match="max_chunks is an option of chunks, got 3 without chunks"):
        SequenceClassification(max_chunks=3).model_options(LabelledData(["a"], [0], ["x"]))
    with pytest.raises(ValueError, match="stride is an option of chunks, got 3 without chunks"):
        plain = SequenceClassifier(WIDE)
        plain.tokenizer = word_tokenizer()
        SequenceClassification(stride=3).encode(data, plain)


def reviews(count):
    """Texts of 1 to 5 chunks; the only word that decides the label is in the middle."""
    draw = torch.Generator().manual_seed(0)
    texts = []
    for index in range(count):
        n = int(torch.randint(1, 15, (1,), generator=draw))
        around = [WORDS[int(i)] for i in torch.randint(6, (2 * n,), generator=draw)]
        texts.append(" ".join([*around[:n], WORDS[8 + index % 2], *around[n:]]))
    return LabelledData(texts, [index % 2 for index in range(count)], ["mat", "tree"])


@every_aggregation
def test_training_resumes_to_the_same_weights(aggregation, tmp_path):
    task = SequenceClassification(max_length=9, chunks=aggregation, stride=2)
    SequenceClassifier(WIDE.replace(hidden_dropout_p=0.1)).save_pretrained(tmp_path / "start")
    word_tokenizer().save(str(tmp_path / "start" / "tokenizer.json"))

    def trainer(folder, **settings):
        torch.manual_seed(0)
        data = reviews(24)
        model = task.load(tmp_path / "start", data)
        config = TrainConfig(
            str(folder), batch_size=4, batch_tokens=60, learning_rate=1e-3, save_every=3, **settings
        )
        return task_trainer(task, model, data, config, dev=reviews(6))

    whole = trainer(tmp_path / "whole", epochs=1)
    whole.train()
    sizes = [len(batch) for batch in whole.schedule.sampler.epoch(0)]
    assert min(sizes) < 4, "some batch met its limit of tokens"
    half = trainer(tmp_path / "half", epochs=1)
    step = type(half)._optimiser_step

    def stop(self, indices):
        if self.step == 4:
            raise KeyboardInterrupt
        step(self, indices)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(half), "_optimiser_step", stop)
        half.train()
    trainer(tmp_path / "half", epochs=1).train(resume=True)
    assert_bitwise_equal(weights(tmp_path / "whole"), weights(tmp_path / "half"))
    with pytest.raises(ValueError, match="written with"):
        task = SequenceClassification(max_length=9, chunks=aggregation, stride=3)
        trainer(tmp_path / "half", epochs=1).train(resume=True)
