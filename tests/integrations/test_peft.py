"""LoRA and prefixes in the PEFT library's files: written by one library, they predict the same in the other."""

import inspect
from types import SimpleNamespace

import pytest
import torch

import fastenc
from fastenc.adapt import Lora, PrefixTuning, add_adaptation, load_adaptation, merge_adaptation
from fastenc.data import train_tokenizer
from fastenc.models import (
    Encoder,
    EncoderConfig,
    QuestionAnswerer,
    SequenceClassifier,
    TokenClassifier,
)
from fastenc.models.adapters.adaptation_methods import encoder_parts
from fastenc.ops.int8_products import has_int8_products
from fastenc.packing import pack
from fastenc.tasks import task_of
from tests.helpers.adaptations import disturb
from tests.helpers.commands import run
from tests.helpers.families import (
    ANSWERERS,
    BY_NAME,
    CLASSES,
    FAMILIES,
    dropouts,
    model,
    padded_batch,
)

peft = pytest.importorskip("peft")

HEADS = {
    "SEQ_CLS": (SequenceClassifier, "sequence-classification"),
    "TOKEN_CLS": (TokenClassifier, "token-classification"),
    "QUESTION_ANS": (QuestionAnswerer, "question-answering"),
    "FEATURE_EXTRACTION": (Encoder, None),
}
by_task = pytest.mark.parametrize("task", HEADS)
# transformers' DistilBERT takes no keys from outside.
PREFIXED = [family for family in FAMILIES if not BY_NAME[family].no_prefix]


@pytest.fixture(autouse=True)
def the_caches_older_name(monkeypatch):
    """PEFT 0.21 looks for an argument past_key_values. transformers 5.24 names it cache, and takes both names."""

    def signature(function):
        parameters = dict(inspect.signature(function).parameters)
        if "cache" in parameters:
            parameters["past_key_values"] = parameters["cache"]
        return SimpleNamespace(parameters=parameters)

    monkeypatch.setattr("peft.peft_model.inspect", SimpleNamespace(signature=signature))


def batch_of(family: str, task: str) -> dict[str, torch.Tensor]:
    """A batch, without token types where PEFT does not pass them on."""
    padded = padded_batch(family)
    if task == "QUESTION_ANS" and BY_NAME[family].no_answers:
        pytest.skip(BY_NAME[family].no_answers)
    if task in ("QUESTION_ANS", "FEATURE_EXTRACTION"):
        padded.pop("token_type_ids", None)
    return padded


@torch.no_grad()
def ours(fastencs, padded):
    output = fastencs(pack(**padded))
    return output.last_hidden_state if isinstance(fastencs, Encoder) else output.logits


@torch.no_grad()
def theirs(wrapped, padded, task):
    output, mask = wrapped.eval()(**padded), padded["attention_mask"].bool()
    if task == "SEQ_CLS":
        return output.logits
    if task == "TOKEN_CLS":
        return output.logits[mask]
    if task == "FEATURE_EXTRACTION":
        return output.last_hidden_state[mask]
    return torch.stack([output.start_logits, output.end_logits], -1)[mask]


def transformers_model(family, task, folder, **options):
    import transformers

    name = CLASSES[family] + HEADS[task][0].architecture
    return getattr(transformers, name).from_pretrained(folder, **options)


def labels(task, count=3):
    return {"num_labels": count} if task in ("SEQ_CLS", "TOKEN_CLS") else {}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "targets",
    [
        ("query", "value", "token_type", "pooler"),
        ("key", "attention_out", "up", "down", "word"),
    ],
)
def test_lora_interchanges_with_peft(family, targets, tmp_path):
    base = model(family, "ForSequenceClassification", num_labels=3)
    base.save_pretrained(tmp_path / "base")
    padded = padded_batch(family)
    # From ours to theirs.
    own = SequenceClassifier.from_pretrained(tmp_path / "base")
    known = [
        t for several in own.config.architecture.lora_targets(own.config).values() for t in several
    ]
    outside = [target for target in targets if target in encoder_parts(own.encoder.config)]
    targets = [target for target in targets if target in known] or ["qkv"]
    targets += outside
    add_adaptation(own, Lora(rank=3, alpha=5.0, targets=targets))
    disturb(own)
    expected = ours(own, padded)
    own.save_pretrained(tmp_path / "ours")
    wrapped = peft.PeftModel.from_pretrained(base, tmp_path / "ours")
    torch.testing.assert_close(theirs(wrapped, padded, "SEQ_CLS"), expected, rtol=0, atol=2e-5)
    # From theirs to ours.
    wrapped.save_pretrained(tmp_path / "theirs")
    again = SequenceClassifier.from_pretrained(tmp_path / "theirs", num_labels=3)
    torch.testing.assert_close(ours(again, padded), expected, rtol=0, atol=1e-6)


def test_loras_dropout_is_pefts(tmp_path):
    """The deviation of each logit over 2,000 rows of the same text, in a loaded and in a patched model."""
    base = model("bert", "ForSequenceClassification", num_labels=5, **dropouts("bert"))
    base.save_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(
        target_modules=["query", "value"],
        r=4,
        lora_dropout=0.4,
        init_lora_weights=False,
        task_type="SEQ_CLS",
    )
    wrapped = peft.get_peft_model(
        transformers_model("bert", "SEQ_CLS", tmp_path / "base"), settings
    ).train()
    wrapped.save_pretrained(tmp_path / "peft")
    loaded = SequenceClassifier.from_pretrained(tmp_path / "peft").train()
    rows = torch.tensor([[5, 9, 30, 11, 7, 8]]).expand(2000, -1)
    with torch.no_grad():
        wanted = wrapped(input_ids=rows).logits
        fastenc.patch(wrapped.get_base_model())
        for logits in (loaded(pack(rows)).logits, wrapped(input_ids=rows).logits):
            assert abs((logits.std(0) / wanted.std(0)).log().mean()) < 0.08


@by_task
@pytest.mark.parametrize("family", PREFIXED)
def test_prefix_interchanges_with_peft(family, task, tmp_path):
    """In both, positions begin after the prefix."""
    model(family, HEADS[task][0].architecture, **labels(task)).save_pretrained(tmp_path / "base")
    padded = batch_of(family, task)
    # From ours to theirs.
    own = HEADS[task][0].from_pretrained(tmp_path / "base")
    add_adaptation(own, PrefixTuning(4))
    disturb(own)
    expected = ours(own, padded)
    own.save_pretrained(tmp_path / "ours")
    base = transformers_model(family, task, tmp_path / "base")
    wrapped = peft.PeftModel.from_pretrained(base, tmp_path / "ours")
    torch.testing.assert_close(theirs(wrapped, padded, task), expected, rtol=0, atol=2e-5)
    # From theirs to ours.
    wrapped.save_pretrained(tmp_path / "theirs")
    again = HEADS[task][0].from_pretrained(tmp_path / "theirs")
    torch.testing.assert_close(ours(again, padded), expected, rtol=0, atol=1e-6)


def test_peft_has_no_prefix_for_distilbert(tmp_path):
    base = model("distilbert", "ForSequenceClassification")
    base.save_pretrained(tmp_path / "base")
    own = SequenceClassifier.from_pretrained(tmp_path / "base")
    add_adaptation(own, PrefixTuning(4))
    own.save_pretrained(tmp_path / "ours")
    wrapped = peft.PeftModel.from_pretrained(base, tmp_path / "ours")
    with pytest.raises(ValueError, match="does not support past key values"):
        wrapped(**padded_batch("distilbert"))


def trained_by_peft(family, task, method, folder):
    """A model over an encoder without a head. Its trained parts are saved in ``folder/peft``, without a config.json."""
    model(family).save_pretrained(folder / "base")
    base = transformers_model(family, task, folder / "base", **labels(task))
    if method == "lora":
        names = [
            BY_NAME[family].linears[name]
            for name in ("query", "value", "qkv")
            if name in BY_NAME[family].linears
        ]
        settings = peft.LoraConfig(task_type=task, target_modules=names)
    else:
        settings = peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=4)
    wrapped = peft.get_peft_model(base, settings)
    disturb(wrapped)
    wrapped.save_pretrained(folder / "peft")
    return wrapped


@by_task
@pytest.mark.parametrize(
    ("family", "method"),
    [(family, "lora") for family in ANSWERERS if not BY_NAME[family].no_head_in_peft]
    + [(family, "prefix") for family in PREFIXED],
)
def test_a_folder_of_peft_tells_its_task_and_labels(family, method, task, tmp_path):
    wrapped = trained_by_peft(family, task, method, tmp_path)
    model_class, name = HEADS[task]
    padded = batch_of(family, task)
    loaded = model_class.from_pretrained(tmp_path / "peft")
    expected = theirs(wrapped, padded, task)
    torch.testing.assert_close(ours(loaded, padded), expected, rtol=0, atol=2e-5)
    if name is None:
        with pytest.raises(ValueError, match=r"must have the head of a task, got \w*Model"):
            task_of(tmp_path / "peft")
        return
    assert task_of(tmp_path / "peft").name == name
    # Also as an encoder without the head.
    encoder = Encoder.from_pretrained(tmp_path / "peft")
    packed = pack(**padded)
    expected = loaded.encoder(packed).last_hidden_state
    assert torch.equal(encoder(packed).last_hidden_state, expected)


def test_a_folder_of_peft_of_another_task_or_with_more_than_is_computed_is_an_error(tmp_path):
    trained_by_peft("bert", "SEQ_CLS", "lora", tmp_path)
    message = r"peft was fine-tuned for another task.*begin from the model that it adapts, .*base"
    with pytest.raises(ValueError, match=message):
        TokenClassifier.from_pretrained(tmp_path / "peft")
    with pytest.raises(ValueError, match=r"peft: its head has 3 outputs.* asks for 2"):
        SequenceClassifier.from_pretrained(tmp_path / "peft", num_labels=2)
    tagger = TokenClassifier.from_pretrained(tmp_path / "base", num_labels=3)
    with pytest.raises(ValueError, match="peft was fine-tuned for another task"):
        load_adaptation(tagger, tmp_path / "peft")
    base = transformers_model("bert", "SEQ_CLS", tmp_path / "base")
    name = "embeddings.position_embeddings"
    settings = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query", name])
    peft.get_peft_model(base, settings).save_pretrained(tmp_path / "positions")
    with pytest.raises(ValueError, match=rf"has {name}.lora_embedding_A, and LoRA is added to"):
        SequenceClassifier.from_pretrained(tmp_path / "positions")


def adapted_by_peft(folder, **options):
    """BERT with LoRA, saved in ``folder/peft``."""
    model("bert").save_pretrained(folder / "base")
    base = transformers_model("bert", "SEQ_CLS", folder / "base", **labels("SEQ_CLS"))
    settings = {"target_modules": ["query", "value"], "task_type": "SEQ_CLS", **options}
    wrapped = peft.get_peft_model(base, peft.LoraConfig(**settings))
    disturb(wrapped)
    wrapped.save_pretrained(folder / "peft")
    return wrapped


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights must be one of .*got 'pissa'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights must be one of .*got 'olora'"),
        (
            {"modules_to_save": ["classifier", "word_embeddings"]},
            "another embeddings.word_embeddings.weight than the base model",
        ),
        (
            {"modules_to_save": ["classifier", "attention.output.dense"]},
            "another encoder.layer.0.attention.output.dense.weight than the base model",
        ),
        (
            {"trainable_token_indices": {"word_embeddings": [1]}},
            "trainable_token_indices must be None",
        ),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens must be None"),
        ({"layers_to_transform": [0]}, r"in all 2 layers, got .* with layers_to_transform \[0\]"),
    ],
)
@pytest.mark.filterwarnings("ignore:aLoRA is currently only supported for CAUSAL_LM")
def test_a_lora_of_peft_that_computes_more_is_an_error(options, message, tmp_path):
    adapted_by_peft(tmp_path, **options)
    with pytest.raises(ValueError, match=message):
        SequenceClassifier.from_pretrained(tmp_path / "peft")


@pytest.mark.parametrize(
    "options",
    [
        {"exclude_modules": ["value"]},
        {"exclude_modules": r".*\.key", "target_modules": ["query", "key", "value"]},
        {"layers_to_transform": [0, 1], "use_rslora": True},
        {"target_modules": r".*attention\.self\.(query|key)"},
        {"init_lora_weights": "orthogonal"},
    ],
)
def test_options_of_peft_that_select_or_scale_predict_the_same(options, tmp_path):
    wrapped, padded = adapted_by_peft(tmp_path, **options), padded_batch("bert")
    loaded = SequenceClassifier.from_pretrained(tmp_path / "peft")
    expected = theirs(wrapped, padded, "SEQ_CLS")
    torch.testing.assert_close(ours(loaded, padded), expected, rtol=0, atol=2e-5)


@pytest.mark.skipif(not has_int8_products(), reason="this processor does not multiply 8 bits")
def test_a_folder_of_peft_in_8_bits_must_be_merged(tmp_path):
    wrapped, padded = trained_by_peft("bert", "SEQ_CLS", "lora", tmp_path), padded_batch("bert")
    with pytest.raises(ValueError, match=r"layer 0 .*must be merged into its weights first"):
        SequenceClassifier.from_pretrained(tmp_path / "peft", dtype="int8")
    model = SequenceClassifier.from_pretrained(tmp_path / "peft")
    merge_adaptation(model)
    fastenc.freeze(model, dtype="int8")
    expected = theirs(wrapped, padded, "SEQ_CLS")
    assert not torch.equal(ours(model, padded), expected)
    torch.testing.assert_close(ours(model, padded), expected, rtol=0, atol=0.05)


def test_a_folder_of_peft_predicts_from_the_command_line(tmp_path):
    texts = ["good film", "bad book", "the song is sad"]
    encoder = Encoder(
        EncoderConfig(60, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=48)
    )
    encoder.tokenizer = train_tokenizer(texts, vocab_size=60)
    encoder.save_pretrained(tmp_path / "base")
    base = transformers_model("bert", "SEQ_CLS", tmp_path / "base", num_labels=3)
    settings = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"])
    peft.get_peft_model(base, settings).save_pretrained(tmp_path / "peft")
    (tmp_path / "in.tsv").write_text("\n".join(["sentence", *texts]) + "\n")
    run("predict", tmp_path / "peft", tmp_path / "in.tsv", "-o", tmp_path / "out.tsv")
    header, *rows = (tmp_path / "out.tsv").read_text().splitlines()
    assert header.split("\t") == ["label", "p(LABEL_0)", "p(LABEL_1)", "p(LABEL_2)"]
    assert len(rows) == 3
