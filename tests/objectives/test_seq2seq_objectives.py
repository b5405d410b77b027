"""The objectives of encoder-decoders: what they pack, how often, and what they refuse."""

from collections import Counter

import pytest
import torch

from fastenc.data import full_sentence_blocks, train_tokenizer, write_store
from fastenc.data.blocks import text_of_block
from fastenc.models import Seq2Seq
from fastenc.objectives import UL2_DENOISERS, DenoiseCollator
from fastenc.text import special_tokens
from fastenc.text.special_tokens import sentinel_ids
from fastenc.train import NewModel, ObjectiveOptions, TrainConfig, objective_trainer
from tests.helpers.training_run import documents, small_model, tokenizer_of, word_tokenizer

TEXTS = [text.replace("\n", ". ").capitalize() + "." for text in documents(120)]
T5 = train_tokenizer(TEXTS, model_type="t5", vocab_size=160, show_progress=False)
BPE = train_tokenizer(TEXTS, model_type="bpe", vocab_size=300, show_progress=False)
NOISE = {"permute_sentences": False, "infilling": 0.0}


def sides(arguments, start_id):
    """The sources and the labels of a batch. The decoder's input must be the labels, shifted right."""
    source, target, labels = arguments["batch"], arguments["target"], arguments["labels"]
    split = lambda ids, batch: [e.tolist() for e in ids.split(batch.cu_seqlens.diff().tolist())]
    wanted = split(labels, target)
    assert split(target.input_ids, target) == [[start_id, *each[:-1]] for each in wanted]
    return split(source.input_ids, source), wanted


def restored(source, target, sentinels):
    """The text of a source and a target, both without special tokens at their ends."""
    spans: dict = {}
    for token in target:
        if token in sentinels:
            spans[token] = []
            continue
        spans[[*spans][-1]].append(token)
    assert [token for token in source if token in sentinels] == [*spans] == sentinels[: len(spans)]
    return [each for token in source for each in spans.get(token, [token])]


@pytest.mark.parametrize("name", ["span-corruption", "ul2"])
@pytest.mark.parametrize("tokenizer", [T5, tokenizer_of("ul2")], ids=["t5", "bert-like"])
def test_source_and_target_hold_the_text(name, tokenizer):
    options, special = ObjectiveOptions(name, block_size=40), special_tokens(tokenizer)
    blocks, begin = options.pack(TEXTS, tokenizer), list(special.begin)
    assert max(map(len, blocks)) == options.text_size(tokenizer) > 40
    collator = options.collator(tokenizer, blocks, 0, start_id=special.pad)
    modes = {tokenizer.token_to_id(mode): mode for mode in ("[R]", "[S]", "[X]")}
    drawn: Counter = Counter()
    longest = 0
    for step in range(40):
        sources, targets = sides(collator(blocks, step), special.pad)
        for ids, source, target in zip(blocks, sources, targets, strict=True):
            for side in (source, target):
                assert side[: len(begin)] == begin and side[-1] == special.sep
                longest = max(longest, len(side))
            source, target = (text_of_block(side, special) for side in (source, target))
            if name == "ul2":
                drawn[modes[source[0]]] += 1
                if modes[source[0]] == "[S]":  # the text's end alone
                    length = len(ids) - len(begin) - 1
                    assert source[-1] == target[0] and len(target) - 1 == round(0.25 * length)
                source = source[1:]
            text = restored(source, target, sentinel_ids(tokenizer))
            assert text == list(text_of_block(ids, special))
    assert longest == 40
    total = drawn.total()
    shares = Counter(mode for *_, mode in UL2_DENOISERS)
    assert shares == {"[R]": 2, "[S]": 1, "[X]": 4}
    assert all(abs(drawn[m] / total - n / 7) < 0.05 for m, n in shares.items() if total)


def test_t5s_lengths_from_a_token_store(tmp_path):
    """512 tokens of source and 114 of target, as published, for the blocks that are full."""
    store = write_store(tmp_path, {"": TEXTS}, T5, show_progress=False)
    options = ObjectiveOptions("span-corruption", block_size=512)
    examples = store.examples(options.packing, options.text_size(T5), subset="train")
    assert [len(each) for each in examples] == examples.lengths.tolist()
    in_memory = full_sentence_blocks(TEXTS, T5, 569, show_progress=False)
    assert [*map(list, examples)] == [*map(list, in_memory)]  # too few to hold some out
    full = [5] * 568 + [special_tokens(T5).sep]
    arguments = options.collator(T5, [full], 0, start_id=0)([full], 0)
    assert (arguments["batch"].total_tokens, arguments["target"].total_tokens) == (512, 114)


def test_the_default_noise_is_barts():
    """Sentences permuted, 30 % of the tokens in spans of 3 on average; the target is the whole text."""
    options, special = ObjectiveOptions("denoise", block_size=64), special_tokens(BPE)
    blocks = options.pack(TEXTS, BPE)
    collator = options.collator(BPE, blocks, 0, start_id=special.sep)
    kept = masks = tokens = moved = 0
    for step in range(10):
        sources, targets = sides(collator(blocks, step), special.sep)
        assert targets == [list(block) for block in blocks]
        for source, block in zip(sources, blocks, strict=True):
            ids = [token for token in source if token != special.mask]
            assert source[0] == special.cls and source[-1] == special.sep
            assert not Counter(ids) - Counter(block), "a token came from nowhere"
            kept, masks = kept + len(ids) - 2, masks + len(source) - len(ids)
            tokens += len(block) - 2
            moved += source[1] not in (block[1], special.mask)
    assert abs(kept / tokens - 0.7) < 0.005
    assert 0.1 < masks / tokens < 0.125  # more than 0.3 / 3, because the last span of a text is cut
    assert moved > 0.3 * 10 * len(blocks), "sentences stay where they were"


def test_each_noise_is_an_option():
    text, special = BPE.encode(TEXTS[0], add_special_tokens=False).ids, special_tokens(BPE)
    block = [special.cls, *text, special.sep]

    def source(**noise):
        return sides(DenoiseCollator(BPE, 2, **{**NOISE, **noise})([block], 0), 2)[0][0][1:-1]

    rotated = source(rotation=True)
    assert rotated != text and rotated in [text[i:] + text[:i] for i in range(len(text))]
    masked = source(token_masking=0.2)
    assert masked.count(special.mask) == round(0.2 * len(text)) and len(masked) == len(text)
    deleted = source(token_deletion=0.2)
    assert len(deleted) == len(text) - round(0.2 * len(text)) and special.mask not in deleted
    infilled = source(infilling=0.2, mean_span=2.0)
    assert len([t for t in infilled if t != special.mask]) == len(text) - round(0.2 * len(text))
    collator = DenoiseCollator(BPE, 2)
    sentences = [BPE.decode(text[a:b]) for a, b in zip(
        [0, *collator.sentence_ends(text)], collator.sentence_ends(text), strict=False)]  # fmt: skip
    assert [each.strip() for each in sentences] == [f"{s}." for s in TEXTS[0][:-1].split(". ")]
    permuted = BPE.decode(source(permute_sentences=True))
    assert sorted(permuted.split(".")) == sorted(TEXTS[0].split("."))
    marks = BPE.encode("Who?! Me... yes", add_special_tokens=False).ids
    assert [BPE.decode(marks[:end]) for end in collator.sentence_ends(marks)] == ["Who?!", "Who?! Me..."]  # fmt: skip


def first_tokens(tokenizer, count):
    return tokenizer.encode(" ".join(TEXTS), add_special_tokens=False).ids[:count]


def spans_of(source, target, marks):
    """(tokens of noise, number of spans) of a text, both sides without special tokens at their ends."""
    noise = [token for token in target if token not in marks]
    return len(noise), sum(token in marks for token in source)


def test_a_share_and_a_length_that_are_given_are_used():
    """round(length · probability) tokens of noise, in round(noise / mean_span) spans, as T5's code rounds them."""
    given = ObjectiveOptions("span-corruption", block_size=200, probability=0.3, mean_span=5.0)
    block = [*first_tokens(T5, 100), special_tokens(T5).sep]
    collator = given.collator(T5, [block], 0, start_id=0)
    sources, targets = sides(collator([block] * 4, 0), 0)
    for source, target in zip(sources, targets, strict=True):
        assert spans_of(source[:-1], target[:-1], set(sentinel_ids(T5))) == (30, 6)

    given = ObjectiveOptions("denoise", block_size=200, infilling=0.2, mean_span=8.0)
    special = special_tokens(BPE)
    block = [special.cls, *first_tokens(BPE, 100), special.sep]
    collator = given.collator(BPE, [block], 0, start_id=special.sep)
    sources, _ = sides(collator([block] * 400, 0), special.sep)
    masks = sum(source.count(special.mask) for source in sources)
    assert all(len(source) - source.count(special.mask) == 82 for source in sources)
    # 20 tokens in spans of 8 take 3 spans, the last of which is cut, or a few more.
    assert 2.5 < masks / len(sources) < 3.7


def test_the_denoisers_of_ul2_are_the_papers():
    """Table 1 of the paper: a share of noise and a mean length for each denoiser."""
    table = {
        "[R]": {(0.15, 3), (0.15, 8)},
        "[X]": {(0.5, 3), (0.5, 8), (0.15, 64), (0.5, 64)},
        "[S]": {(0.25, 75)},  # one span, at the end
    }
    block = [*first_tokens(T5, 300), special_tokens(T5).sep]
    collator = ObjectiveOptions("ul2", block_size=600).collator(T5, [block], 0, start_id=0)
    sources, targets = sides(collator([block] * 400, 0), 0)
    modes, seen = {T5.token_to_id(mode): mode for mode in table}, {mode: set() for mode in table}
    for source, target in zip(sources, targets, strict=True):
        seen[modes[source[0]]].add(spans_of(source[1:-1], target[:-1], set(sentinel_ids(T5))))
    assert seen == {
        mode: {(round(300 * share), max(1, round(300 * share / length))) for share, length in rows}
        for mode, rows in table.items()
    }


@pytest.mark.parametrize("name", ["span-corruption", "ul2", "denoise"])
def test_the_seed_and_static_reach_the_noise(name):
    tokenizer = BPE if name == "denoise" else T5
    blocks = ObjectiveOptions(name, block_size=64).pack(TEXTS[:20], tokenizer)

    def ids(step, seed=0, **options):
        given = ObjectiveOptions(name, block_size=64, **options)
        return given.collator(tokenizer, blocks, seed, start_id=0)(blocks, step)["batch"].input_ids

    assert torch.equal(ids(0), ids(0)) and not torch.equal(ids(0), ids(1))
    assert not torch.equal(ids(0), ids(0, seed=1))
    assert torch.equal(ids(0, static=True), ids(1, static=True))
    assert not torch.equal(ids(0, static=True), ids(0, seed=1, static=True))


def test_static_noise_repeats_itself():
    blocks = ObjectiveOptions("denoise", block_size=64).pack(TEXTS[:20], BPE)
    for static, same in ((True, True), (False, False)):
        collator = DenoiseCollator(BPE, 2, static=static)
        one, other = (collator(blocks, step)["batch"].input_ids for step in (0, 1))
        assert torch.equal(one, other) is same
        assert torch.equal(one, collator(blocks, 0)["batch"].input_ids)


def sentinels(count):
    tokenizer = word_tokenizer()
    tokenizer.add_special_tokens([f"<extra_id_{number}>" for number in range(count)])
    return tokenizer


def test_bad_input_is_named(tmp_path):
    words = word_tokenizer()
    spans = lambda **options: ObjectiveOptions("span-corruption", **options)
    for make, message in (
        (lambda: spans().collator(words, [], 0), "must have T5's sentinels <extra_id_0>"),
        (
            lambda: spans(block_size=64).collator(sentinels(2), [[5] * 60], 0),
            "a text of 60 tokens has up to 3 noise spans, but the tokenizer has 2 sentinels",
        ),
        (
            lambda: ObjectiveOptions("ul2").collator(sentinels(9), [], 0),
            r"the tokenizer must have the tokens of the modes \[R\], \[S\], \[X\], got none for \[R\]",
        ),
        (lambda: spans(probability=1.0).text_size(T5), r"probability must be in \(0, 1\), got 1.0"),
        (lambda: spans(mean_span=0.5).text_size(T5), "mean_span must be at least 1, got 0.5"),
        (lambda: DenoiseCollator(T5, 0), "the tokenizer has no token '<mask>'"),
        (lambda: DenoiseCollator(BPE, 2, infilling=1.0), r"infilling must be in \[0, 1\), got 1.0"),
        (lambda: DenoiseCollator(BPE, 2, mean_span=0.0), "mean_span must be positive and finite"),
        (lambda: DenoiseCollator(BPE, 2, **NOISE), "there must be some noise, got none"),
        (
            lambda: ObjectiveOptions("ul2", probability=0.3),
            "probability is an option of .*, span-corruption, got 0.3 for ul2: leave it out",
        ),
        (lambda: spans(rotation=True), "rotation is an option of denoise, got True"),
        (lambda: spans(whole_word=True), "whole_word is an option of mlm, .* for span-corruption"),
        (
            lambda: NewModel(family="bert", tokenizer="t5").make(spans(), T5),
            "family must be one of t5, .*bart.* for this objective, got bert",
        ),
        (
            lambda: NewModel(family="t5").make(ObjectiveOptions("mlm"), words),
            "family must be one of bert, .* for this objective, got t5",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    bert = small_model("mlm", tokenizer_of("ul2"))
    with pytest.raises(ValueError, match="span-corruption trains a Seq2Seq, got a MaskedLM"):
        objective_trainer(spans(block_size=32), bert, TEXTS, TrainConfig(str(tmp_path / "run")))
    # Before the texts, which are None here, are read.
    with pytest.raises(ValueError, match="must have T5's sentinels <extra_id_0>"):
        t5 = small_model("span-corruption", tokenizer_of("mlm"))
        options, config = spans(block_size=32), TrainConfig(str(tmp_path / "run"))
        objective_trainer(options, t5, None, config)  # type: ignore[arg-type]
    t5 = small_model("span-corruption", tokenizer_of("ul2"))
    with pytest.raises(ValueError, match=r"graph=True records steps .* got a Seq2Seq"):
        objective_trainer(
            spans(block_size=32), t5, TEXTS, TrainConfig(str(tmp_path / "graph"), graph=True)
        )
    bart = small_model("denoise", BPE)
    with pytest.raises(ValueError, match="block_size must be at most 64, the model's number of"):
        objective_trainer(
            ObjectiveOptions("denoise", block_size=65), bart, TEXTS, TrainConfig(str(tmp_path))
        )
    bert.save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match=r"must be of one of the families .* got 'bert'"):
        Seq2Seq.from_pretrained(tmp_path / "bert")
