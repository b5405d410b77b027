"""DeBERTa's enhanced mask decoder, beside its formula with transformers' layers, and in checkpoints."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fastenc.models import EncoderConfig, MaskedLM
from fastenc.nn.layer import run_single_ops, run_with_queries
from fastenc.nn.layer_call import LayerCall
from fastenc.nn.layer_inputs import LayerState
from fastenc.packing import pack
from tests.helpers.families import config, model, padded_batch

TABLE = "deberta.embeddings.position_embeddings.weight"


def original_files(family, folder):
    """transformers' model and its folder, to which the position table of the published files is added; the table."""
    theirs = model(family, "ForMaskedLM", legacy=False)
    theirs.save_pretrained(folder)
    table = torch.randn(40, 32)
    weights = load_file(folder / "model.safetensors") | {TABLE: table}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return theirs, table


def decoded(theirs, table, batch):
    """The formula: the last layer twice, with queries that begin as its input plus the positions."""
    base, mask = theirs.deberta, batch["attention_mask"]
    hidden = base(**batch, output_hidden_states=True).hidden_states[-2]
    queries = hidden + table[: hidden.shape[1]]
    encoder = base.encoder
    for _ in range(2):
        queries = encoder.layer[-1](
            hidden,
            encoder.get_attention_mask(mask),
            query_states=queries,
            relative_pos=encoder.get_rel_pos(hidden),
            rel_embeddings=encoder.get_rel_embedding(),
        )[0]
    return theirs.lm_predictions(queries, base.embeddings.word_embeddings)[mask.bool()]


def test_predictions_and_gradients_are_the_formulas(tmp_path):
    theirs, table = original_files("deberta-v2", tmp_path)
    batch, table = padded_batch("deberta-v2"), table.requires_grad_()
    packed = pack(batch["input_ids"], batch["attention_mask"])
    ours = MaskedLM.from_pretrained(tmp_path, mask_decoder=True)
    logits, expected = ours(packed).logits, decoded(theirs, table, batch)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=3e-5)
    upstream = torch.randn_like(expected)
    logits.backward(upstream)
    expected.backward(upstream)
    layer, own = theirs.deberta.encoder.layer[-1].attention.self, ours.encoder.layers[-1]
    of_queries = own.qkv.weight.grad[:32]
    for a, b in (
        (ours.mask_positions.weight.grad, table.grad),
        (of_queries, layer.query_proj.weight.grad),
        (ours.encoder.embeddings.word.weight.grad, theirs.get_input_embeddings().weight.grad),
    ):
        assert b.norm() > 0 and (a - b).norm() < 1e-4 * b.norm()


def test_saved_models_decode_again_and_transformers_reads_them(tmp_path):
    _, table = original_files("deberta", tmp_path / "original")
    ours = MaskedLM.from_pretrained(tmp_path / "original", mask_decoder=True)
    assert torch.equal(ours.mask_positions.weight, table)
    ours.save_pretrained(tmp_path / "saved")
    batch = padded_batch("deberta")
    packed = pack(batch["input_ids"], batch["attention_mask"])
    with torch.no_grad():
        expected = ours(packed).logits
        assert torch.equal(MaskedLM.from_pretrained(tmp_path / "saved")(packed).logits, expected)
        plain = MaskedLM.from_pretrained(tmp_path / "saved", mask_decoder=False)
        theirs, info = transformers.DebertaForMaskedLM.from_pretrained(
            tmp_path / "saved", output_loading_info=True
        )
        assert not info["missing_keys"] and not info["unexpected_keys"]
        without = theirs.eval()(**batch).logits[batch["attention_mask"].bool()]
    torch.testing.assert_close(plain(packed).logits, without, rtol=1e-5, atol=3e-5)
    assert (without - expected).abs().max() > 0.1


@pytest.mark.parametrize("family", ["deberta", "deberta-v2"])
def test_with_its_own_input_as_queries_it_is_the_layer(family, tmp_path):
    """That of version 1 too, whose layer in transformers takes no queries."""
    original_files(family, tmp_path)
    encoder = MaskedLM.from_pretrained(tmp_path).encoder
    batch, calls = padded_batch(family), []
    keep = lambda number, x, inputs: calls.append((x, inputs))
    with torch.no_grad():
        encoder(pack(batch["input_ids"], batch["attention_mask"]), visit_input=keep)
        x, inputs = calls[-1]
        weights = encoder.layers[-1].weights()
        layer_call = LayerCall(LayerState(x, x), inputs, weights, encoder.stack.layers[-1])
        torch.testing.assert_close(run_with_queries(layer_call, x), run_single_ops(layer_call).x)


def test_what_has_no_decoder_says_so(tmp_path):
    new = lambda family, **changes: EncoderConfig.from_hf(config(family, **changes).to_dict())
    with pytest.raises(ValueError, match=r"mask_decoder is for a DeBERTa .* got family 'bert'"):
        MaskedLM(new("bert"), mask_decoder=True)
    with pytest.raises(ValueError, match="needs embeddings of the layers' width 32, got 16"):
        MaskedLM(new("deberta-v2", embedding_size=16), mask_decoder=True)
    model("deberta-v2", "ForMaskedLM").save_pretrained(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"^mask_decoder needs .* lacks embeddings\.position_embeddings\.weight: leave",
    ):
        MaskedLM.from_pretrained(tmp_path, mask_decoder=True)


def test_the_loss_is_that_of_the_labelled_tokens(tmp_path):
    original_files("deberta-v2", tmp_path)
    batch = padded_batch("deberta-v2")
    packed = pack(batch["input_ids"], batch["attention_mask"])
    ours = MaskedLM.from_pretrained(tmp_path, mask_decoder=True).eval()
    labels = packed.input_ids.where(torch.arange(packed.total_tokens) % 7 == 3, -100)
    expected = torch.nn.functional.cross_entropy(ours(packed).logits, labels)
    torch.testing.assert_close(ours(packed, labels).loss, expected)
