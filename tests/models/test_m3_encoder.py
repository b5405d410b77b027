"""BGE-M3's three representations are those of FlagEmbedding's formulas on transformers' padded batches."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel

import fastenc
from fastenc.data import train_tokenizer
from fastenc.models import Encoder, EncoderConfig, M3Encoder, max_sim
from fastenc.models.embedding.sentence_files import SentenceSettings
from fastenc.ops.gemm import has_vectors
from fastenc.ops.int8_products import has_int8_products

# A word that comes twice has one weight, and a word of another script is unknown.
TEXTS = ["two dogs and two men play", "rain", "шахматы in the rain", "men play chess in the rain"]
WIDTH, TOKENS = 32, 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small XLM-RoBERTa in the files of the published checkpoint: sentence-transformers', and the heads in half
    precision, each an OrderedDict that FlagEmbedding wrote by torch.save."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("m3")
    config = EncoderConfig(
        97,
        WIDTH,
        2,
        2,
        48,
        40,
        family="xlm-roberta",
        type_vocab_size=1,
        pad_token_id=1,
        position_offset=2,
    )
    encoder = Encoder(config)
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    encoder.tokenizer = train_tokenizer(
        [each for each in TEXTS if each.isascii()], model_type="unigram", vocab_size=97
    )
    encoder.sentence = SentenceSettings(pooling="cls", normalize=True)
    encoder.save_pretrained(folder)
    for name, outputs in (("sparse_linear", 1), ("colbert_linear", TOKENS)):
        state = torch.nn.Linear(WIDTH, outputs).half().state_dict()
        state = type(state)({name: value.clone().cpu() for name, value in state.items()})
        torch.save(state, folder / f"{name}.pt")
    return folder


def by_the_formulas(folder):
    """(dense, sparse with token ids, multi-vectors): BGEM3FlagModel.encode, one text after the other."""
    tokenizer = Encoder.from_pretrained(folder).tokenizer
    model = AutoModel.from_pretrained(folder).eval()
    heads = [
        [each.float() for each in torch.load(folder / f"{name}.pt", weights_only=True).values()]
        for name in ("sparse_linear", "colbert_linear")
    ]
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    padded = torch.nn.utils.rnn.pad_sequence(map(torch.tensor, ids), True, padding_value=1)
    with torch.no_grad():
        states = model(input_ids=padded, attention_mask=(padded != 1).long()).last_hidden_state
        weights = F.linear(states, *heads[0]).relu()
        vectors = F.normalize(F.linear(states[:, 1:], *heads[1]), dim=-1)
    unused = {tokenizer.token_to_id(name) for name in ("<s>", "</s>", "<pad>", "<unk>")}
    sparse = []
    for row, tokens in zip(weights[..., 0].tolist(), ids, strict=True):
        found: dict[int, float] = {}
        for weight, token in zip(row, tokens, strict=False):
            if token not in unused and weight > found.get(token, 0):
                found[token] = weight
        sparse.append(found)
    dense = F.normalize(states[:, 0], dim=-1)
    return dense, sparse, [row[: len(each) - 1] for row, each in zip(vectors, ids, strict=True)]


def test_representations_are_those_of_the_formulas(folder, tmp_path):
    dense, sparse, multi_vectors = by_the_formulas(folder)
    assert any(len({*row.values()}) > 1 for row in sparse)
    model = M3Encoder.from_pretrained(folder)
    model.save_pretrained(tmp_path / "saved")
    assert not list((tmp_path / "saved").glob("*.pt"))
    for each in (model, M3Encoder.from_pretrained(tmp_path / "saved"), fastenc.freeze(model)):
        found = each.encode(TEXTS, batch_size=2)
        torch.testing.assert_close(found.dense, dense, rtol=0, atol=1e-5)
        for row, expected in zip(found.sparse, sparse, strict=True):
            ids = {each.encoder.tokenizer.token_to_id(token): w for token, w in row.items()}
            assert ids == pytest.approx(expected, abs=1e-5)
            assert [*row.values()] == sorted(row.values(), reverse=True)
        for row, expected in zip(found.multi_vectors, multi_vectors, strict=True):
            torch.testing.assert_close(row, expected, rtol=0, atol=1e-5)
    vectors = Encoder.from_pretrained(folder).encode(TEXTS)
    torch.testing.assert_close(vectors, dense, rtol=0, atol=1e-5)
    one = model.encode(TEXTS[2], multi_vectors=False)
    torch.testing.assert_close(one.dense, dense[2], rtol=0, atol=1e-5)
    assert one.sparse.keys() == found.sparse[2].keys() and one.multi_vectors is None
    assert model.encode(TEXTS, sparse=False).sparse is None
    assert model.encode([]).dense.shape == (0, WIDTH)
    torch.testing.assert_close(Encoder.from_pretrained(folder).encode(TEXTS, pooling="cls"), dense)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16"])
def test_the_heads_have_the_encoders_dtype(folder, dtype):
    found = M3Encoder.from_pretrained(folder, dtype=dtype).encode(TEXTS)
    exact = M3Encoder.from_pretrained(folder).encode(TEXTS)
    assert found.dense.dtype == found.multi_vectors[0].dtype == torch.bfloat16
    for ours, expected in zip(found.multi_vectors, exact.multi_vectors, strict=True):
        assert (ours.float() * expected).sum(1).min() > 0.98


@pytest.mark.skipif(not has_vectors(), reason="needs AVX2 or AVX-512")
def test_representations_have_the_same_bits_alone_and_in_a_batch(folder):
    """The batch has more tokens than a weight is read without packing for."""
    model = M3Encoder.from_pretrained(folder)
    together = model.encode(12 * TEXTS, batch_size=12 * len(TEXTS))
    for index, text in enumerate(TEXTS):
        alone = model.encode(text)
        assert torch.equal(alone.dense, together.dense[index])
        assert alone.sparse == together.sparse[index]
        assert torch.equal(alone.multi_vectors, together.multi_vectors[index])


@pytest.mark.skipif(not has_int8_products(), reason="this processor does not multiply 8 bits")
def test_in_8_bits_the_heads_stay_in_float32(folder):
    dense, _, multi_vectors = by_the_formulas(folder)
    model = M3Encoder.from_pretrained(folder, dtype="int8")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    found = model.encode(TEXTS)
    for ours, exact in zip(found.multi_vectors, multi_vectors, strict=True):
        assert not torch.equal(ours, exact) and (ours * exact).sum(1).min() > 0.98
    assert (found.dense * dense).sum(1).min() > 0.98
    with pytest.raises(ValueError, match=r"train\(\) needs the weights in float32"):
        model.train()
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize(
    "content, message",
    [
        (None, r"must have the heads of BGE-M3, got neither sparse_linear.safetensors nor"),
        (torch.nn.Linear(WIDTH, 1), "sparse_linear.pt must hold the tensors of a linear layer and"),
        ({"weight": torch.ones(1, WIDTH)}, "must hold weight and bias of a linear layer"),
        (torch.nn.Linear(8, 1).state_dict(), r"weight must be \(outputs, 32\).*got \(1, 8\)"),
        (torch.nn.Linear(WIDTH, 3).state_dict(), "sparse_linear must have one output, got 3"),
    ],
    ids=["no file", "a module", "no bias", "another width", "several outputs"],
)
def test_files_of_another_kind(content, message, folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "sparse_linear.pt").unlink()
    if content is not None:
        torch.save(content, tmp_path / "sparse_linear.pt")
    with pytest.raises(ValueError, match=message):
        M3Encoder.from_pretrained(tmp_path)


def test_max_sim_is_that_of_sentence_transformers():
    from sentence_transformers.util import maxsim

    torch.manual_seed(0)
    query, *documents = (torch.randn(n, 24, requires_grad=True) for n in (5, 7, 1, 30))
    lengths = torch.tensor([7, 1, 30])
    scores = max_sim(query, torch.cat(documents), lengths)
    # Its padding has the score 0, which would count in place of a negative one.
    expected = torch.cat([maxsim(query[None], each[None])[0] for each in documents])
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-4)
    for ours, theirs in zip(
        torch.autograd.grad(scores.sum(), [query, *documents]),
        torch.autograd.grad(expected.sum(), [query, *documents]),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    nothing = max_sim(query, query[:0], lengths[:0])
    assert nothing.shape == (0,) and nothing.dtype == query.dtype
    for bad in ([8, 0, 30], [7, 1, 29]):
        with pytest.raises(
            ValueError, match="lengths must be at least 1 and add up to the 38 vect"
        ):
            max_sim(query, torch.cat(documents), torch.tensor(bad))
