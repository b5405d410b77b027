"""Static vectors, compared with gensim's readers and answers, numpy, and sentence-transformers' StaticEmbedding."""

import zlib
from codecs import BOM_UTF8

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.metrics.pairwise import cosine_similarity

from fastenc.analysis import (
    ScoredPairs,
    StaticModel,
    StaticVectors,
    compare_neighbours,
    distill_static,
    find_occurrences,
    isolated_vectors,
    read_analogies,
    read_static_vectors,
    score_analogies,
    static_correlation,
)
from fastenc.analysis.intervals import spearman_interval
from fastenc.data import train_tokenizer
from fastenc.models import Encoder
from fastenc.models.embedding.word_vectors import WordVectors
from tests.helpers.commands import run
from tests.helpers.families import model
from tests.helpers.training_run import small_model, word_tokenizer

WORDS = ["the", "king", "queen", "man", "woman", "Zürich", "new york", "of"]


@pytest.fixture
def matrix():
    return np.random.default_rng(0).normal(size=(len(WORDS), 6)).astype(np.float32)


def write_binary(path, words, matrix, newline=b""):
    with open(path, "wb") as file:
        file.write(f"{len(words)} {matrix.shape[1]}\n".encode())
        for word, row in zip(words, matrix, strict=True):
            file.write(word.replace(" ", "_").encode() + b" " + row.tobytes() + newline)


def write_text(path, words, matrix, header=True):
    lines = [f"{len(words)} {matrix.shape[1]}"] if header else []
    lines += [
        " ".join([word, *(repr(float(v)) for v in row)])
        for word, row in zip(words, matrix, strict=True)
    ]
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("file_format", ["binary", "binary with line ends", "text", "glove"])
def test_every_format_gives_every_vector(tmp_path, matrix, file_format):
    path = tmp_path / ("x.bin" if "binary" in file_format else "x.txt")
    if "binary" in file_format:
        write_binary(path, WORDS, matrix, b"\n" if "line" in file_format else b"")
    else:
        write_text(path, WORDS, matrix, header=file_format == "text")
    vectors = read_static_vectors(path)
    spaced = "new_york" if "binary" in file_format else "new york"
    assert len(vectors) == 8 and spaced in vectors and "Zürich" in vectors
    np.testing.assert_array_equal(vectors[["queen", "Zürich", "the"]], matrix[[2, 5, 0]])
    together = torch.cat([block for _, block in vectors.blocks()])
    np.testing.assert_array_equal(together, matrix)


def test_gensim_reads_and_writes_the_same(tmp_path, matrix):
    models = pytest.importorskip("gensim.models")
    write_binary(tmp_path / "x.bin", WORDS[:6], matrix[:6])
    theirs = models.KeyedVectors.load_word2vec_format(str(tmp_path / "x.bin"), binary=True)
    ours = read_static_vectors(tmp_path / "x.bin")
    assert ours.words == list(theirs.index_to_key)
    np.testing.assert_array_equal(ours[ours.words], theirs.vectors)
    theirs.save_word2vec_format(str(tmp_path / "y.txt"), binary=False)
    theirs.save_word2vec_format(str(tmp_path / "y.bin"), binary=True)
    for name in ("y.txt", "y.bin"):
        np.testing.assert_allclose(read_static_vectors(tmp_path / name)[WORDS[:6]], matrix[:6])
    near = theirs.most_similar("king", topn=3)
    assert [n.word for n in ours.neighbours("king", 3)] == [word for word, _ in near]
    expected = theirs.most_similar(positive=["king", "woman"], negative=["man"], topn=2)
    (answer,) = ours.analogies([("man", "king", "woman")], 2)
    assert [n.word for n in answer] == [word for word, _ in expected]


def test_gensims_trained_vectors_are_gensims():
    models = pytest.importorskip("gensim.models")
    from fastenc.analysis import train_word2vec

    sentences = [["a", "b", "c"], ["b", "c", "d"], ["a", "d", "c"]] * 30
    options = dict(vector_size=8, min_count=1, workers=1, seed=1, epochs=2, sg=1, window=1)
    vectors = train_word2vec(sentences, **options)
    theirs = models.Word2Vec(sentences, **options).wv
    assert vectors.words == theirs.index_to_key
    np.testing.assert_array_equal(vectors[vectors.words], theirs.vectors)
    with pytest.raises(ValueError, match="a word must occur min_count=5 times, got none"):
        train_word2vec(sentences[:3])


def test_neighbours_and_analogies_are_the_enumerated_ones(matrix, monkeypatch):
    monkeypatch.setattr("fastenc.analysis.static_vectors.VECTORS_AT_ONCE", 3)  # several blocks
    vectors = StaticVectors.of(WORDS, torch.from_numpy(matrix))
    cosines = cosine_similarity(matrix)
    for position, word in enumerate(WORDS):
        order = [i for i in np.argsort(-cosines[position]) if i != position][:4]
        neighbours = vectors.neighbours(word, 4)
        assert [n.word for n in neighbours] == [WORDS[i] for i in order]
        np.testing.assert_allclose(
            [n.cosine for n in neighbours], cosines[position, order], rtol=1e-5
        )
    unit = matrix / np.linalg.norm(matrix, axis=1, keepdims=True)
    query = unit[1] - unit[3] + unit[4]
    order = [i for i in np.argsort(-(unit @ query)) if i not in (1, 3, 4)]
    (answer,) = vectors.analogies([("man", "king", "woman")], 2)
    assert vectors.analogies([]) == []
    assert [n.word for n in answer] == [WORDS[i] for i in order[:2]]


def test_analogies_from_a_file(tmp_path):
    path = tmp_path / "questions.txt"
    path.write_text(": capitals of states\nA a B b\nA a C c\n: other\nX x Y y\n")
    sections = read_analogies(path)
    assert sections["capitals of states"] == [("A", "a", "B", "b"), ("A", "a", "C", "c")]
    words = ["A", "a", "B", "b", "C", "c", "z"]
    matrix = torch.tensor(
        [[1, 0, 0], [1, 0, 3], [0, 1, 0], [0, 1, 3.0], [1, 1, 0], [9, -9, 0], [0.9, 1, 2]]
    )
    scores = score_analogies(StaticVectors.of(words, matrix), sections)
    assert scores["capitals of states"] == (1, 2, 2) and scores["other"] == (0, 0, 1)
    path.write_text("a b c\n")
    with pytest.raises(ValueError, match="line 1: a question must have four words, got 3"):
        read_analogies(path)


def test_correlation_is_scipys_over_the_pairs_that_are_there(matrix):
    vectors = StaticVectors.of(WORDS, torch.from_numpy(matrix))
    pairs = [("king", "queen"), ("man", "woman"), ("the", "of"), ("king", "unheard")]
    correlation = static_correlation(vectors, ScoredPairs(pairs, [3.0, 1.0, 2.0, 5.0]))
    cosines = [
        cosine_similarity(matrix[[WORDS.index(a)]], matrix[[WORDS.index(b)]])[0, 0]
        for a, b in pairs[:3]
    ]
    assert correlation.spearman == pytest.approx(spearmanr(cosines, [3.0, 1.0, 2.0]).statistic)
    assert correlation.interval == pytest.approx(spearman_interval(cosines, [3.0, 1.0, 2.0]))
    assert correlation.covered == 0.75


@pytest.mark.parametrize("change, message", [(1, "says 9 vectors, the file holds 8"), (-1, "more")])
def test_a_wrong_count_is_said(tmp_path, matrix, change, message):
    for name, write in (("x.bin", write_binary), ("x.txt", write_text)):
        path = tmp_path / name
        write(path, WORDS, matrix)
        content = path.read_bytes()
        path.write_bytes(content.replace(b"8 6", f"{8 + change} 6".encode(), 1))
        expected = (
            "says 7 vectors, the file holds 8" if (name, change) == ("x.txt", -1) else message
        )
        with pytest.raises(ValueError, match=expected):
            read_static_vectors(path)


def test_empty_lines_are_skipped(tmp_path, matrix):
    path = tmp_path / "x.txt"
    write_text(path, WORDS, matrix, header=False)
    path.write_bytes(
        path.read_bytes().replace(b"\n", b"\r\n").replace(b"\nqueen", b"\n\r\n\r\nqueen")
    )
    assert np.array_equal(read_static_vectors(path)[WORDS].numpy(), matrix)


@pytest.mark.parametrize("header", [True, False])
def test_a_byte_order_mark_is_no_part_of_a_word(tmp_path, matrix, header):
    path = tmp_path / "x.txt"
    write_text(path, WORDS, matrix, header=header)
    path.write_bytes(BOM_UTF8 + path.read_bytes())
    read = read_static_vectors(path)
    assert read.words == WORDS and np.array_equal(read[WORDS].numpy(), matrix)


def test_other_bad_files(tmp_path, matrix):
    path = tmp_path / "x.txt"
    write_text(path, WORDS, matrix, header=False)
    path.write_text(path.read_text().replace("king ", "king 0.5x ", 1).replace("of ", "", 1))
    with pytest.raises(ValueError, match="line 8: a line must have a word and 6 numbers"):
        read_static_vectors(path)
    write_text(path, WORDS, matrix)
    path.write_text(path.read_text().replace("of ", "", 1))
    with pytest.raises(ValueError, match="line 9: a line must have a word and 6 numbers"):
        read_static_vectors(path)
    path.write_text("old\tnew\t1.58\n")
    with pytest.raises(
        ValueError, match="line 1: a line must have a word and numbers, with spaces"
    ):
        read_static_vectors(path)
    path.write_text("")
    with pytest.raises(ValueError, match="is empty"):
        read_static_vectors(path)
    with pytest.raises(ValueError, match="is not a file"):
        read_static_vectors(tmp_path / "none.bin")
    (tmp_path / "x.txt.gz").write_bytes(b"x")
    with pytest.raises(ValueError, match="gunzip it first"):
        read_static_vectors(tmp_path / "x.txt.gz")
    (tmp_path / "y.bin").write_bytes(b"the 0.5 0.25\n")
    with pytest.raises(ValueError, match="must begin with a line of two numbers"):
        read_static_vectors(tmp_path / "y.bin")
    vectors = StaticVectors.of(WORDS, torch.from_numpy(matrix))
    with pytest.raises(ValueError, match="the word 'emperor' is not among its 8 words"):
        vectors[["king", "emperor"]]


TEXTS = ["a small dog runs", "the dog is running", "a cat sleeps", "the men sing of the dog"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tokenizer = train_tokenizer(TEXTS, vocab_size=80)
    model("bert", vocab_size=tokenizer.get_vocab_size()).save_pretrained(folder)
    encoder = Encoder.from_pretrained(folder)
    encoder.tokenizer = tokenizer
    return encoder


@pytest.mark.parametrize("components", [None, 5])
def test_a_distilled_model_is_the_formula_and_loads_in_sentence_transformers(
    encoder, tmp_path, components
):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense
    from sklearn.decomposition import PCA

    tokenizer = encoder.tokenizer
    static = distill_static(encoder, TEXTS, components=components, smoothing=0.01, batch_size=7)
    size = tokenizer.get_vocab_size()
    cls, sep = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    from fastenc.packing import pack_sequences

    with torch.no_grad():
        states = [
            encoder(pack_sequences([[cls, token, sep]])).last_hidden_state.mean(0).numpy()
            for token in range(size)
        ]
    plain = np.stack(states) - np.mean(states, axis=0)
    if components:
        plain = PCA(components).fit_transform(np.stack(states))
    ids = [i for text in TEXTS for i in tokenizer.encode(text, add_special_tokens=False).ids]
    share = np.bincount(ids, minlength=size) / len(ids)
    plain *= (0.01 / (0.01 + share))[:, None]
    kept = [token for token in range(size) if not tokenizer.id_to_token(token).startswith("[")]
    distilled = static.vectors.numpy()
    special = sorted({*range(size)} - {*kept})
    assert len(special) == 5 and not distilled[special].any(), "special tokens do not count"
    # The sign of a component is arbitrary.
    signs = np.sign((distilled[kept] * plain[kept]).sum(0)) if components else 1
    np.testing.assert_allclose(distilled[kept], plain[kept] * signs, rtol=1e-3, atol=1e-4)
    static.save(tmp_path / "static")
    peer = SentenceTransformer(str(tmp_path / "static"), device="cpu")
    np.testing.assert_allclose(static.encode(TEXTS), peer.encode(TEXTS), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="it is a static model, not an encoder: load it with"):
        Encoder.from_pretrained(tmp_path / "static")
    again = StaticModel.load(tmp_path / "static")
    assert torch.equal(again.vectors, static.vectors)
    peer.append(Dense(components or 32, 4))
    peer.save(str(tmp_path / "dense"))
    with pytest.raises(ValueError, match="nothing else, got Normalize, Dense: use sentence-transf"):
        StaticModel.load(tmp_path / "dense")
    static.normalize = False
    static.tokenizer.enable_padding(length=30)
    static.save(tmp_path / "padded")
    texts = [*TEXTS, ""]
    peer = SentenceTransformer(str(tmp_path / "padded"), device="cpu")
    read = StaticModel.load(tmp_path / "padded").encode(texts)
    np.testing.assert_allclose(read, peer.encode(texts), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"components must be from 1 to 32, .* got 40"):
        distill_static(encoder, TEXTS, components=40)
    with pytest.raises(ValueError, match="the texts must have tokens, got none"):
        distill_static(encoder, [])
    for smoothing in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="smoothing must be positive and finite, got"):
            distill_static(encoder, TEXTS, smoothing=smoothing)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        distill_static(encoder, TEXTS, batch_size=0)
    encoder.save_pretrained(tmp_path / "encoder")
    with pytest.raises(ValueError, match="encoder must hold a static model"):
        StaticModel.load(tmp_path / "encoder")
    with pytest.raises(ValueError, match=r"model.safetensors is corrupt or missing"):
        StaticModel.load(tmp_path)


def test_neighbours_of_a_word_in_its_sentences(encoder):
    pool = [text.split() for text in TEXTS]
    words = [word for sentence in pool for word in sentence]
    static = StaticVectors.of(sorted(set(words)), torch.randn(len(set(words)), 4))
    asked = [(pool[0], 2), (pool[1], 1)]
    compared = compare_neighbours(encoder, asked, pool, static, count=2)
    every = encoder.embed_words(pool, layers=(-1,)).vectors.numpy()
    for occurrence, (sentence, position) in zip(compared, asked, strict=True):
        vector = encoder.embed_words([sentence], layers=(-1,)).vectors[position].numpy()
        order = np.argsort(-cosine_similarity(vector[None], every)[0])
        expected = []
        for i in order:
            if words[i] != sentence[position] and words[i] not in expected:
                expected.append(words[i])
        assert [n.word for n in occurrence.contextual] == expected[:2]
        assert occurrence.static == static.neighbours(sentence[position], 2)
    with pytest.raises(ValueError, match=r"index must be from 0 to 3 in the sentence .* got 9"):
        compare_neighbours(encoder, [(pool[0], 9)], pool, static)


def test_a_word_that_has_a_static_vector_in_upper_case_only(encoder):
    """Such as a German noun in vectors that distinguish case; gensim's order is that of its key."""
    models = pytest.importorskip("gensim.models")
    words = ["Bank", "Fluss", "sieht", "Geld", "fluss"]
    keyed = models.KeyedVectors(4)
    keyed.add_vectors(words, torch.randn(len(words), 4).numpy())
    static = StaticVectors.of(words, torch.from_numpy(keyed.vectors))
    sentence = ["Bank", "Fluss", "BANK"]
    uses = compare_neighbours(encoder, [(sentence, i) for i in range(3)], [sentence], static, 3)
    for use, key in zip(uses, ("Bank", "fluss"), strict=False):
        expected = [word for word, _ in keyed.most_similar(key, topn=3)]
        assert [each.word for each in use.static] == expected
    assert not uses[2].static


def test_a_word_by_itself_is_in_lower_case_and_in_the_layer_asked_for(encoder):
    vectors = isolated_vectors(encoder, [["Dog", "runs"], ["dog"]], layers=(1,))
    expected = encoder.embed_words([["dog"], ["runs"]], layers=(1,)).vectors
    assert vectors.words == ["dog", "runs"]
    assert torch.equal(vectors[["dog", "runs"]], expected)


def test_the_first_sentences_with_a_word_are_found_and_its_first_use_in_each():
    sentences = [["a", "Bank", "bank"], ["none"], ["bank"], ["the", "BANK"]]
    found = find_occurrences(sentences, "bank", 2)
    assert found == [(sentences[0], 1), (sentences[2], 0)]


class RandomVectors:
    """An encoder whose vectors are random, but the same for the same sentence."""

    def __init__(self, width, seed):
        self.width, self.seed = width, seed

    def embed_words(self, sentences, *, layers, show_progress):
        rows, offsets = [], [0]
        for sentence in sentences:
            rng = np.random.default_rng([self.seed, zlib.crc32(" ".join(sentence).encode())])
            rows.append(rng.standard_normal((len(sentence), self.width)))
            offsets.append(offsets[-1] + len(sentence))
        return WordVectors(torch.from_numpy(np.concatenate(rows)), torch.tensor(offsets))


@pytest.mark.parametrize("seed", range(12))
def test_frequent_words_do_not_displace_the_nearest_words(seed):
    """Random texts of which a few words are the greater part, compared with the enumeration of every use."""
    rng = np.random.default_rng(seed)
    size, count = int(rng.integers(2, 30)), int(rng.integers(1, 9))
    frequencies = rng.dirichlet(np.full(size, 0.05 if seed % 2 else 1.0))
    pool = [
        [f"w{i}" for i in rng.choice(size, p=frequencies, size=rng.integers(1, 30))]
        for _ in range(rng.integers(5, 400))
    ]
    words = [word for sentence in pool for word in sentence]
    common = max(set(words), key=words.count)
    asked = [(sentence, sentence.index(common)) for sentence in pool if common in sentence][:3]
    encoder = RandomVectors(4, seed)
    names = sorted(set(words))
    static = StaticVectors.of(
        [*names, *names], torch.from_numpy(rng.standard_normal((2 * len(names), 4)))
    )
    every = encoder.embed_words(pool, layers=(-1,), show_progress=False).vectors.numpy()
    for neighbours, (sentence, position) in zip(
        compare_neighbours(encoder, asked, pool, static, count), asked, strict=True
    ):
        vector = encoder.embed_words([sentence], layers=(-1,), show_progress=False).vectors[
            position
        ]
        cosines = cosine_similarity(vector[None].numpy(), every)[0]
        best = {
            name: max(c for c, w in zip(cosines, words, strict=True) if w == name) for name in names
        }
        expected = sorted(set(names) - {common}, key=lambda name: -best[name])[:count]
        assert [each.word for each in neighbours.contextual] == expected
        np.testing.assert_allclose(
            [each.cosine for each in neighbours.contextual],
            [best[w] for w in expected],
            rtol=1e-4,
            atol=1e-6,
        )
        # If a word occurs twice in a file, its second vector is not used.
        first = [each.word for each in neighbours.static]
        assert len(set(first)) == len(first) == min(count, len(names) - 1)


def test_five_neighbours_of_the_most_frequent_word(tmp_path):
    """As the command prints them, for a word with more uses than the number of candidates."""
    sentences = [f"the bank of {name} pays the bank" for name in ["ada", "berlin", "cork"] * 133]
    (tmp_path / "texts.txt").write_text("\n".join(sentences))
    small_model("mlm", word_tokenizer()).save_pretrained(tmp_path / "model")
    printed = run("neighbours", tmp_path / "model", tmp_path / "texts.txt", "--word", "bank")
    lines = [line for line in printed.splitlines() if "in the sentence:" in line]
    assert len(lines) == 10
    for line in lines:
        assert len(set(line.split(":")[1].split(", "))) == 5
