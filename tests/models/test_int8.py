"""Models in 8 bits: how they are asked for, what they refuse, how near they are to float32."""

import copy
import gzip

import pytest
import torch
import torch.nn.functional as F

import fastenc
from fastenc.demo.checkpoint import minilm_folder
from fastenc.models import Encoder, SequenceClassifier
from fastenc.ops import int8_products, library
from tests.helpers.checkpoints import packed, save
from tests.helpers.families import ENCODERS, model, padded_batch

pytestmark = pytest.mark.skipif(
    not int8_products.has_int8_products(), reason="this processor does not multiply 8 bits"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(model("bert"), tmp_path_factory.mktemp("bert"))


def hidden(encoder, batch):
    with torch.no_grad():
        return encoder(batch).last_hidden_state


def nearness(quantized, expected):
    return float(F.cosine_similarity(quantized, expected, dim=-1).min())


@pytest.mark.parametrize("family", ENCODERS)
def test_every_family_in_both_forms(family, tmp_path):
    theirs = model(family)
    batch = padded_batch(family, (12, 30, 7))
    encoder = Encoder.from_pretrained(save(theirs, tmp_path))
    exact = hidden(encoder, packed(batch))
    assert fastenc.freeze(encoder, dtype="int8") is encoder
    quantized = hidden(encoder, packed(batch))
    assert not torch.equal(quantized, exact) and nearness(quantized, exact) > 0.97
    loaded = Encoder.from_pretrained(tmp_path, dtype="int8")
    assert torch.equal(hidden(loaded, packed(batch)), quantized)
    patched = fastenc.freeze(fastenc.patch(copy.deepcopy(theirs)), dtype="int8")
    with torch.no_grad():
        states = patched(**batch)[0][batch["attention_mask"].bool()]
    assert torch.equal(states, quantized)


@pytest.mark.filterwarnings("ignore:.*:Warning:(sentence_transformers|transformers)")
def test_models_of_sentence_transformers(tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    transformers = pytest.importorskip("transformers")
    texts = ["A bank lends money.", "A river bank was muddy.", "Third"]
    bi = sentence_transformers.SentenceTransformer(str(minilm_folder()), device="cpu")
    exact = bi.encode(texts, convert_to_tensor=True)
    assert fastenc.freeze(fastenc.patch(bi), dtype="int8") is bi
    quantized = bi.encode(texts, convert_to_tensor=True)
    assert not torch.equal(quantized, exact) and nearness(quantized, exact) > 0.99

    head = transformers.AutoModelForSequenceClassification.from_pretrained(
        minilm_folder(), num_labels=1
    )
    head.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(minilm_folder()).save_pretrained(tmp_path)
    cross = sentence_transformers.CrossEncoder(str(tmp_path), device="cpu")
    pairs = [(texts[0], text) for text in texts]
    exact = cross.predict(pairs, convert_to_tensor=True)
    fastenc.freeze(fastenc.patch(cross), dtype="int8")
    quantized = cross.predict(pairs, convert_to_tensor=True)
    assert not torch.equal(quantized, exact)
    torch.testing.assert_close(quantized, exact, atol=0.01, rtol=0)
    fastenc.unfreeze(cross)
    unfrozen = cross.predict(pairs, convert_to_tensor=True)
    torch.testing.assert_close(unfrozen, exact, atol=1e-5, rtol=0)


def test_torch_compile_computes_the_same(folder):
    loaded, batch = Encoder.from_pretrained(folder, dtype="int8"), packed(padded_batch("bert"))
    assert torch.equal(hidden(torch.compile(loaded, backend="eager"), batch), hidden(loaded, batch))


def test_its_weights_take_a_quarter_of_float32s(tmp_path):
    save(model("bert", hidden_size=384, intermediate_size=1536, num_attention_heads=12), tmp_path)
    plain = Encoder.from_pretrained(tmp_path)
    loaded = Encoder.from_pretrained(tmp_path, dtype="int8")
    names = {name for name, _ in plain.named_parameters()}
    dropped = names - {name for name, _ in loaded.named_parameters()}
    assert len(dropped) == 4 * len(plain.layers)
    floats = sum(p.numel() for name, p in plain.named_parameters() if name in dropped)
    ours = [each.int8 for each in loaded.frozen._copies]
    in_8_bits = sum(t.numel() for each in ours for t in each if isinstance(t, torch.Tensor))
    assert floats < in_8_bits < 1.025 * floats  # bytes: 1 for a weight, and scales
    # No parameter keeps the whole file in memory.
    for parameter in loaded.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes


def test_a_head_in_8_bits(tmp_path):
    folder = save(model("bert", "ForSequenceClassification"), tmp_path)
    exact = SequenceClassifier.from_pretrained(folder)
    loaded = SequenceClassifier.from_pretrained(folder, dtype="int8")
    batch = packed(padded_batch("bert"))
    with torch.no_grad():
        logits = loaded(batch).logits
        assert not torch.equal(logits, exact(batch).logits)
        torch.testing.assert_close(logits, exact(batch).logits, atol=0.05, rtol=0.05)


def texts_of_stsb(data_dir, every):
    """Every so many sentences of the test set."""
    with gzip.open(data_dir / "stsb" / "en_test.tsv.gz", "rt", encoding="utf-8") as file:
        first, *rows = (line.rstrip("\n").split("\t") for line in file)
    columns = [first.index(name) for name in ("sentence1", "sentence2")]
    return [row[column] for row in rows for column in columns][::every]


@pytest.mark.parametrize("attention", ["float32", "bfloat16"])
def test_vectors_of_real_texts(attention, data_dir, monkeypatch):
    if attention == "bfloat16" and not library._C.build_info()["bfloat16_panels"]:
        pytest.skip("this processor has no AVX512-BF16")
    in_bfloat16 = attention == "bfloat16"
    monkeypatch.setattr(int8_products, "attends_in_bfloat16", lambda: in_bfloat16)
    texts = texts_of_stsb(data_dir, 8)
    exact, quantized = (
        Encoder.from_pretrained(minilm_folder(), dtype=dtype).encode(texts)
        for dtype in (torch.float32, "int8")
    )
    cosines = (exact * quantized).sum(1)
    assert cosines.min() > 0.99 and cosines.mean() > 0.998


class InProducts(torch.nn.Module):
    """A linear layer in 8 bits whose inputs are multiplied, and its weights divided, by factors."""

    def __init__(self, linear, factors):
        super().__init__()
        self.bias, self.columns, self.factors = linear.bias, linear.out_features, factors
        self.packed = int8_products.pack_int8(linear.weight / factors)

    def forward(self, x):
        rows = (x * self.factors).flatten(0, -2)
        y = int8_products.int8_linear(rows, self.packed, self.bias, self.columns)
        return y.unflatten(0, x.shape[:-1])


@torch.no_grad()
def test_channels_that_stick_out(data_dir):
    """Larger models have such channels by themselves. Here two of each norm's output are 32 times as large."""
    transformers = pytest.importorskip("transformers")
    exact = transformers.AutoModel.from_pretrained(minilm_folder())
    changed, none = copy.deepcopy(exact), torch.ones(384)
    for layer in changed.encoder.layer:
        attention, factors = layer.attention.self, none.clone()
        factors[torch.randperm(384)[:2]] = 32
        for name in ("query", "key", "value"):
            setattr(attention, name, InProducts(getattr(attention, name), factors))
        layer.intermediate.dense = InProducts(layer.intermediate.dense, factors)
        layer.attention.output.dense = InProducts(layer.attention.output.dense, none)
        layer.output.dense = InProducts(layer.output.dense, torch.ones(1536))
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_folder())
    texts = sorted(texts_of_stsb(data_dir, 16), key=len)
    for start in range(0, len(texts), 32):
        batch = tokenizer(texts[start : start + 32], padding=True, return_tensors="pt")
        mask = batch["attention_mask"][..., None]
        means = [
            (m(**batch).last_hidden_state * mask).sum(1) / mask.sum(1) for m in (exact, changed)
        ]
        assert nearness(*means) > 0.97
