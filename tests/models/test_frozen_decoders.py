"""Frozen decoders: in 8 bits, and in one op for a search's next tokens."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

import fastenc
from fastenc.models import Seq2Seq
from fastenc.nn import stack
from fastenc.nn.ways import cpu_weights
from fastenc.ops import int8_products
from fastenc.reference.int8_linear import int8_linear
from tests.helpers.checkpoints import close, save
from tests.helpers.encoder_decoders import both_batches
from tests.helpers.families import ENCODER_DECODERS, whole

pytestmark = pytest.mark.skipif(
    not cpu_weights.packed_is_faster(), reason="this processor has no vector kernels"
)
needs_int8 = pytest.mark.skipif(
    not int8_products.has_int8_products(), reason="this processor does not multiply 8 bits"
)
FAMILIES = pytest.mark.parametrize("family", ENCODER_DECODERS)
DTYPES = pytest.mark.parametrize("dtype", [None, pytest.param("int8", marks=needs_int8)])
OPS = {None: "decoder_layers", "int8": "int8_decoder_layers"}


def relative_error(actual, expected):
    return float((actual - expected).norm() / expected.norm())


def products_of_rows(x, weight, bias=None):
    return int8_linear(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])


@needs_int8
@FAMILIES
def test_logits_in_8_bits_are_transformers_with_the_formulas_products(
    family, tmp_path, monkeypatch
):
    monkeypatch.setattr(int8_products, "attends_in_bfloat16", lambda: False)
    theirs = whole(family).eval()
    ours = Seq2Seq.from_pretrained(save(theirs, tmp_path))
    padded, (batch, target, _) = both_batches(family)
    real = padded.pop("labels") != -100
    padded["decoder_input_ids"] = torch.zeros(real.shape, dtype=torch.long)
    padded["decoder_input_ids"][real] = target.input_ids
    with torch.no_grad():
        exact = theirs(**padded).logits[real]
        monkeypatch.setattr(F, "linear", products_of_rows)
        formula = theirs(**padded).logits[real]
        monkeypatch.undo()
        fastenc.freeze(ours, dtype="int8")
        logits = ours(batch, target).logits
    assert relative_error(logits, exact) > 1e-4
    # A value that rounds otherwise in front of a product moves by a step of 8 bits.
    assert relative_error(logits, formula) < 0.02
    assert relative_error(logits, exact) < 0.08


@DTYPES
@FAMILIES
@pytest.mark.parametrize("beams", [1, 3])
def test_next_tokens_in_one_op_are_those_of_the_layers(family, dtype, beams, tmp_path, monkeypatch):
    ours = Seq2Seq.from_pretrained(save(whole(family), tmp_path))
    fastenc.freeze(ours, dtype=dtype)
    _, (batch, target, _) = both_batches(family)
    start = int(target.input_ids[0])
    op, calls, logits = getattr(torch.ops.fastenc, OPS[dtype]), [], []
    monkeypatch.setattr(
        torch.ops.fastenc, OPS[dtype], lambda *given: (calls.append(1), op(*given))[1]
    )
    plain_logits = ours.logits
    ours.logits = lambda hidden: (logits.append(plain_logits(hidden)), logits[-1])[1]

    def generated():
        logits.clear()
        tokens = ours.generate_ids(
            batch,
            num_beams=beams,
            max_new_tokens=20,
            min_new_tokens=18,
            decoder_start_token_id=start,
        )
        return tokens, [each.clone() for each in logits]

    tokens, in_one_op = generated()
    assert len(calls) >= 17  # all but the first tokens
    monkeypatch.setattr(stack, "decode_tokens", lambda *given: None)
    of_layers, layer_by_layer = generated()
    assert tokens == of_layers
    for one, other in zip(in_one_op, layer_by_layer, strict=True):
        close(one, other, atol=1e-5)


@needs_int8
@pytest.mark.parametrize("family", ["t5-gated", "bart", "marian"])
def test_loaded_in_8_bits_it_computes_as_frozen(family, tmp_path):
    theirs = whole(family)
    if family == "t5-gated":  # an output layer of its own
        theirs.lm_head.weight = torch.nn.Parameter(torch.randn_like(theirs.lm_head.weight))
    frozen = fastenc.freeze(Seq2Seq.from_pretrained(save(theirs, tmp_path)), dtype="int8")
    loaded = Seq2Seq.from_pretrained(tmp_path, dtype="int8")
    _, (batch, target, labels) = both_batches(family)

    @torch.no_grad()
    def results(model):
        ids = model.generate_ids(batch, num_beams=2, max_new_tokens=8)
        return model(batch, target).logits, model(batch, target, labels).loss, ids

    *expected, ids = results(frozen)
    for each in (loaded, copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        *actual, other_ids = results(each)
        assert all(map(torch.equal, actual, expected)) and other_ids == ids
    dropped = dict(frozen.named_parameters()).keys() - dict(loaded.named_parameters()).keys()
    # Four products of an encoder's layer, seven of a decoder's.
    assert len(dropped) == 4 * len(loaded.encoder.layers) + 7 * len(loaded.decoder.layers)
    for refused in (
        loaded.train,
        loaded.state_dict,
        lambda: fastenc.unfreeze(loaded),
        lambda: loaded.to("meta"),
    ):
        with pytest.raises(ValueError, match="load it without dtype"):
            refused()
    assert results(loaded)[2] == ids


@needs_int8
def test_what_ends_a_freeze_ends_that_of_the_output_layer(tmp_path):
    ours = Seq2Seq.from_pretrained(save(whole("bart"), tmp_path))
    hidden = torch.randn(3, ours.config.hidden_size)
    with torch.no_grad():
        exact = ours.logits(hidden)
        in_8_bits = fastenc.freeze(ours, dtype="int8").logits(hidden)
        assert 0 < relative_error(in_8_bits, exact) < 0.05
        for end in (fastenc.freeze, fastenc.unfreeze, lambda model: model.train().eval()):
            fastenc.freeze(ours, dtype="int8")
            end(ours)
            assert torch.equal(ours.logits(hidden), exact)
        fastenc.freeze(ours, dtype="int8")
    ours.logits(hidden).sum().backward()
    assert torch.equal(ours.logits(hidden), exact)


@needs_int8
def test_an_output_layer_that_is_not_finite_is_refused(tmp_path):
    ours = Seq2Seq.from_pretrained(save(whole("bart"), tmp_path))
    with torch.no_grad():
        ours.output_weight()[3, 4] = torch.inf
    with pytest.raises(
        ValueError, match=r"the output layer .* cannot run in int8: .* has NaN, infinity"
    ):
        fastenc.freeze(ours, dtype="int8")
    assert not ours.encoder.frozen.in_8_bits


@needs_int8
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_patched_whole_model_in_8_bits(family, tmp_path):
    theirs = whole(family).eval()
    ours = fastenc.freeze(Seq2Seq.from_pretrained(save(theirs, tmp_path)), dtype="int8")
    padded, (batch, target, labels) = both_batches(family)
    real = padded["labels"] != -100
    with torch.no_grad():
        exact = theirs(**padded).logits[real]
        patched = fastenc.freeze(fastenc.patch(theirs), dtype="int8")(**padded)
        loss = ours(batch, target, labels).loss
    close(patched.loss, loss, atol=1e-5)
    assert 1e-4 < relative_error(patched.logits[real], exact) < 0.05


@pytest.fixture
def call(tmp_path, monkeypatch):
    """The op, and its arguments in a step of a decoder of two layers."""
    ours = fastenc.freeze(Seq2Seq.from_pretrained(save(whole("t5"), tmp_path)))
    op, seen = torch.ops.fastenc.decoder_layers, []
    noting = lambda *given: (seen.append(given), op(*given))[1]
    monkeypatch.setattr(torch.ops.fastenc, "decoder_layers", noting)
    ours.generate_ids(both_batches("t5")[1][0], max_new_tokens=2, num_beams=2)
    monkeypatch.undo()
    clone = lambda value: value.clone() if isinstance(value, torch.Tensor) else value
    return op, *(
        list(map(clone, each)) if isinstance(each, list) else clone(each) for each in seen[0]
    )


def test_the_op_passes_opcheck(call):
    op, *arguments = call
    torch.library.opcheck(
        op.default, tuple(arguments), test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize(
    "place, change, message",
    [
        (0, lambda x: x.double(), "contiguous float32"),
        (2, lambda caches: caches[:1], "a cache and a source for each layer"),
        (2, lambda caches: [each[:, :1] for each in caches], "the cache has no room for a token"),
        (3, lambda length: 16, "the cache has no room for a token"),
        (4, lambda sources: [each[:-1] for each in sources], "cu_seqlens must run from 0"),
        (5, lambda offsets: torch.tensor([0, 5, 12, 44]), "cu_seqlens must be int32"),
        (8, lambda layers: layers + 1, "a cache and a source for each layer"),
        (10, lambda integers: integers[:-1], "fewer arguments than its layers have"),
    ],
)
def test_the_op_refuses_other_arguments(place, change, message, call):
    op, *arguments = call
    arguments[place] = change(arguments[place])
    with pytest.raises(RuntimeError, match=message):
        op(*arguments)
