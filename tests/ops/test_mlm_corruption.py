import pytest
import torch
from tokenizers import Tokenizer, models

from fastenc.objectives import MlmCorruption, count_tokens
from fastenc.objectives.mlm_corruption import alias_table
from fastenc.ops import mlm_corruption
from fastenc.packing import pack_sequences
from fastenc.reference.dropout import philox
from fastenc.text import special_tokens
from tests.helpers.mlm_corruption import check_shares, tables, within

VOCABULARY = 8000
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(5, VOCABULARY))]
TOKENIZER = Tokenizer(
    models.WordPiece({piece: n for n, piece in enumerate(PIECES)}, unk_token="[UNK]")
)
SPECIAL = special_tokens(TOKENIZER)


def sequences(count=1500, length=128):
    body = torch.randint(1996, 5000, (count, length - 2))
    return [[SPECIAL.cls, *row, SPECIAL.sep] for row in body.tolist()]


@pytest.mark.parametrize("replacement", ["uniform", "unigram"])
def test_selection_and_corruption_have_the_papers_shares(replacement):
    data = sequences()
    counts = count_tokens(data, VOCABULARY)
    corruption = MlmCorruption(TOKENIZER, replacement=replacement, unigram_counts=counts)
    batch = pack_sequences(data)
    result, labels = corruption(batch, corruption.step_seed(0, 0))
    check_shares(batch.input_ids, result.input_ids, labels, SPECIAL, VOCABULARY, replacement)


def test_seeds_steps_and_places_draw_independently():
    corruption = MlmCorruption(TOKENIZER)
    batch = pack_sequences([[2500] * 100_000])
    select = lambda seed, step: corruption(batch, corruption.step_seed(seed, step))[1] != -100
    selected = {index: select(*index) for index in ((0, 0), (0, 1), (1, 0))}
    assert torch.equal(selected[0, 1], select(0, 1))
    pairs = [(selected[0, 0], selected[0, 1]), (selected[0, 0], selected[1, 0])]
    pairs.append((selected[0, 0][1:], selected[0, 0][:-1]))
    for first, second in pairs:
        assert within((first & second).float().mean().item(), 0.15**2, len(first))


def test_a_seed_comes_from_the_default_generator():
    corruption, batch = MlmCorruption(TOKENIZER), pack_sequences([[2500] * 1000])
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(corruption(batch)[1])
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert batch.input_ids.eq(2500).all(), "the batch is not changed"


def test_alias_table_has_the_shares_of_the_weights():
    for weights in (
        torch.tensor([1.0]),
        torch.tensor([0.0, 3, 0, 1]),
        torch.rand(500, dtype=torch.float64) ** 4,
        torch.ones(1000),
    ):
        choices, cutoffs = alias_table(weights)
        share = torch.zeros(len(weights), dtype=torch.float64)
        entries = len(cutoffs)
        share.index_add_(0, choices[:, 0], cutoffs.double() / 2**32 / entries)
        share.index_add_(0, choices[:, 1], (1 - cutoffs.double() / 2**32) / entries)
        expected = weights.double() / weights.double().sum()
        torch.testing.assert_close(share, expected, rtol=0, atol=1e-9)
        assert (share[weights == 0] == 0).all() and ((cutoffs >= 0) & (cutoffs <= 2**32)).all()


def test_philox_keeps_the_known_answers():
    # Random123's kat_vectors, "philox4x32 7".
    words = lambda *values: [torch.tensor([value]) for value in values]
    for key, counter, expected in (
        (0, [0] * 4, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (-1, [0xFFFFFFFF] * 4, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    ):
        assert [int(word) for word in philox(key, *words(*counter))] == list(expected)
        assert [int(word) for word in philox(torch.tensor([key]), *words(*counter))] == list(
            expected
        )


def test_torch_compile_full_graph_and_dynamic_shapes():
    compiled = torch.compile(mlm_corruption, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (7, 12):
        ids, seed = torch.randint(50, (tokens,)), torch.tensor([5])
        ours = compiled(ids, *tables(), 3, probability=0.5, seed=seed)
        expected = mlm_corruption(ids, *tables(), 3, probability=0.5, seed=seed)
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_bad_input_is_named():
    ids, (is_special, choices, cutoffs) = torch.arange(8), tables()
    good = dict(is_special=is_special, choices=choices, cutoffs=cutoffs, mask_token_id=3)
    for changes, message in (
        (dict(input_ids=ids.int()), r"input_ids must be int64 of shape \(total_tokens,\)"),
        (dict(input_ids=ids.view(2, 4)), r"got torch.int64 of shape \(2, 4\)"),
        (
            dict(input_ids=ids + 43),
            r"input_ids must be in \[0, 50\), got 50: is_special has one entry",
        ),
        (dict(input_ids=ids - 1), "got -1: is_special"),
        (dict(choices=choices.neg()), r"choices must be in \[0, 50\), got -"),
        (dict(choices=choices + 50), r"choices must be in \[0, 50\), got"),
        (dict(cutoffs=cutoffs - 2**33), r"cutoffs must be in \[0, 4294967297\), got -"),
        (dict(mask_token_id=50), r"mask_token_id must be in \[0, 50\), .* got 50"),
        (dict(mask_token_id=-1), r"mask_token_id must be in \[0, 50\), .* got -1"),
        (dict(probability=1.0), r"probability must be in \(0, 1\), got 1.0"),
        (dict(is_special=is_special.long()), "is_special must be torch.bool"),
        (dict(choices=choices[1:]), r"choices must be torch.int64 of shape \(48, 2\)"),
        (
            dict(choices=choices[:0], cutoffs=cutoffs[:0]),
            r"cutoffs must be torch.int64 of shape \(1,\)",
        ),
        (
            dict(seed=torch.tensor(3)),
            r"seed must be torch.int64 of shape \(1,\), got .* shape \(\)",
        ),
        (dict(impl="cpp"), "it has no C\\+\\+ kernel"),
        (dict(impl="triton"), "it runs on CUDA tensors|triton is not installed"),
    ):
        with pytest.raises(ValueError, match=message):
            mlm_corruption(**{"input_ids": ids, **good, **changes})
    with pytest.raises(ValueError, match=r"probability must be in \(0, 1\), got 0.0"):
        MlmCorruption(TOKENIZER, probability=0.0)
    with pytest.raises(ValueError, match=r"replacement must be one of .* got 'zipf'"):
        MlmCorruption(TOKENIZER, replacement="zipf")
