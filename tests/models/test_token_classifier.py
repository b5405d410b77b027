import json
from itertools import chain, product

import pytest
import torch
from safetensors.torch import load_file

from fastenc.models import EncoderConfig, SequenceClassifier, TokenClassifier
from fastenc.packing import pack, pack_sequences
from fastenc.text.tags import convert, scheme_of
from tests.helpers.checkpoints import close, packed, save
from tests.helpers.families import FAMILIES, model, padded_batch

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
TINY = EncoderConfig(vocab_size=97, hidden_size=32, num_layers=1, num_heads=2)
IOB2 = ["O", "B-X", "I-X", "B-Y", "I-Y"]


def labelled(family, num_labels=5):
    batch = padded_batch(family)
    mask = batch["attention_mask"].bool()
    labels = torch.where(torch.rand(mask.shape) < 0.6, torch.randint(num_labels, mask.shape), -100)
    return batch, mask, torch.where(mask, labels, -100)


@EVERY_FAMILY
def test_outputs_and_gradients_agree_with_transformers(family, tmp_path):
    theirs = model(family, "ForTokenClassification", num_labels=5)
    ours = TokenClassifier.from_pretrained(save(theirs, tmp_path))
    batch, mask, labels = labelled(family)
    expected, output = theirs(**batch, labels=labels), ours(packed(batch), labels[mask])
    close(output.logits, expected.logits[mask])
    close(output.loss, expected.loss)
    expected.loss.backward()
    output.loss.backward()
    theirs_by_name = dict(theirs.named_parameters())
    floor = 1e-3 * max(p.grad.norm() for p in theirs_by_name.values() if p.grad is not None)
    for name, several in ours.family_names(with_prefix=True).items():
        grad = ours.get_parameter(name).grad
        expected_grads = [theirs_by_name[n].grad for n in several]
        if (
            grad is None
        ):  # BigBird's pooler, which the head does not read; Longformer's weights of global tokens
            assert expected_grads == [None] * len(several)
            continue
        for a, b in zip(ours.parts(name, grad, len(several)), expected_grads, strict=True):
            assert (a - b).norm() / torch.maximum(b.norm(), floor) < 1e-4, name


@EVERY_FAMILY
def test_dropout_is_that_of_transformers(family, tmp_path):
    changes = (
        {"classifier_dropout": 0.25} if family != "distilbert" else {"seq_classif_dropout": 0.25}
    )
    theirs = model(family, "ForTokenClassification", **changes)
    ours = TokenClassifier.from_pretrained(save(theirs, tmp_path))
    # EuroBERT's head has none.
    dropout = getattr(theirs, "drop", getattr(theirs, "dropout", None))
    assert ours.head.dropout_p == (0.0 if dropout is None else dropout.p)


@EVERY_FAMILY
@pytest.mark.parametrize("crf", [False, True])
def test_what_is_saved_transformers_loads_back(family, crf, tmp_path):
    from transformers import AutoModelForTokenClassification

    start = save(model(family), tmp_path / "a")
    ours = TokenClassifier.from_pretrained(start, label_names=IOB2, crf=crf)
    ours.save_pretrained(tmp_path / "b")
    again, info = AutoModelForTokenClassification.from_pretrained(
        tmp_path / "b", output_loading_info=True
    )
    unexpected = (
        {"crf.start_transitions", "crf.end_transitions", "crf.transitions"} if crf else set()
    )
    assert set(info["unexpected_keys"]) == unexpected and not info["mismatched_keys"]
    assert not [key for key in info["missing_keys"] if "position_ids" not in key]
    assert again.config.id2label == dict(enumerate(IOB2))
    batch = padded_batch(family)
    mask = batch["attention_mask"].bool()
    close(ours(packed(batch)).logits, again.eval()(**batch).logits[mask])
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["architectures"] == [type(again).__name__]


def test_a_crf_is_saved_with_the_checkpoint(tmp_path):
    ours = TokenClassifier(TINY, label_names=IOB2, crf=True)
    ours.save_pretrained(tmp_path)
    assert "crf.transitions" in load_file(tmp_path / "model.safetensors")
    again = TokenClassifier.from_pretrained(tmp_path)
    assert again.crf is not None and again.label_names == IOB2
    for name, value in ours.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    plain = TokenClassifier.from_pretrained(tmp_path, crf=False)
    assert plain.crf is None and plain.extra_config()["crf"] is False
    # A checkpoint without a CRF gives the CRF initial weights.
    plain.save_pretrained(tmp_path / "plain")
    fresh = TokenClassifier.from_pretrained(tmp_path / "plain", crf=True)
    assert not any(p.is_meta for p in fresh.parameters())
    assert 0 < fresh.crf.transitions.abs().max() <= 0.1


@pytest.mark.filterwarnings("ignore::UserWarning:torchcrf")
def test_loss_and_gradients_of_a_crf_are_pytorch_crfs():
    torchcrf = pytest.importorskip("torchcrf")
    ours = TokenClassifier(TINY, label_names=IOB2, crf=True).eval()
    theirs = torchcrf.CRF(5, batch_first=True)
    theirs.load_state_dict(ours.crf.state_dict())
    ids, lengths = torch.randint(5, 97, (3, 7)), torch.tensor([7, 4, 5])
    batch = pack(ids, torch.arange(7) < lengths[:, None])
    # A word begins at every token except the first, the last and the third of a sequence.
    starts = [[1, 3, 4, 5], [1], [1, 3]]
    tags = [[1, 2, 0, 3], [4], [0, 1]]
    offsets = batch.cu_seqlens.tolist()
    rows = torch.tensor([o + s for o, row in zip(offsets, starts, strict=False) for s in row])
    labels = torch.full((16,), -100)
    labels[rows] = torch.tensor([*chain(*tags)])
    cu_words = torch.tensor([0, 4, 5, 7]).int()
    output = ours(batch, labels, rows, cu_words)
    emissions = torch.nn.utils.rnn.pad_sequence(
        output.logits[rows].split([4, 1, 2]), batch_first=True
    )
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in tags], batch_first=True)
    mask = torch.arange(4) < torch.tensor([4, 1, 2])[:, None]
    expected = -theirs(emissions, padded, mask, reduction="token_mean")
    close(output.loss, expected)
    gradients = torch.autograd.grad(output.loss, list(ours.crf.parameters()), retain_graph=True)
    for one, two in zip(
        gradients, torch.autograd.grad(expected, list(theirs.parameters())), strict=True
    ):
        close(one, two)
    with pytest.raises(ValueError, match="the loss of a CRF needs word_rows and cu_words"):
        ours(batch, labels)


@pytest.mark.parametrize("names", [IOB2, ["O", "B-X", "I-X", "E-X", "S-X"]])
def test_decoding_finds_the_best_allowed_path_and_its_marginals(names):
    """Compared with the enumeration of all paths that the tag scheme allows."""
    ours = TokenClassifier(TINY, label_names=names, crf=True)
    with torch.no_grad():
        for parameter in ours.crf.parameters():
            parameter.normal_()
    emissions, cu_words = 2 * torch.randn(5, 5), torch.tensor([0, 4, 4, 5]).int()
    tags, chances = ours.decode(emissions, cu_words)
    start, end, transitions = (value.detach().double() for value in ours.crf.scores())
    for first, stop in ((0, 4), (4, 5)):
        e = emissions[first:stop].double()
        scores = {}
        for path in product(range(5), repeat=stop - first):
            sequence = [names[tag] for tag in path]
            if convert(sequence, scheme_of(names)) == sequence:
                score = start[path[0]] + end[path[-1]] + sum(e[t, y] for t, y in enumerate(path))
                score += sum(transitions[a, b] for a, b in zip(path, path[1:], strict=False))
                scores[path] = float(score)
        best = max(scores, key=scores.get)
        assert tuple(tags[first:stop].tolist()) == best
        weights = torch.tensor(list(scores.values())).softmax(0)
        for t, tag in enumerate(best):
            agree = torch.tensor([path[t] == tag for path in scores])
            assert chances[first + t].item() == pytest.approx(weights[agree].sum().item(), abs=1e-5)


def test_decoding_without_a_crf_takes_each_words_best():
    ours = TokenClassifier(TINY, label_names=IOB2)
    emissions = torch.randn(6, 5)
    tags, chances = ours.decode(emissions, torch.tensor([0, 6]).int())
    assert torch.equal(tags, emissions.argmax(1))
    close(chances, emissions.softmax(1).amax(1))
    empty = torch.empty(0, 5), torch.tensor([0, 0]).int()
    for crf in (False, True):
        tags, chances = TokenClassifier(TINY, label_names=IOB2, crf=crf).decode(*empty)
        assert tags.shape == chances.shape == (0,)


def test_bad_input_is_named(tmp_path):
    ours = TokenClassifier(TINY, label_names=IOB2)
    batch = pack_sequences([[1, 2, 3]])
    with pytest.raises(
        ValueError, match=r"labels must be int64 of shape \(3,\), one class per packed"
    ):
        ours(batch, torch.tensor([1]))
    with pytest.raises(ValueError, match="label_names must have a name for each of the 3 labels"):
        TokenClassifier(TINY, num_labels=3, label_names=IOB2)
    ours.save_pretrained(tmp_path / "tokens")
    with pytest.raises(
        ValueError, match=r"tokens was fine-tuned for another task: it holds BertForToken"
    ):
        SequenceClassifier.from_pretrained(tmp_path / "tokens")
    SequenceClassifier(TINY).save_pretrained(tmp_path / "texts")
    with pytest.raises(
        ValueError, match=r"holds BertForSequenceClassification, this is TokenClassifier"
    ):
        TokenClassifier.from_pretrained(tmp_path / "texts", label_names=IOB2)
    with pytest.raises(
        ValueError, match=r"head has the labels .*, the data has \['O', 'B-Z'\] \(look at"
    ):
        TokenClassifier.from_pretrained(tmp_path / "tokens", label_names=["O", "B-Z"])


def test_a_model_without_a_tokenizer_says_what_it_needs():
    with pytest.raises(ValueError, match="must have a tokenizer, got none: load it from a folder"):
        TokenClassifier(TINY, label_names=IOB2).own_tokenizer()
