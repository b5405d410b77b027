"""Vectors of words, compared with sums written out over transformers' hidden states."""

import numpy as np
import pytest
import torch

from fastenc.data import train_tokenizer
from fastenc.models import Encoder
from fastenc.models.embedding.states import resolve_layers, visit_states
from fastenc.models.embedding.word_vectors import LAYERS, embed_words
from fastenc.nn import ScalarMix
from fastenc.packing import pack_sequences
from tests.helpers.commands import failure, run
from tests.helpers.families import FAMILIES, model

SENTENCES = [
    ["the", "unbelievable", "dog", "sleeps"],
    ["dogs"],
    [],
    ["a", "cat", "sees", "the", "incomprehensible", "unbelievable", "river"],
    ["rivers", "and", "dogs", "and", "cats"],
]
ALGORITHMS = {
    "bert": "wordpiece",
    "distilbert": "wordpiece",
    "electra": "wordpiece",
    "roberta": "bpe",
}
POOL = {
    "first": lambda rows: rows[0],
    "last": lambda rows: rows[-1],
    "mean": lambda rows: rows.mean(0),
}
COMBINE = {
    "mean": lambda states: torch.stack(states).mean(0),
    "sum": lambda states: torch.stack(states).sum(0),
    "concat": lambda states: torch.cat(states, dim=1),
    "last": lambda states: states[-1],
}


def encoder_of(family, folder):
    """(our encoder, transformers'), four layers deep, with a tokenizer that splits words into pieces."""
    layers = {"n_layers": 4} if family == "distilbert" else {"num_hidden_layers": 4}
    algorithm = ALGORITHMS.get(family, "unigram")
    texts = ["the dog sees a cat", "rivers sleep", "un believ able in com prehens ible"]
    tokenizer = train_tokenizer(
        texts, model_type=algorithm, vocab_size=300 if algorithm == "bpe" else 60
    )
    theirs = model(
        family, **layers, vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=64
    )
    theirs.save_pretrained(folder)
    ours = Encoder.from_pretrained(folder)
    ours.tokenizer = tokenizer
    return ours, theirs


@torch.no_grad()
def expected(ours, theirs, words, layers, combine, subwords):
    """One sentence at a time, with all states kept, in a loop over words."""
    if not words:
        return None
    tokenizer = type(ours.tokenizer).from_str(ours.tokenizer.to_str())
    tokenizer.pre_tokenizer = ours_prefixed(tokenizer)
    encoding = tokenizer.encode(words, is_pretokenized=True)
    output = theirs(torch.tensor([encoding.ids]), output_hidden_states=True)
    state = combine([output.hidden_states[layer][0] for layer in layers])
    rows = lambda word: [i for i, own in enumerate(encoding.word_ids) if own == word]
    return torch.stack([POOL[subwords](state[rows(word)]) for word in range(len(words))])


def ours_prefixed(tokenizer):
    """Byte-level tokenizers must read a word as if after a space."""
    from tokenizers import pre_tokenizers

    if "ByteLevel" in tokenizer.to_str():
        return pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer.pre_tokenizer


@pytest.mark.parametrize("subwords", POOL)
@pytest.mark.parametrize("combine", COMBINE)
def test_every_combination_is_the_sum_written_out(tmp_path, combine, subwords):
    ours, theirs = encoder_of("bert", tmp_path)
    word_vectors = ours.embed_words(
        SENTENCES, combine=combine, subwords=subwords, layers=(-4, 2, -1), batch_size=2
    )
    parts = [
        expected(ours, theirs, words, (1, 2, 4), COMBINE[combine], subwords) for words in SENTENCES
    ]
    whole = torch.cat([part for part in parts if part is not None])
    torch.testing.assert_close(word_vectors.vectors, whole, rtol=1e-4, atol=1e-5)
    assert word_vectors.offsets.tolist() == [0, 4, 5, 5, 12, 17]
    torch.testing.assert_close(word_vectors[3], parts[3], rtol=1e-4, atol=1e-5)
    assert len(word_vectors) == 5 and word_vectors[2].shape == (0, whole.shape[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_by_the_default_options(tmp_path, family):
    ours, theirs = encoder_of(family, tmp_path)
    word_vectors = ours.embed_words(SENTENCES)
    layers = [layer % (ours.config.num_layers + 1) for layer in LAYERS]
    parts = [expected(ours, theirs, words, layers, COMBINE["mean"], "mean") for words in SENTENCES]
    whole = torch.cat([part for part in parts if part is not None])
    torch.testing.assert_close(word_vectors.vectors, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("subwords", POOL)
def test_a_tokenizer_without_a_begin_token(tmp_path, subwords):
    texts = ["the dog sees a cat", "rivers sleep", "un believ able in com prehens ible"]
    tokenizer = train_tokenizer(texts, model_type="t5", vocab_size=200)
    theirs = model("t5", vocab_size=tokenizer.get_vocab_size())
    theirs.save_pretrained(tmp_path)
    ours = Encoder.from_pretrained(tmp_path)
    ours.tokenizer = tokenizer
    vectors = ours.embed_words(SENTENCES, layers=(-1,), subwords=subwords).vectors
    combine = COMBINE["last"]
    parts = [expected(ours, theirs, words, [-1], combine, subwords) for words in SENTENCES]
    whole = torch.cat([part for part in parts if part is not None])
    torch.testing.assert_close(vectors, whole, rtol=1e-4, atol=1e-5)


def test_a_scalar_mix_weighs_the_layers(tmp_path):
    ours, theirs = encoder_of("bert", tmp_path)
    mix = ScalarMix(5)
    with torch.no_grad():
        mix.scalars.copy_(torch.randn(5))
        mix.gamma.fill_(1.5)
    weights = 1.5 * torch.softmax(mix.scalars.detach(), 0)
    word_vectors = ours.embed_words(SENTENCES[:1], layers=range(5), combine=mix, subwords="first")
    combine = lambda states: sum(w * state for w, state in zip(weights, states, strict=True))
    whole = expected(ours, theirs, SENTENCES[0], range(5), combine, "first")
    torch.testing.assert_close(word_vectors.vectors, whole, rtol=1e-4, atol=1e-5)


def test_strings_are_split_at_white_space_and_words_without_tokens_are_unknown(tmp_path):
    ours, _ = encoder_of("bert", tmp_path)
    split = ours.embed_words(["the dog  sees"])
    assert torch.equal(split.vectors, ours.embed_words([["the", "dog", "sees"]]).vectors)
    joiner = ours.embed_words([["the", "\u200d", "dog"]])
    unknown = ours.embed_words([["the", "[UNK]", "dog"]])
    torch.testing.assert_close(joiner.vectors, unknown.vectors)


def test_a_long_sentence_is_read_in_windows(tmp_path):
    """Each word's vector comes from the window in which the word is most central. A word of any length has a vector."""
    ours, theirs = encoder_of("bert", tmp_path)
    words = ["dog" if index % 3 else "unbelievable" for index in range(90)]
    words[30] = "incomprehensible" * 6  # longer than the model's positions
    word_vectors = ours.embed_words([words], layers=(-1,), subwords="first")
    assert word_vectors.vectors.shape == (90, 32) and word_vectors.vectors.isfinite().all()
    # The first words are in the first window only.
    ids = ours.tokenizer.encode(words, is_pretokenized=True).ids[: ours.positions - 1]
    window = torch.tensor([[*ids, ours.tokenizer.token_to_id("[SEP]")]])
    with torch.no_grad():
        state = theirs(window).last_hidden_state[0]
    torch.testing.assert_close(word_vectors.vectors[0], state[1], rtol=1e-4, atol=1e-5)


def test_streams_to_a_file_what_it_returns(tmp_path, monkeypatch):
    monkeypatch.setattr("fastenc.models.embedding.word_windows.CHUNK", 2)
    ours, _ = encoder_of("bert", tmp_path)
    whole = ours.embed_words(SENTENCES)
    word_vectors = ours.embed_words(iter(SENTENCES), out=tmp_path / "vectors.npy")
    torch.testing.assert_close(word_vectors.vectors, whole.vectors, rtol=1e-5, atol=1e-6)
    on_disk = np.load(tmp_path / "vectors.npy")
    assert on_disk.dtype == np.float32 and np.array_equal(on_disk, word_vectors.vectors.numpy())
    empty = ours.embed_words([[]], out=tmp_path / "empty.npy")
    assert empty.vectors.shape == np.load(tmp_path / "empty.npy").shape == (0, 32)


def test_only_the_wanted_states_are_visited(tmp_path):
    ours, _ = encoder_of("bert", tmp_path)
    batch = pack_sequences([[5, 6, 7], [8, 9]])
    seen = {}
    with torch.no_grad():
        visit_states(ours, batch, [0, 3], lambda layer, state: seen.update({layer: state.clone()}))
        states = ours(batch, output_hidden_states=True).hidden_states
    assert list(seen) == [0, 3]
    for layer, state in seen.items():
        torch.testing.assert_close(state, states[layer])
    assert not any(module._forward_hooks for module in ours.modules())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"layers": (5,)}, "layers must be from 0 .* to the model's 4, .* got 5"),
        ({"layers": (-6,)}, "or -1 to -5 from the last, got -6"),
        ({"layers": (-1, 4)}, "none of them twice"),
        ({"layers": ()}, "at least one"),
        ({"combine": "max"}, "combine must be one of mean, sum, concat, last or a ScalarMix"),
        ({"combine": ScalarMix(2)}, "weight for each of the 4 layers, got one with 2"),
        ({"subwords": "all"}, "subwords must be one of first, mean, last, got 'all'"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"out": "x.txt"}, "out must be a file name that ends in .npy, got x.txt"),
    ],
)
def test_bad_input_is_named_before_any_work(tmp_path, options, message):
    ours, _ = encoder_of("bert", tmp_path)
    ours.embeddings.forward = None  # any forward fails
    with pytest.raises(ValueError, match=message):
        embed_words(ours, SENTENCES, **options)


def test_too_little_memory_and_no_tokenizer(tmp_path, monkeypatch):
    ours, _ = encoder_of("bert", tmp_path)
    monkeypatch.setattr("fastenc.models.embedding.space._free_memory", lambda: 1000)
    with pytest.raises(ValueError, match=r"17 vectors of 32 numbers need .* stream to a file"):
        ours.embed_words(SENTENCES)
    with pytest.raises(ValueError, match="got one str"):
        ours.embed_words("the dog")
    ours.tokenizer = None
    with pytest.raises(ValueError, match="needs the checkpoint"):
        ours.embed_words(SENTENCES)


def test_resolve_layers():
    assert resolve_layers((-4, -1, 0), 6) == [3, 6, 0]


def test_scalar_mix_is_the_weighted_sum_with_its_gradients():
    mix = ScalarMix(3)
    states = [torch.randn(4, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    mix.double()
    torch.testing.assert_close(
        mix(states), torch.stack(states).mean(0), msg="it begins as the mean"
    )
    with torch.no_grad():
        mix.scalars.copy_(torch.randn(3))
        mix.gamma.fill_(0.7)
    weights = np.exp(mix.scalars.detach().numpy())
    weights = 0.7 * weights / weights.sum()
    plain = sum(w * s.detach().numpy() for w, s in zip(weights, states, strict=True))
    np.testing.assert_allclose(mix(states).detach().numpy(), plain)
    parameters = (mix.scalars, mix.gamma)

    def run(scalars, gamma, *values):
        return torch.func.functional_call(mix, {"scalars": scalars, "gamma": gamma}, (values,))

    assert torch.autograd.gradcheck(run, (*parameters, *states))
    with pytest.raises(ValueError, match="weights for 3 states, got 2"):
        mix(states[:2])
    with pytest.raises(ValueError, match="num_states must be at least 1, got 0"):
        ScalarMix(0)


def test_the_command_streams_words_of_a_file(tmp_path, capsys):
    ours, _ = encoder_of("bert", tmp_path / "base")
    ours.save_pretrained(tmp_path / "base")
    (tmp_path / "x.txt").write_text("the dog, unbelievable\n\na cat sees\n")
    out = tmp_path / "words.npy"
    options = (
        "--words",
        "--layers",
        "-1",
        "--layers",
        "2",
        "--combine",
        "concat",
        "--subwords",
        "first",
    )
    text = run("embed", tmp_path / "base", tmp_path / "x.txt", "-o", out, *options)
    assert "7 word vectors of 64 numbers" in text
    words = [["the", "dog", ",", "unbelievable"], [], ["a", "cat", "sees"]]
    expected = ours.embed_words(words, layers=(-1, 2), combine="concat", subwords="first")
    np.testing.assert_allclose(np.load(out), expected.vectors, rtol=1e-5, atol=1e-6)
    assert np.load(tmp_path / "words.offsets.npy").tolist() == [0, 4, 4, 7]
    text = failure(capsys, "embed", tmp_path / "base", tmp_path / "x.txt", "-o", "x.bin", "--words")
    assert "--output must end in .npy" in text
