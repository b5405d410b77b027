import math

import pytest
import torch

from families import model, padded_batch
from fastenc.data import load_tokenizer, segment_pairs, special_tokens
from fastenc.demo.checkpoint import minilm_folder
from fastenc.models import EncoderConfig, MaskedLM
from fastenc.objectives import MlmCollator, PairCollator, PairMaskedLM
from fastenc.packing import pack
from fastenc.reference import nsp as reference
from training_run import documents

TOKENIZER = load_tokenizer(minilm_folder())
SPECIAL = special_tokens(TOKENIZER)
PAIRS = segment_pairs(documents(300), TOKENIZER, 24)


def split(batch):
    """Original (ids, types) of each packed pair."""
    lengths = batch.cu_seqlens.diff().tolist()
    return zip(batch.input_ids.split(lengths), batch.token_type_ids.split(lengths), strict=True)


def unmasked(collator, pairs, step=0):
    """The collator's result with the ids before masking."""
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
    longest = max(len(pair.ids) for pair in PAIRS)
    for pair, (ids, types), label in zip(PAIRS, split(result["batch"]), wrong, strict=True):
        parts = [*pair.first], [*pair.second]
        first, second = parts[::-1] if label and negatives == "swapped" else parts
        assert ids[0] == SPECIAL.cls and ids[-1] == ids[len(first) + 1] == SPECIAL.sep
        assert types.tolist() == [0] * (len(first) + 2) + [1] * (len(ids) - len(first) - 2)
        assert ids[1 : len(first) + 1].tolist() == first and len(ids) <= longest
        found = ids[len(first) + 2 : -1].tolist()
        if label and negatives == "random":
            sources = [d for s, d in seconds.items() if list(s[: len(found)]) == found]
            assert any(d != {pair.document} for d in sources), "not from another document"
        else:
            assert found == second
    assert not (result["labels"][result["batch"].input_ids == SPECIAL.cls] != -100).any()


def test_wrong_segments_come_from_every_other_document_alike():
    """One pair a document: each other one is drawn equally often, the own one never."""
    pairs = [pair._replace(document=place) for place, pair in enumerate(PAIRS[:5])]
    collator = PairCollator(MlmCollator(TOKENIZER), pairs)
    from random import Random

    draw, counts = Random(0), [0] * 5
    for _ in range(4000):
        chosen = collator._from_another_document(2, draw)
        counts[[pair.second for pair in pairs].index(chosen)] += 1
    assert counts[2] == 0
    assert all(abs(c - 1000) < 4 * math.sqrt(750) for p, c in enumerate(counts) if p != 2)


def test_pairs_depend_on_seed_and_step_alone():
    make = lambda seed: PairCollator(MlmCollator(TOKENIZER, seed=seed), PAIRS)
    first, again = make(0)(PAIRS[:40], 3), make(0)(PAIRS[:40], 3)
    assert torch.equal(first["batch"].input_ids, again["batch"].input_ids)
    assert torch.equal(first["pair_labels"], again["pair_labels"])
    for other in (make(0)(PAIRS[:40], 4), make(1)(PAIRS[:40], 3)):
        assert not torch.equal(first["pair_labels"], other["pair_labels"])


def test_outputs_and_loss_are_transformers(tmp_path):
    theirs = model("bert", "ForPreTraining")
    theirs.save_pretrained(tmp_path / "theirs")
    ours = PairMaskedLM.from_pretrained(tmp_path / "theirs")
    batch = padded_batch("bert")
    mask = batch["attention_mask"].bool()
    labels = torch.where(torch.rand(mask.shape) < 0.4, batch["input_ids"], -100)
    labels[~mask] = -100
    pair_labels = torch.tensor([0, 1, 1, 0])
    expected = theirs(**batch, labels=labels, next_sentence_label=pair_labels)
    packed = pack(batch["input_ids"], batch["attention_mask"], batch["token_type_ids"])
    output = ours(packed)
    close = lambda a, b, tolerance=1e-5: torch.testing.assert_close(a, b, rtol=0, atol=tolerance)
    close(output.logits, expected.prediction_logits[mask])
    close(output.pair_logits, expected.seq_relationship_logits)
    result = ours(packed, labels[mask], pair_labels=pair_labels)
    close(result.loss, expected.loss)
    plain = reference.pretraining_loss(
        output.logits.double(), labels[mask], output.pair_logits.double(), pair_labels
    )
    close(result.loss.double(), plain)
    assert result.parts.keys() == {"mlm", "pair"} and result.logits is None

    ours.zero_grad(), theirs.zero_grad()
    result.loss.backward()
    expected.loss.backward()
    close(ours.pair_head.weight.grad, theirs.cls.seq_relationship.weight.grad)
    close(ours.encoder.pooler.weight.grad, theirs.bert.pooler.dense.weight.grad)

    ours.save_pretrained(tmp_path / "ours")
    again, info = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    close(again.eval()(**batch).seq_relationship_logits, expected.seq_relationship_logits)


def test_a_masked_lm_goes_on_with_pairs(tmp_path):
    MaskedLM(
        EncoderConfig(vocab_size=97, hidden_size=32, num_layers=1, num_heads=2)
    ).save_pretrained(tmp_path)
    ours = PairMaskedLM.from_pretrained(tmp_path)
    assert 0 < ours.pair_head.weight.std() < 0.05 and not ours.encoder.pooler.weight.is_meta


def test_bad_input_is_named():
    masks = MlmCollator(TOKENIZER)
    alone = [pair for pair in PAIRS if pair.document == 3]
    with pytest.raises(ValueError, match="from another document, got pairs of one document"):
        PairCollator(masks, alone)
    PairCollator(masks, alone, "swapped")
    with pytest.raises(ValueError, match=r"negatives must be one of .* got 'shuffled'"):
        PairCollator(masks, PAIRS, "shuffled")
    config = EncoderConfig(family="roberta", vocab_size=9, hidden_size=8, num_layers=1, num_heads=1)
    with pytest.raises(ValueError, match=r"only BERT's checkpoints .* got family 'roberta'"):
        PairMaskedLM(config)
