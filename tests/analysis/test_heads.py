"""Heads, relations and probes, compared with transformers' attention matrices and scikit-learn."""

from collections import Counter

import numpy as np
import pytest
import torch

from fastenc.adapt import Lora, add_adaptation, merge_adaptation
from fastenc.analysis import (
    LabelledWords,
    UnknownAttention,
    majority_accuracy,
    probe_by_layer,
    read_trees,
    score_relations,
    summarize_heads,
    visit_heads,
)
from fastenc.analysis.relations import DIRECTIONS
from fastenc.data import train_tokenizer
from fastenc.models import Encoder
from tests.helpers.checkpoints import packed, save
from tests.helpers.families import ENCODERS, model, padded_batch

TREES = """# text = the dog sees cats
1\tthe\tthe\tDET\tDT\t_\t2\tdet\t_\t_
2\tdog\tdog\tNOUN\tNN\t_\t3\tnsubj:pass\t_\t_
3\tsees\tsee\tVERB\tVBZ\t_\t0\troot\t_\t_
4\tunbelievable\tx\tADJ\tJJ\t_\t5\tamod\t_\t_
5\tcats\tcat\tNOUN\tNNS\t_\t3\tobj\t_\t_

1\tthe\tthe\tDET\tDT\t_\t2\tdet\t_\t_
2\trivers\triver\tNOUN\tNNS\t_\t3\tnsubj\t_\t_
3\tsleep\tsleep\tVERB\tVBP\t_\t0\troot\t_\t_
"""
TEXTS = ["the dog sees a cat", "rivers sleep", "unbelievable cats and dogs in the river"]


@pytest.fixture(scope="module", params=["bert", "distilbert"])
def pair(request, tmp_path_factory):
    """(our encoder, transformers' model with attention matrices)."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = train_tokenizer(TEXTS, vocab_size=45)
    theirs = model(
        request.param, vocab_size=tokenizer.get_vocab_size(), attn_implementation="eager"
    )
    theirs.save_pretrained(folder)
    ours = Encoder.from_pretrained(folder)
    ours.tokenizer = tokenizer
    return ours, theirs


@torch.no_grad()
def matrices(theirs, ids):
    """(layers, heads, length, length)."""
    output = theirs(torch.tensor([ids]), output_attentions=True)
    return torch.stack(output.attentions)[:, 0].double().numpy()


# Family → what its attention has that the statistics do not compute.
UNKNOWN = {
    "deberta": "interleaved",
    "deberta-v2": "position_terms",
    "longformer": "global_attention",
}


@pytest.mark.parametrize("family", [f for f in ENCODERS if f not in UNKNOWN])
def test_statistics_are_those_of_transformers_matrices(family, tmp_path):
    """Also with pre-norm layers, rotary positions, windows and relative biases."""
    theirs = model(family, attn_implementation="eager")
    ours = Encoder.from_pretrained(save(theirs, tmp_path))
    batch = padded_batch(family)
    by_layer = {}
    with torch.no_grad():
        visit_heads(
            ours, packed(batch), lambda layer, statistics: by_layer.update({layer: statistics})
        )
        options = (
            {} if "token_type_ids" not in batch else {"token_type_ids": batch["token_type_ids"]}
        )
        output = theirs(
            batch["input_ids"], batch["attention_mask"], output_attentions=True, **options
        )
    every = torch.stack(output.attentions).double().numpy()  # (layers, batch, heads, query, key)
    offset = 0
    for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
        p = every[:, row, :, :length, :length]
        indices = np.arange(length)
        distance = np.abs(indices[:, None] - indices)
        rows = slice(offset, offset + length)
        assert by_layer.keys() == set(range(len(p)))
        for layer, statistics in by_layer.items():
            check = lambda name, expected, s=statistics, rows=rows: np.testing.assert_allclose(
                getattr(s, name)[rows], expected.T, rtol=1e-4, atol=1e-5, err_msg=name
            )
            check("entropy", -(p[layer] * np.log(np.where(p[layer] > 0, p[layer], 1))).sum(-1))
            check("distance", (p[layer] * distance).sum(-1))
            check("first", p[layer][..., 0])
            check("last", p[layer][..., -1])
            check("itself", np.diagonal(p[layer], axis1=1, axis2=2))
            check("strongest", p[layer].argmax(-1))
        offset += length


@pytest.mark.parametrize("family", UNKNOWN)
def test_attention_with_other_terms_is_refused(family, tmp_path):
    ours = Encoder.from_pretrained(save(model(family), tmp_path))
    with pytest.raises(UnknownAttention, match=f"do not compute {UNKNOWN[family]}"):
        visit_heads(ours, packed(padded_batch(family)), lambda layer, statistics: None)


def test_an_adaptation_in_use_is_merged_first(tmp_path):
    ours = Encoder.from_pretrained(save(model("bert"), tmp_path))
    add_adaptation(ours, Lora(2))
    with torch.no_grad():
        ours.layers[0].adaptations["default"].low_rank["qkv"].b["query"].fill_(1.0)
    batch = packed(padded_batch("bert"))
    with pytest.raises(ValueError, match=r"without an adaptation, got .*merge it"):
        visit_heads(ours, batch, lambda layer, statistics: None)
    merge_adaptation(ours)
    visit_heads(ours, batch, lambda layer, statistics: None)


def test_the_summary_is_the_mean_over_inner_tokens(pair):
    ours, theirs = pair
    summary = summarize_heads(ours, TEXTS, batch_size=2)
    every = [matrices(theirs, ours.tokenizer.encode(text).ids) for text in TEXTS]
    assert summary.tokens == sum(p.shape[-1] - 2 for p in every)
    entropy = np.concatenate([-(p * np.log(p)).sum(-1)[..., 1:-1] for p in every], axis=-1)
    np.testing.assert_allclose(summary.means["entropy"], entropy.mean(-1), rtol=1e-4)
    last = np.concatenate([p[:, :, 1:-1, -1] for p in every], axis=-1)
    np.testing.assert_allclose(summary.means["last"], last.mean(-1), rtol=1e-4)
    with pytest.raises(ValueError, match="the texts must have tokens, got none"):
        summarize_heads(ours, [])


def test_relations_are_counted_as_in_the_matrices(pair, tmp_path):
    ours, theirs = pair
    path = tmp_path / "x.conllu"
    path.write_text(TREES)
    trees = read_trees(path)
    assert trees[0].relations[1] == "nsubj" and trees[0].heads == [1, 2, -1, 4, 2]
    relations = score_relations(ours, trees, batch_size=1)
    heads, offsets, counts = {}, {}, Counter()
    for tree in trees:
        encoding = ours.tokenizer.encode(tree.words, is_pretokenized=True)
        p = matrices(theirs, encoding.ids)
        p[..., 0] = p[..., -1] = -1  # special tokens do not count
        word_ids = encoding.word_ids
        for dependent, (head, relation) in enumerate(zip(tree.heads, tree.relations, strict=True)):
            if head < 0:
                continue
            for direction, one, other in zip(
                DIRECTIONS, (dependent, head), (head, dependent), strict=True
            ):
                key = (relation, direction)
                counts[key] += 1
                looked = p[:, :, word_ids.index(one)].argmax(-1)
                right = np.vectorize(lambda token, w=word_ids, o=other: w[token] == o)(looked)
                heads[key] = heads.get(key, 0) + right
                offsets.setdefault(key, Counter())[other - one] += 1
    assert relations.keys() == counts.keys()
    for key, scores in relations.items():
        assert scores.count == counts[key]
        np.testing.assert_array_equal(scores.heads, heads[key])
        assert scores.offsets == offsets[key]
        layer, head, share = scores.best_head
        assert share == heads[key].max() / counts[key] == heads[key][layer, head] / counts[key]
    assert relations["det", DIRECTIONS[0]].best_offset == (1, 1.0)


@pytest.mark.parametrize(
    "line, message",
    [
        (
            "1\tthe\tthe\tDET\tDT\t_\t7\tdet\t_\t_",
            "the head must be from 0 to 1, the number of words",
        ),
        ("1\tthe\tthe\tDET\tDT\t_\t_\tdet\t_\t_", "line 1: the head must be .* got '_'"),
        ("1\tthe\tthe\tDET", "line 1: a line of CoNLL-U must have 10 columns, got 4"),
        ("# text", "must hold sentences, got none"),
    ],
)
def test_bad_trees(tmp_path, line, message):
    path = tmp_path / "x.conllu"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        read_trees(path)


def labelled(sentences, label):
    return LabelledWords(sentences, [[label(word) for word in words] for words in sentences])


def test_probes_are_scikit_learns_on_each_layers_vectors(pair, tmp_path):
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    ours, _ = pair
    draw = np.random.default_rng(0)
    words = [
        "the",
        "dog",
        "sees",
        "a",
        "cat",
        "rivers",
        "sleep",
        "unbelievable",
        "cats",
        "and",
        "dogs",
    ]
    sentences = [list(draw.choice(words, 6)) for _ in range(60)]
    label = lambda word: None if word == "and" else ("short" if len(word) < 4 else "long")
    train, test = labelled(sentences[:40], label), labelled(sentences[40:], label)
    probes = probe_by_layer(ours, train, test, cache=tmp_path)
    assert len(probes) == 3 and (tmp_path / "train.npy").exists()
    for layer, score in enumerate(probes):
        sets = []
        for data in (train, test):
            vectors = ours.embed_words(data.sentences, layers=(layer,)).vectors.numpy()
            flat = [each for row in data.labels for each in row]
            kept = [i for i, each in enumerate(flat) if each]
            sets.append((vectors[kept].astype("float64"), [flat[i] for i in kept]))
        scaler = StandardScaler().fit(sets[0][0])
        probe = LogisticRegression(max_iter=100).fit(scaler.transform(sets[0][0]), sets[0][1])
        expected = probe.score(scaler.transform(sets[1][0]), sets[1][1])
        assert score.accuracy == pytest.approx(expected, abs=0.02)
        assert score.selectivity == score.accuracy - score.control
    assert probes[0].accuracy > 0.95, "the embeddings know the word"
    flat = [each for row in test.labels for each in row if each]
    train_flat = [each for row in train.labels for each in row if each]
    most = Counter(train_flat).most_common(1)[0][0]
    assert majority_accuracy(train, test) == pytest.approx(np.mean([f == most for f in flat]))


def test_probes_see_standardised_vectors_and_controls_the_labels_of_keys(pair, monkeypatch):
    """All words have one control key, so they have one random label, which is easily learnt."""
    from sklearn.preprocessing import StandardScaler

    from fastenc.analysis import probes

    ours, _ = pair
    seen, accuracy = [], probes._accuracy
    monkeypatch.setattr(probes, "_accuracy", lambda x, *rest: seen.append(x) or accuracy(x, *rest))
    draw = np.random.default_rng(0)
    sets = []
    for _ in range(2):
        sentences = [list(draw.choice(["the", "dog", "sees", "a"], 5)) for _ in range(8)]
        labels = [list(draw.choice(["x", "y"], 5)) for _ in range(8)]
        sets.append(LabelledWords(sentences, labels, [["k"] * 5] * 8))
    scores = probe_by_layer(ours, *sets)
    assert all(score.accuracy < score.control == 1 for score in scores)
    for layer in range(3):
        train, test = (
            ours.embed_words(data.sentences, layers=(layer,)).vectors.double().numpy()
            for data in sets
        )
        scaler = StandardScaler().fit(train)
        for given, plain in zip(seen[2 * layer], (train, test), strict=True):
            np.testing.assert_allclose(given, scaler.transform(plain), rtol=1e-3, atol=1e-3)


def test_control_labels_belong_to_words_and_follow_the_frequencies():
    from fastenc.analysis.probes import _control

    words = [f"w{i}" for i in range(4000)]
    labels = _control([*words, *words], np.array(["a", "b"]), np.array([30, 10]), seed=1)
    assert labels[:4000] == labels[4000:]
    assert labels.count("a") / 8000 == pytest.approx(0.75, abs=0.03)
    assert labels != _control([*words, *words], np.array(["a", "b"]), np.array([30, 10]), seed=2)


def test_probes_say_what_is_wrong(pair):
    ours, _ = pair
    one = LabelledWords([["the", "dog"]], [["x", "y"]])
    with pytest.raises(ValueError, match="for each of its 2 words, got 1 labels"):
        probe_by_layer(ours, LabelledWords([["the", "dog"]], [["x"]]), one)
    with pytest.raises(ValueError, match="needs at least two different labels"):
        probe_by_layer(ours, LabelledWords([["the", "dog"]], [["x", "x"]]), one)
    with pytest.raises(ValueError, match="must be in training, got 'z'"):
        probe_by_layer(ours, one, LabelledWords([["the"]], [["z"]]))
