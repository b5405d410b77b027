"""Pretraining from Python, and its options."""

import pytest
import torch

import fastenc
from fastenc.adapt import (
    Adapters,
    Lora,
    PrefixTuning,
    PromptTuning,
    add_adaptation,
    freeze_encoder,
)
from fastenc.data import LabelledData
from fastenc.models import MaskedLM
from fastenc.objectives import OBJECTIVES, MlmCollator, evaluate_objective
from fastenc.packing import pack_sequences, pack_targets
from fastenc.tasks import SequenceClassification
from fastenc.train import (
    NewModel,
    ObjectiveOptions,
    PretrainConfig,
    TrainConfig,
    Trainer,
    fine_tuning_lr,
    objective_trainer,
    task_trainer,
)
from fastenc.train.new_model import families_of
from tests.helpers.training_run import assert_bitwise_equal, documents, weights, word_tokenizer

OPTIONS = ObjectiveOptions(block_size=32, probability=0.3)
NEW = NewModel(layers=1, hidden=32)


def test_it_trains_as_a_trainer_made_by_hand(tmp_path):
    tokenizer, texts = word_tokenizer(), documents(40)
    settings = dict(max_steps=4, batch_size=4, seed=3)
    model = NEW.make(OPTIONS, tokenizer, seed=3)
    config = PretrainConfig(str(tmp_path / "door"), **settings)
    metrics = objective_trainer(OPTIONS, model, texts, config, show_progress=False).train()

    held_out = OPTIONS.pack(texts[::20], tokenizer)
    examples = OPTIONS.pack([t for i, t in enumerate(texts) if i % 20], tokenizer)
    collator = MlmCollator(tokenizer, seed=4, probability=0.3)
    trainer = Trainer(
        NEW.make(OPTIONS, tokenizer, seed=3),
        TrainConfig(str(tmp_path / "hand"), learning_rate=5e-4, **settings),
        examples,
        [len(example) for example in examples],
        MlmCollator(tokenizer, seed=3, probability=0.3),
        evaluate=lambda m: evaluate_objective(m, held_out, collator),
        show_progress=False,
    )
    assert trainer.train() == metrics
    assert_bitwise_equal(weights(tmp_path / "door"), weights(tmp_path / "hand"))


def test_what_cannot_be_trained_is_refused_before_anything_is_written(tmp_path):
    model, config = NEW.make(OPTIONS, word_tokenizer()), PretrainConfig(str(tmp_path / "x"))
    for options, texts, message in (
        (OPTIONS, documents(1), "there must be at least two documents"),
        (
            ObjectiveOptions(block_size=900),
            documents(9),
            "at most 512, the model's number of positions",
        ),
        (
            ObjectiveOptions(block_size=32, probability=1e-4),
            documents(9),
            "held-out texts must have tokens to predict, got none for loss in 1 sequences",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            objective_trainer(options, model, texts, config)
    pairs = ObjectiveOptions("mlm+nsp", block_size=32)
    with pytest.raises(ValueError, match=r"^too few held-out texts: .*got pairs of one"):
        objective_trainer(pairs, NEW.make(pairs, word_tokenizer()), documents(9), config)
    model.tokenizer = None
    with pytest.raises(ValueError, match="the model must have a tokenizer, got none"):
        objective_trainer(OPTIONS, model, documents(9), config)
    assert not (tmp_path / "x").exists()
    for options, message in (
        (dict(objective="clm"), "objective must be one of mlm"),
        (dict(packing="segment-pairs"), "packing must be one of full-sentences, doc-sentences"),
    ):
        with pytest.raises(ValueError, match=message):
            ObjectiveOptions(**options)


@pytest.mark.parametrize(("hidden", "heads"), [(384, 12), (128, 4), (768, 24), (100, 2), (16, 1)])
def test_heads_follow_from_the_width(hidden, heads):
    assert NewModel(hidden=hidden).heads == heads


def test_heads_that_cannot_share_the_width_are_refused():
    with pytest.raises(ValueError, match=r"heads must divide hidden, got 12 and 128.*or give 4"):
        NewModel(hidden=128, heads=12)


def test_there_is_one_default_learning_rate(tmp_path):
    assert PretrainConfig("runs").learning_rate == 5e-4
    model = NEW.make(OPTIONS, word_tokenizer())
    model.save_pretrained(tmp_path / "base")
    data = LabelledData(["the cat", "the dog"] * 4, [0, 1] * 4, ["a", "b"])
    task = SequenceClassification()
    trainer = task_trainer(
        task, task.load(tmp_path / "base", data), data, TrainConfig(str(tmp_path / "run"))
    )
    assert trainer.config.learning_rate == fine_tuning_lr(32) == pytest.approx(5e-5 * 768 / 32)


@pytest.mark.parametrize(
    "adaptation, settings, factor",
    [
        (Lora(2), {}, 10),
        (Adapters(2), {}, 10),
        (PrefixTuning(2), {}, 100),
        (PromptTuning(2), {}, 100),
        ("features", {}, 10),
        (None, {"max_steps": 4000}, 4**-0.32),
        (None, {"epochs": 2000, "batch_size": 2, "accumulation": 2}, 4**-0.32),
        (Lora(2), {"max_steps": 4000}, 10 * 4**-0.32),
    ],
    ids=str,
)
def test_the_default_learning_rate_is_that_of_what_is_trained(
    adaptation, settings, factor, tmp_path
):
    """5e-5 for BERT-base's width of 768 and up to 1,000 steps."""
    NEW.make(OPTIONS, word_tokenizer()).save_pretrained(tmp_path / "base")
    data = LabelledData(["the cat", "the dog"] * 4, [0, 1] * 4, ["a", "b"])
    task = SequenceClassification()
    model, features = task.load(tmp_path / "base", data), None
    if adaptation == "features":
        freeze_encoder(model)
        features = tmp_path / "features"
    elif adaptation is not None:
        add_adaptation(model, adaptation)
    config = TrainConfig(str(tmp_path / "run"), **settings)
    trainer = task_trainer(task, model, data, config, features=features)
    assert trainer.config.learning_rate == pytest.approx(5e-5 * 768 / 32 * factor)


def test_batch_tokens_count_instead_of_the_batch_size():
    assert PretrainConfig("runs", batch_tokens=100).batch_size is None


def test_dir_lists_what_is_imported_at_first_use():
    assert set(fastenc.__all__) <= set(dir(fastenc))
    assert {"Encoder", "patch"} <= set(dir(fastenc))


@pytest.mark.parametrize("family", families_of(OBJECTIVES["mlm"]))
def test_transformers_loads_a_new_model_of_every_family(family, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = word_tokenizer()
    new = NewModel(layers=2, hidden=32, dropout=0.0, family=family)
    model = new.make(OPTIONS, tokenizer).eval()
    model.save_pretrained(tmp_path)
    theirs, loading = transformers.AutoModelForMaskedLM.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager"
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    special = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    assert (theirs.config.bos_token_id, theirs.config.eos_token_id) == special
    ids = tokenizer.encode(documents(1)[0]).ids[:20]
    with torch.no_grad():
        expected = theirs.eval()(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(model(pack_sequences([ids])).logits, expected)


def test_a_new_model_has_the_dropout_and_the_positions_asked_for(tmp_path):
    transformers = pytest.importorskip("transformers")
    options = ObjectiveOptions(block_size=600)
    NewModel(layers=1, hidden=32, dropout=0.3).make(options, word_tokenizer()).save_pretrained(
        tmp_path
    )
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.hidden_dropout_prob == config.attention_probs_dropout_prob == 0.3
    assert config.max_position_embeddings == 600


def test_the_seed_decides_the_first_weights():
    first, again, other = (
        NEW.make(OPTIONS, word_tokenizer(), seed).state_dict() for seed in (1, 1, 2)
    )
    assert_bitwise_equal(first, again)
    name = "encoder.layers.0.up.weight"
    assert not torch.equal(first[name], other[name])


@pytest.mark.parametrize("family", families_of(OBJECTIVES["mlm"]))
def test_a_new_model_drops_what_its_checkpoint_drops(family, tmp_path):
    model = NewModel(layers=1, hidden=32, dropout=0.5, family=family).make(
        OPTIONS, word_tokenizer()
    )
    model.save_pretrained(tmp_path)
    batch, logits = pack_sequences([[5, 6, 7, 8]] * 4), []
    for each in (model, MaskedLM.from_pretrained(tmp_path)):
        torch.manual_seed(0)
        logits.append(each.train()(batch).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("objective", "family"),
    [(name, family) for name in ("mlm", "denoise") for family in families_of(OBJECTIVES[name])],
)
def test_a_new_model_has_the_configuration_that_a_resumed_run_reads(objective, family, tmp_path):
    options = ObjectiveOptions(objective, block_size=32)
    model = NewModel(layers=1, hidden=32, family=family).make(options, word_tokenizer())
    model.save_pretrained(tmp_path)
    assert model.config == type(model).from_pretrained(tmp_path).config


@pytest.mark.parametrize("family", families_of(OBJECTIVES["denoise"]))
def test_transformers_loads_a_new_encoder_decoder_of_every_family(family, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = word_tokenizer()
    new = NewModel(layers=2, hidden=32, dropout=0.0, family=family)
    model = new.make(ObjectiveOptions("denoise", block_size=32), tokenizer).eval()
    model.save_pretrained(tmp_path)
    theirs, loading = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager"
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    # As in the published checkpoints: the decoders of BART and M2M100 start with the end token, the others with the
    # padding token. mBART's starts with the token of a language, which this tokenizer lacks.
    start = 5
    if family != "mbart":
        start = tokenizer.token_to_id("[SEP]" if family in ("bart", "m2m_100") else "[PAD]")
        assert theirs.config.decoder_start_token_id == start
    source, labels = (tokenizer.encode(text).ids[:20] for text in documents(2))
    ids, targets = torch.tensor([source]), torch.tensor([labels])
    target, packed = pack_targets([labels], model.decoder_start_token_id)
    with torch.no_grad():
        expected = theirs.eval()(ids, labels=targets).loss
        torch.testing.assert_close(model(pack_sequences([source]), target, packed).loss, expected)
        options = {"max_new_tokens": 4, "decoder_start_token_id": start}
        (tokens,) = theirs.generate(ids, **options, do_sample=False).tolist()
        assert model.generate_ids(pack_sequences([source]), **options) == [tokens[1:]]


def test_a_new_model_has_a_known_family():
    with pytest.raises(ValueError, match=r"family must be one of bert, roberta, .* got gpt2"):
        NewModel(family="gpt2")
