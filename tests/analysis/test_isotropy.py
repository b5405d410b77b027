"""Moments, anisotropy and similarities against numpy, scikit-learn and scipy on all vectors and all pairs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import spearmanr
from sklearn.metrics.pairwise import cosine_similarity
from sklearn.preprocessing import StandardScaler

from fastenc.analysis import (
    Isotropy,
    Moments,
    ScoredPairs,
    correlation_by_layer,
    isotropy_by_layer,
    read_scored_pairs,
    self_similarity,
    sentence_moments,
    similarity_by_frequency,
    summarize_heads,
    vectors_by_layer,
)
from fastenc.analysis.intervals import mean_interval, spearman_interval
from fastenc.analysis.similarity import mean_of_inner
from fastenc.data import train_tokenizer
from fastenc.models import Encoder, SentenceEmbedder
from fastenc.models.embedding.sentence_files import SentenceSettings
from fastenc.models.embedding.standardization import Standardization
from fastenc.packing import pack_sequences
from tests.helpers.byte_tokenizers import byte_tokenizer
from tests.helpers.checkpoints import save
from tests.helpers.families import model

TEXTS = [
    "a small dog runs",
    "the dog is running in the rain",
    "a cat sleeps",
    "two men play chess",
    "nobody sings",
    "the men sing of the dog",
]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tokenizer = train_tokenizer(TEXTS, vocab_size=97)
    model("bert", vocab_size=97).save_pretrained(folder)
    encoder = Encoder.from_pretrained(folder)
    encoder.tokenizer = tokenizer
    return encoder


def states(encoder, text):
    """Hidden states (layers + 1, tokens without special ones, width)."""
    ids = encoder.tokenizer.encode(text).ids
    with torch.no_grad():
        output = encoder(pack_sequences([ids]), output_hidden_states=True)
    return torch.stack(output.hidden_states)[:, 1:-1].numpy()


def vectors(count=500, width=7):
    """Vectors far from 0 compared with their spread, where a sum of squares would lose the variance."""
    draw = np.random.default_rng(0)
    return torch.from_numpy(draw.normal(1e4, 10.0 ** np.arange(-3, width - 3), (count, width)))


@pytest.mark.parametrize("sizes", [(500,), (1, 499), (0, 250, 1, 249)])
def test_moments_in_parts_are_scikit_learns(sizes):
    x = vectors()
    whole = StandardScaler().fit(x.numpy())
    parts = []
    for part in x.split(list(sizes)):
        parts.append(Moments.empty(7))
        for batch in part.split(64):
            parts[-1].add(batch)
    moments = parts[0]
    for other in parts[1:]:  # as if from other processes
        moments.merge(other)
    assert moments.count == 500
    np.testing.assert_allclose(moments.mean, whole.mean_, rtol=1e-12)
    np.testing.assert_allclose(moments.std, whole.scale_, rtol=1e-7)


def test_standardization_is_scikit_learns_and_keeps_the_dtype():
    x = vectors() - 1e4
    moments = Moments.empty(7)
    moments.add(x)
    expected = StandardScaler().fit_transform(x.numpy())
    standardized = moments.standardization()(x.float())
    assert standardized.dtype == torch.float32
    np.testing.assert_allclose(standardized, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="a positive std, got 1 and 0 in dimension 2"):
        Standardization(torch.ones(3), torch.tensor([1.0, 2.0, 0.0]))
    with pytest.raises(ValueError, match=r"one shape \(hidden_size,\), got \(3,\) and \(2,\)"):
        Standardization(torch.ones(3), torch.ones(2))


def test_anisotropy_is_the_mean_over_all_pairs():
    x = torch.randn(60, 5) + torch.tensor([2.0, 0.0, 0.5, 0.0, 0.0])
    x[7] = 0  # it has no direction
    one, other = Isotropy.empty(5), Isotropy.empty(5)
    one.add(x[:20])
    other.add(x[20:])
    one.merge(other)
    kept = np.delete(x.numpy(), 7, axis=0)
    pairs = cosine_similarity(kept)[np.triu_indices(59, 1)]
    assert one.count == 59
    assert one.anisotropy == pytest.approx(pairs.mean(), rel=1e-6)
    unit = kept / np.linalg.norm(kept, axis=1, keepdims=True)
    first, second = np.triu_indices(59, 1)
    np.testing.assert_allclose(one.contributions, (unit[first] * unit[second]).mean(0), rtol=1e-5)
    assert float(one.shares.sum()) == pytest.approx(1)
    with pytest.raises(ValueError, match="needs at least two vectors, got 0"):
        _ = Isotropy.empty(3).anisotropy


def test_isotropy_by_layer_is_that_of_all_tokens_at_once(encoder):
    by_layer = isotropy_by_layer(encoder, TEXTS, batch_size=2)
    every = np.concatenate([states(encoder, text) for text in TEXTS], axis=1)
    assert len(by_layer) == 3
    for layer, x in zip(by_layer, every, strict=True):
        scaler = StandardScaler()
        scaled = scaler.fit_transform(x)
        np.testing.assert_allclose(layer.moments.mean, scaler.mean_, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(layer.moments.std, scaler.scale_, rtol=1e-4)
        upper = np.triu_indices(len(x), 1)
        assert layer.raw.anisotropy == pytest.approx(cosine_similarity(x)[upper].mean(), rel=1e-4)
        after = cosine_similarity(scaled)[upper].mean()
        assert layer.standardized.anisotropy == pytest.approx(after, rel=1e-3, abs=1e-6)


def test_all_tokens_of_a_text_count_where_no_token_is_added_before_it(tmp_path):
    theirs = model("t5", vocab_size=300)
    encoder = Encoder.from_pretrained(save(theirs, tmp_path))
    encoder.tokenizer = train_tokenizer(TEXTS, vocab_size=300, model_type="t5")
    every = []
    for text in TEXTS:
        ids = torch.tensor([encoder.tokenizer.encode(text).ids])  # with an end token alone
        with torch.no_grad():
            output = theirs(ids, output_hidden_states=True)
        every.append(torch.cat(output.hidden_states)[:, :-1])
    means = torch.stack([states.mean(1) for states in every], 1)
    torch.testing.assert_close(vectors_by_layer(encoder, TEXTS), means, rtol=1e-4, atol=1e-5)
    tokens = torch.cat(every, 1).numpy()
    pairs = np.triu_indices(tokens.shape[1], 1)
    for layer, x in zip(isotropy_by_layer(encoder, TEXTS), tokens, strict=True):
        assert layer.raw.anisotropy == pytest.approx(cosine_similarity(x)[pairs].mean(), rel=1e-3)
    assert summarize_heads(encoder, TEXTS).tokens == tokens.shape[1]


def test_large_special_tokens_do_not_change_the_mean_of_the_others():
    batch = pack_sequences([[1] * length for length in (1, 2, 3, 12, 40)])
    begins, stops = batch.cu_seqlens[:-1].long(), batch.cu_seqlens[1:].long()
    state = torch.randn(batch.total_tokens, 8).bfloat16()
    state[begins] *= 1000
    inside = torch.ones(batch.total_tokens, dtype=torch.bool)
    inside[begins] = inside[stops - 1] = False
    rows = [
        state[a:b] if b - a < 3 else state[a + 1 : b - 1]
        for a, b in zip(begins, stops, strict=True)
    ]
    expected = torch.stack([each.double().mean(0) for each in rows]).float()
    torch.testing.assert_close(mean_of_inner(state, batch, inside), expected, rtol=1e-5, atol=1e-5)


def test_correlations_by_layer_are_scipys(encoder, monkeypatch):
    monkeypatch.setattr("fastenc.analysis.states.TEXTS_AT_ONCE", 3)
    pairs = [(TEXTS[i], TEXTS[j]) for i, j in ((0, 1), (0, 2), (3, 5), (4, 5), (1, 1))]
    scores = [3.0, 1.0, 2.0, 2.5, 5.0]
    correlations = correlation_by_layer(encoder, ScoredPairs(pairs, scores), batch_size=2)
    texts = sorted({text for pair in pairs for text in pair})
    means = np.stack([states(encoder, text).mean(1) for text in texts], axis=1)
    for layer, x in zip(correlations, means, strict=True):
        for value, rows in (
            (layer.raw, x),
            (layer.standardized, StandardScaler().fit_transform(x)),
        ):
            of = dict(zip(texts, rows, strict=True))
            cosines = [cosine_similarity(of[a][None], of[b][None])[0, 0] for a, b in pairs]
            assert value == pytest.approx(spearmanr(cosines, scores).statistic, abs=1e-6)
            if rows is x:
                assert layer.interval == pytest.approx(spearman_interval(cosines, scores))


def test_self_similarity_is_the_mean_over_pairs_of_occurrences(encoder, monkeypatch):
    x = torch.randn(9, 4)
    owner = torch.tensor([0, 0, 0, 1, 1, 2, 0, 1, 0])
    unit = torch.nn.functional.normalize(x, dim=1)
    sums = torch.zeros(3, 4).index_add_(0, owner, unit)
    similarities = self_similarity(sums, owner.bincount())
    for word in (0, 1):
        cosines = cosine_similarity(x[owner == word].numpy())
        expected = cosines[np.triu_indices(len(cosines), 1)].mean()
        assert float(similarities[word]) == pytest.approx(expected, rel=1e-5)
    assert similarities[2].isnan()
    sentences = [text.split() for text in TEXTS]
    monkeypatch.setattr("fastenc.analysis.similarity.SENTENCES_AT_ONCE", 4)
    bins = similarity_by_frequency(encoder, sentences, batch_size=2)
    words = [word for sentence in sentences for word in sentence]
    every = {word: words.count(word) for word in words}
    assert sum(b.words for b in bins) == sum(count > 1 for count in every.values())
    vectors = encoder.embed_words(sentences, layers=(-1,)).vectors.numpy()
    for low, high, count, similarity, interval in bins:
        chosen = [word for word, n in every.items() if low <= n < high]
        means = []
        for word in chosen:
            cosines = cosine_similarity(vectors[[w == word for w in words]])
            means.append(cosines[np.triu_indices(len(cosines), 1)].mean())
        assert count == len(chosen) and similarity == pytest.approx(np.mean(means), rel=1e-5)
        assert interval == pytest.approx(mean_interval(means), rel=1e-5)


def test_a_words_case_does_not_matter_and_the_layer_is_that_asked_for(encoder):
    sentences = [["A", "Dog"], ["the", "dog", "runs"]]
    for layer in (0, 1):
        (only,) = similarity_by_frequency(encoder, sentences, layer=layer)
        rows = encoder.embed_words(sentences, layers=(layer,)).vectors[[1, 3]].numpy()
        assert (only.low, only.high, only.words) == (2, 4, 1)
        assert only.similarity == pytest.approx(cosine_similarity(rows)[0, 1], rel=1e-5)


@pytest.mark.parametrize("pooling", ["cls", "max"])
def test_sentence_moments_are_those_of_the_pooling(encoder, pooling):
    moments = sentence_moments(encoder, TEXTS, pooling)
    plain = encoder.encode(TEXTS, pooling=pooling, normalize=False).numpy()
    np.testing.assert_allclose(moments.mean, plain.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(moments.std, plain.std(0), rtol=1e-4, atol=1e-5)


def test_sentence_moments_are_those_of_the_checkpoints_vectors(encoder, tmp_path):
    """With its pooling, its longest text and its default prompt; without the standardization that it has."""
    from sentence_transformers import SentenceTransformer

    settings = SentenceSettings(
        "cls", normalize=False, max_length=5, prompts={"query": "the men "}, default_prompt="query"
    )
    ours = Encoder.from_pretrained(encoder.base)
    ours.tokenizer, ours.sentence = encoder.tokenizer, settings
    ours.save_pretrained(tmp_path)
    expected = SentenceTransformer(str(tmp_path), device="cpu").eval().encode(TEXTS)
    standardization = Standardization(torch.ones(32), torch.full((32,), 2.0))
    for ours.sentence in (settings, replace(settings, standardization=standardization)):
        moments = sentence_moments(ours, TEXTS, batch_size=2)
        np.testing.assert_allclose(moments.mean, expected.mean(0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(moments.std, expected.std(0), rtol=1e-4, atol=1e-5)


def test_sentence_moments_of_an_encoder_whose_output_has_another_width(tmp_path):
    theirs = model("embedding_gemma2", vocab_size=300, embedding_dim=24)
    ours = Encoder.from_pretrained(save(theirs, tmp_path))
    ours.tokenizer = byte_tokenizer("gemma3", TEXTS, vocab_size=300)
    ids = [torch.tensor([ours.tokenizer.encode(text).ids]) for text in TEXTS]
    with torch.no_grad():
        states = [theirs(each).last_hidden_state for each in ids]
    expected = torch.cat([state.mean(1) for state in states])
    moments = sentence_moments(ours, TEXTS)
    np.testing.assert_allclose(moments.mean, expected.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(moments.std, expected.std(0, correction=0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("normalize", [True, False])
def test_saved_with_an_encoder_used_by_encode_and_by_sentence_transformers(
    encoder, tmp_path, normalize
):
    from sentence_transformers import SentenceTransformer

    moments = sentence_moments(encoder, TEXTS)
    plain = encoder.encode(TEXTS, pooling="mean", normalize=False).numpy()
    np.testing.assert_allclose(moments.mean, plain.mean(0), rtol=1e-4, atol=1e-5)
    standardization = moments.standardization()
    standardizing = Encoder.from_pretrained(encoder.base)
    standardizing.tokenizer = encoder.tokenizer
    standardizing.sentence = replace(
        SentenceSettings(normalize=normalize), standardization=standardization
    )
    standardizing.save_pretrained(tmp_path)
    expected = StandardScaler().fit_transform(plain)
    if normalize:
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    again = Encoder.from_pretrained(tmp_path)
    peer = SentenceTransformer(str(tmp_path), device="cpu").eval()
    vectors = {
        "encoder": standardizing.encode(TEXTS),
        "loaded": again.encode(TEXTS),
        "embedder": SentenceEmbedder.from_pretrained(tmp_path).encode(TEXTS),
        "sentence-transformers": peer.encode(TEXTS, convert_to_tensor=True),
    }
    for name, values in vectors.items():
        np.testing.assert_allclose(values, expected, rtol=2e-3, atol=2e-4, err_msg=name)


@pytest.mark.parametrize("widths", [(32, 32), (32, 64, 32), (32, 16)])
def test_dense_modules_are_computed(encoder, tmp_path, widths):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    encoder.save_pretrained(tmp_path / "base")
    steps = [modules.Transformer(str(tmp_path / "base")), modules.Pooling(32)]
    for number, (before, after) in enumerate(zip(widths, widths[1:], strict=False)):
        # Tanh is sentence-transformers' default; None is the identity.
        given = {} if number else {"bias": False, "activation_function": None}
        steps.append(modules.Dense(before, after, **given))
    peer = SentenceTransformer(modules=[*steps, modules.Normalize()], device="cpu").eval()
    peer.save(str(tmp_path / "peer"))
    expected = peer.encode(TEXTS, convert_to_tensor=True)
    ours = Encoder.from_pretrained(tmp_path / "peer")
    np.testing.assert_allclose(ours.encode(TEXTS), expected, atol=1e-5)
    np.testing.assert_allclose(
        ours.encode(TEXTS, truncate_dim=10),
        peer.encode(TEXTS, truncate_dim=10, convert_to_tensor=True),
        atol=1e-5,
    )
    with pytest.raises(ValueError, match=f"truncate_dim must be from 1 to .* {widths[-1]}, got 65"):
        ours.encode(TEXTS, truncate_dim=65)
    standardization = Standardization(torch.zeros(32), torch.ones(32))
    with pytest.raises(
        ValueError, match=r"takes the place of linear layers, got both, with \d layer"
    ):
        replace(ours.sentence, standardization=standardization)
    embedder = SentenceEmbedder.from_pretrained(tmp_path / "peer")
    np.testing.assert_allclose(embedder.encode(TEXTS), expected, atol=1e-5)
    embedder.save_pretrained(tmp_path / "again")
    again = SentenceTransformer(str(tmp_path / "again"), device="cpu").eval()
    np.testing.assert_allclose(again.encode(TEXTS), expected, atol=1e-5)
    file = tmp_path / "peer" / "2_Dense" / "model.safetensors"
    torch.save(load_file(file), file.with_name("pytorch_model.bin"))
    file.unlink()
    older = SentenceTransformer(str(tmp_path / "peer"), device="cpu").eval()
    np.testing.assert_allclose(older.encode(TEXTS), expected, atol=1e-5)
    with pytest.raises(
        ValueError, match=r"weight of its Dense module in model.safetensors, got no"
    ):
        SentenceEmbedder.from_pretrained(tmp_path / "peer")
    older.save_pretrained(str(tmp_path / "converted"))  # the error's remedy
    converted = SentenceEmbedder.from_pretrained(tmp_path / "converted")
    np.testing.assert_allclose(converted.encode(TEXTS), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["module_input_name", "module_output_name"])
def test_a_dense_module_of_another_value_is_not_taken_for_one_of_the_vector(
    encoder, tmp_path, name
):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    encoder.save_pretrained(tmp_path / "base")
    steps = [modules.Transformer(str(tmp_path / "base")), modules.Pooling(32)]
    dense = modules.Dense(32, 32, **{name: "token_embeddings"})
    peer = SentenceTransformer(modules=[*steps, dense], device="cpu").eval()
    peer.save(str(tmp_path / "peer"))
    # The module leaves the vector as the pooling made it.
    plain = SentenceTransformer(modules=steps, device="cpu").eval()
    np.testing.assert_allclose(peer.encode(TEXTS), plain.encode(TEXTS), atol=1e-6)
    with pytest.raises(ValueError, match=r"optionally Dense modules of the text's vector"):
        SentenceEmbedder.from_pretrained(tmp_path / "peer")


def test_scored_pairs_from_a_table(tmp_path):
    path = tmp_path / "x.tsv"
    path.write_text("word1\tword2\tscore\ngem\tjewel\t3.94\n")
    assert read_scored_pairs(path) == ScoredPairs([("gem", "jewel")], [3.94])
    path.write_text("word1\tword2\tscore\ngem\tjewel\tmuch\n")
    with pytest.raises(ValueError, match=r"line 2: .* must be a number"):
        read_scored_pairs(path)
