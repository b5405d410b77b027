"""The encoder-decoders against transformers': logits, loss, gradients, saved files."""

from pathlib import Path

import pytest
import torch

import fastenc
from fastenc.adapt import Lora, add_adaptation
from fastenc.models import EncoderConfig, Seq2Seq
from fastenc.nn import ways
from fastenc.ops import gemm
from fastenc.packing import pack_sequences, pack_targets
from tests.helpers.checkpoints import close, save
from tests.helpers.encoder_decoders import both_batches
from tests.helpers.families import ENCODER_DECODERS, START_TOKENS, whole

FAMILIES = pytest.mark.parametrize("family", ENCODER_DECODERS)
# T5's dropout has one name, BART's has three.
NO_DROPOUT = dict(dropout_rate=0.0, dropout=0.0, attention_dropout=0.0)


@FAMILIES
@pytest.mark.parametrize("train", [False, True])
def test_logits_loss_and_gradients_are_transformers(family, train, tmp_path):
    theirs = whole(family, **NO_DROPOUT).train(train)
    ours = Seq2Seq.from_pretrained(save(theirs, tmp_path)).train(train)
    padded, (batch, target, labels) = both_batches(family)
    expected = theirs(**padded)
    expected.loss.backward()
    real = padded["labels"] != -100
    with torch.no_grad():
        close(ours(batch, target).logits, expected.logits[real], atol=1e-4)
    output = ours(batch, target, labels)
    output.loss.backward()
    close(output.loss, expected.loss, atol=1e-5)
    parameters = dict(ours.named_parameters())
    theirs_by_name = dict(theirs.named_parameters())
    for name, several in ours.family_names(with_prefix=True).items():
        if name not in parameters:  # a buffer
            continue
        for piece, of_theirs in zip(
            parameters[name].grad.chunk(len(several)), several, strict=True
        ):
            close(piece, theirs_by_name[of_theirs].grad, atol=2e-5, rtol=1e-4)


@FAMILIES
def test_what_is_written_is_what_was_read(family, tmp_path):
    theirs = whole(family)
    if family in ("mt5", "mbart"):  # an output layer of its own, and a bias
        theirs.lm_head.weight = torch.nn.Parameter(torch.randn_like(theirs.lm_head.weight))
    if family == "mbart":
        theirs.final_logits_bias.normal_()
    ours = Seq2Seq.from_pretrained(save(theirs, tmp_path / "a"))
    ours.save_pretrained(tmp_path / "b")
    again = type(theirs).from_pretrained(tmp_path / "b").state_dict()
    for name, value in theirs.state_dict().items():
        assert torch.equal(again[name], value), name
    padded, (batch, target, _) = both_batches(family)
    with torch.no_grad():
        expected = theirs(**padded).logits[padded["labels"] != -100]
        close(Seq2Seq.from_pretrained(tmp_path / "b")(batch, target).logits, expected, atol=1e-4)


@FAMILIES
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3, "length_penalty": -1.0},
        {"num_beams": 4, "early_stopping": True, "length_penalty": 0.5, "forced_bos_token_id": 7},
        {"no_repeat_ngram_size": 2, "min_new_tokens": 5, "max_new_tokens": 20},
        {"num_beams": 2, "no_repeat_ngram_size": 1, "min_new_tokens": 3},
    ],
    ids=["greedy", "beams", "options", "greedy without repetition", "beams without repetition"],
)
def test_generated_tokens_are_transformers(family, options, tmp_path):
    theirs = whole(family)
    padded, (batch, *_) = both_batches(family)
    start = 9 if START_TOKENS[family] is None else START_TOKENS[family]
    shared = {"max_new_tokens": 12, **options, "decoder_start_token_id": start}
    ours = Seq2Seq.from_pretrained(save(theirs, tmp_path))
    # A token that ends some targets early.
    free = ours.generate_ids(batch, **shared)[0]
    eos = free[len(free) // 2]
    theirs.config.eos_token_id = theirs.generation_config.eos_token_id = eos
    ours = Seq2Seq.from_pretrained(save(theirs, tmp_path))
    del padded["labels"]
    rows = [row[1:] for row in theirs.generate(**padded, **shared, do_sample=False).tolist()]
    rows = [row[: row.index(eos) + 1] if eos in row else row for row in rows]
    assert ours.generate_ids(batch, **shared) == rows
    if options and "no_repeat_ngram_size" not in options:
        assert {len(row) for row in rows} != {12}


@pytest.mark.parametrize("family", ["bart", "m2m_100"])
def test_a_generated_padding_token_has_transformers_position(family, tmp_path):
    theirs = whole(family)
    padded, (batch, *_) = both_batches(family)
    del padded["labels"]
    padding = theirs.config.pad_token_id
    options = {"max_new_tokens": 12, "forced_bos_token_id": padding}
    rows = [row[1:] for row in theirs.generate(**padded, **options, do_sample=False).tolist()]
    eos = theirs.config.eos_token_id
    rows = [row[: row.index(eos) + 1] if eos in row else row for row in rows]
    assert {row[0] for row in rows} == {padding}
    assert Seq2Seq.from_pretrained(save(theirs, tmp_path)).generate_ids(batch, **options) == rows


def test_least_new_tokens_stand_above_the_least_length(tmp_path):
    theirs = whole("bart")
    padded, (batch, *_) = both_batches("bart")
    del padded["labels"]
    theirs.generation_config.update(eos_token_id=None, forced_eos_token_id=None)
    free = theirs.generate(**padded, max_new_tokens=12, do_sample=False)[:, 1:].tolist()
    # A token that ends some targets early.
    theirs.config.eos_token_id = theirs.generation_config.eos_token_id = eos = free[2][3]
    theirs.generation_config.update(max_new_tokens=12, min_new_tokens=2, min_length=12)
    rows = [row[1:] for row in theirs.generate(**padded, do_sample=False).tolist()]
    rows = [row[: row.index(eos) + 1] if eos in row else row for row in rows]
    assert min(map(len, rows)) < 11
    assert Seq2Seq.from_pretrained(save(theirs, tmp_path)).generate_ids(batch) == rows


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("beams", [1, 3])
def test_tokens_that_no_target_has(beams, renormalize, tmp_path):
    """With the settings that OPUS-MT's checkpoints have."""
    theirs = whole("marian")
    padded, (batch, *_) = both_batches("marian")
    del padded["labels"]
    options = {"max_new_tokens": 8, "num_beams": beams}
    free = Seq2Seq.from_pretrained(save(theirs, tmp_path)).generate_ids(batch, **options)
    left_out = sorted({row[0] for row in free} | {row[3] for row in free})
    theirs.generation_config.bad_words_ids = [[token] for token in left_out]
    theirs.generation_config.renormalize_logits = renormalize
    rows = [row[1:] for row in theirs.generate(**padded, **options, do_sample=False).tolist()]
    rows = [row[: row.index(2) + 1] if 2 in row else row for row in rows]
    ours = Seq2Seq.from_pretrained(save(theirs, tmp_path))
    assert ours.generate_ids(batch, **options) == rows != free
    ours.generation_config["bad_words_ids"] = [[5, 6]]
    with pytest.raises(
        ValueError, match=r"bad_words_ids must be a list of lists of one token each"
    ):
        ours.generate_ids(batch)


@pytest.mark.parametrize("family", ["bart", "mbart", "marian", "pegasus", "m2m_100"])
def test_transformers_trains_a_new_model_likewise(family, tmp_path):
    """With config.json as it is, and the folder that transformers then writes is loaded."""
    import transformers

    architecture = EncoderConfig(family=family).architecture
    sizes = dict(vocab_size=97, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=48)
    no_dropout = dict(hidden_dropout_p=0.0, attention_dropout_p=0.0)
    settings = EncoderConfig(family=family, **architecture.new_config | sizes | no_dropout)
    ours = Seq2Seq(settings).train()
    ours.save_pretrained(tmp_path / "ours")
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours").train()
    assert theirs.config.encoder_layerdrop == theirs.config.decoder_layerdrop == 0
    labels = torch.tensor([[5, 6, 7]])
    target, packed_labels = pack_targets(labels.tolist(), ours.decoder_start_token_id)
    loss = ours(pack_sequences([[8, 9]]), target, packed_labels).loss
    close(loss, theirs(input_ids=torch.tensor([[8, 9]]), labels=labels).loss)
    theirs.save_pretrained(tmp_path / "theirs")
    Seq2Seq.from_pretrained(tmp_path / "theirs")


def test_generation_config_gives_the_defaults_and_is_saved(tmp_path):
    theirs = whole("bart")
    settings = {"num_beams": 3, "max_length": 9, "min_length": 4, "no_repeat_ngram_size": 2}
    settings |= {"early_stopping": True, "length_penalty": 2.0, "forced_bos_token_id": 7}
    theirs.generation_config.update(**settings, decoder_start_token_id=4, forced_eos_token_id=3)
    padded, (batch, *_) = both_batches("bart")
    del padded["labels"]
    ours = Seq2Seq.from_pretrained(save(theirs, tmp_path / "a"))

    def rows(**options):
        ids = theirs.generate(**padded, **options, do_sample=False)[:, 1:].tolist()
        ends = ((row.index(2) + 1 if 2 in row else len(row)) for row in ids)
        return [
            [token for token in row[:end] if token != 1] for row, end in zip(ids, ends, strict=True)
        ]

    expected = rows()
    assert ours.generate_ids(batch) == expected
    assert {row[0] for row in expected} == {7}
    assert {row[-1] for row in expected} == {3}
    assert ours.generate_ids(batch, max_new_tokens=11, num_beams=1) == rows(
        max_new_tokens=11, num_beams=1, early_stopping=False, length_penalty=1.0
    )
    ours.save_pretrained(tmp_path / "b")
    again = type(theirs).from_pretrained(tmp_path / "b").generation_config
    assert again.to_diff_dict() == theirs.generation_config.to_diff_dict()
    for name, value, message in (
        ("repetition_penalty", 1.3, "repetition_penalty must not be set"),
        ("early_stopping", "never", "early_stopping must be true or false, got 'never'"),
    ):
        ours.generation_config[name] = value
        with pytest.raises(ValueError, match=f"generation_config.json: {message}"):
            ours.generate_ids(batch)
        del ours.generation_config[name]


@pytest.mark.parametrize("family", ["t5-gated", "bart", "mbart"])
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "bfloat16"])
def test_loss_and_gradients_in_bfloat16(family, autocast, tmp_path):
    """At most twice as far from float32 as transformers', and a rounding step; all gradients are one vector, because
    the error of a single small one is chance."""
    theirs = whole(family, **NO_DROPOUT).train()
    ours = Seq2Seq.from_pretrained(save(theirs, tmp_path)).train()
    padded, packed = both_batches(family)
    names = {
        key: several[0] for key, several in ours.family_names(True).items() if len(several) == 1
    }

    def results(model, loss, parameters):
        model.zero_grad()
        loss = loss()
        loss.backward()
        gradients = [p.grad.float().flatten() for p in parameters.values()]
        return loss.detach(), torch.cat(gradients)

    def both():
        of_theirs = dict(theirs.named_parameters(remove_duplicate=False))
        of_ours = dict(ours.named_parameters())
        kept = [name for name in names if name in of_ours]
        pairs = (
            (ours, lambda: ours(*packed).loss, {name: of_ours[name] for name in kept}),
            (theirs, lambda: theirs(**padded).loss, {n: of_theirs[names[n]] for n in kept}),
        )
        return [results(*pair) for pair in pairs]

    _, truth = both()
    if not autocast:
        ours, theirs = ours.bfloat16(), theirs.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        mine, peers = both()
    far = lambda value, true: (value.float() - true).norm() / true.norm()
    for value, peer, true in zip(mine, peers, truth, strict=True):
        assert far(value, true) <= 2 * far(peer, true) + 2**-8


@pytest.mark.parametrize("family", ["t5-gated", "bart", "mbart"])
def test_every_way_of_a_decoder_layer_computes_the_same(family, tmp_path, monkeypatch):
    ours = Seq2Seq.from_pretrained(save(whole(family), tmp_path))
    _, (batch, target, labels) = both_batches(family)

    def gradients():
        ours.train().zero_grad()
        torch.manual_seed(0)
        loss = ours(batch, target, labels, label_smoothing=0.1).loss
        loss.backward()
        return [loss, *(p.grad.clone() for p in ours.parameters())]

    def first_way():
        reasons = ours.decoder.layer_ways()[0]
        return next(way for way, reason in reasons.items() if reason is None)

    fused = gradients()
    assert first_way() == "fused sublayers"
    ours.eval()
    with torch.no_grad():
        assert first_way() == "CPU inference"
        packed = ours(batch, target).logits
        frozen = fastenc.freeze(ours)(batch, target).logits
        fastenc.unfreeze(ours)
        monkeypatch.setattr(ways, "WAYS", ways.WAYS[-1:])
        single = ours(batch, target).logits
    close(packed, single, atol=1e-4)
    close(frozen, single, atol=1e-4)
    for one, other in zip(fused, gradients(), strict=True):
        close(one, other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["t5-gated", "bart"])
def test_frozen_weights_of_bfloat16_give_the_same(family, tmp_path):
    ours = Seq2Seq.from_pretrained(save(whole(family), tmp_path), dtype=torch.bfloat16).eval()
    _, (batch, target, _) = both_batches(family)

    @torch.no_grad()
    def results():
        ids = ours.generate_ids(batch, num_beams=3, max_new_tokens=12)
        return ours(batch, target).logits.float(), ids

    plain = results()
    fastenc.freeze(ours)
    frozen = results()
    if gemm.multiplies_pairs():
        assert torch.equal(plain[0], frozen[0]) and plain[1] == frozen[1]
    else:
        close(plain[0], frozen[0], atol=0.05)


def test_texts_in_batches_give_what_each_text_gives(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<pad>", "</s>", *"abcd"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model_ = Seq2Seq.from_pretrained(save(whole("t5", vocab_size=6), tmp_path))
    with pytest.raises(ValueError, match="must have a tokenizer"):
        model_.generate("a b")
    model_.tokenizer = tokenizer
    texts = ["a b c", "d a", "a b c d a b"]
    several = model_.generate(texts, max_new_tokens=4, num_beams=2, batch_size=2)
    assert several == [model_.generate(text, max_new_tokens=4, num_beams=2) for text in texts]
    with pytest.raises(ValueError, match="num_beams must be at least 1, got 0"):
        model_.generate(texts, num_beams=0)


def test_buckets_that_a_decoder_cannot_have(tmp_path):
    """transformers' formula for the distances that share a bucket decreases then."""
    theirs = whole("t5", relative_attention_num_buckets=32, relative_attention_max_distance=16)
    message = "max_distance must be more than half of relative_attention_num_buckets, got 16 and 32"
    with pytest.raises(ValueError, match=message):
        Seq2Seq.from_pretrained(save(theirs, tmp_path))
    with pytest.raises(ValueError, match=message):
        fastenc.patch(theirs)


def test_errors():
    with pytest.raises(ValueError, match="target 1 has none"):
        pack_targets([[1], []], 0)
    with pytest.raises(ValueError, match="got -100 at 0 of target 0: leave it out"):
        pack_targets([[-100, 1]], 0)
    ours = Seq2Seq(EncoderConfig.from_hf(whole("bart").config.to_dict()))
    source, (target, labels) = pack_sequences([[5, 6], [7]]), pack_targets([[5, 2]], 2)
    with pytest.raises(ValueError, match="one sequence for each of the source's 2, got 1"):
        ours(source, target)
    with pytest.raises(ValueError, match=r"labels must have shape \(2,\)"):
        ours(pack_sequences([[5]]), target, labels[:1])
    with pytest.raises(ValueError, match="at most 40 tokens, the model's positions, got 41"):
        ours.generate_ids(source, max_new_tokens=41)
    with pytest.raises(ValueError, match="at most 40 tokens, the model's positions, got 41"):
        ours(pack_sequences([[5]]), *pack_targets([[5] * 41], 2))
    for part in (ours, ours.encoder):
        with pytest.raises(ValueError, match="got an encoder-decoder or its encoder: train"):
            add_adaptation(part, Lora())
    with pytest.raises(ValueError, match="layer_mix must not be set for an encoder-decoder"):
        Seq2Seq.check_task(Path(), ours.config.to_hf() | {"layer_mix": True})
    with pytest.raises(ValueError, match=r"must be of one of the families .* got 'bert'"):
        Seq2Seq(EncoderConfig(num_layers=1, hidden_size=32, num_heads=2))
