"""A RoBERTa as a Longformer: states of short and long texts, files, errors, fine-tuning on long documents."""

import csv
import gzip
import importlib
import json

import pytest
import torch

from fastenc.data.tokenizer_training import train_tokenizer
from fastenc.models import Encoder, SequenceClassifier, convert_to_longformer
from fastenc.packing import pack, pack_sequences
from fastenc.text import save_tokenizer
from tests.helpers.checkpoints import close, save
from tests.helpers.commands import failure, run
from tests.helpers.extension import needs_cpp
from tests.helpers.families import model, padded_batch

TASKS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("family", ["roberta", "xlm-roberta"])
def test_transformers_longformer_has_robertas_results(family, task, tmp_path):
    theirs = model(family, task)
    convert_to_longformer(
        save(theirs, tmp_path / "a"), tmp_path / "b", max_positions=100, attention_window=(40, 20)
    )
    module = importlib.import_module("transformers.models.longformer.modeling_longformer")
    of_class = getattr(module, f"Longformer{task}")
    longer, loading = of_class.from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not any(loading.values())
    batch = padded_batch(family, (3, 10, 7))
    chosen = torch.zeros_like(batch["input_ids"])
    chosen[:, 0] = chosen[1, 4] = 1
    mask = batch["attention_mask"].bool()
    with torch.no_grad():
        expected = theirs(**batch)[0]
        ours = longer(**batch, global_attention_mask=chosen)[0]
    real = (lambda x: x) if task == "ForSequenceClassification" else (lambda x: x[mask])
    close(real(ours), real(expected), atol=1e-5)
    first = theirs.config.pad_token_id + 1
    table = longer.base_model.embeddings.position_embeddings.weight
    before = theirs.base_model.embeddings.position_embeddings.weight
    assert table.shape[0] == 100 + first and torch.equal(table[: len(before)], before)
    assert torch.equal(table[len(before) :][: len(before) - first], before[first:])
    if task == "Model":
        batch = padded_batch(family, (90, 41))
        with torch.no_grad():
            expected = longer(**batch)[0][batch["attention_mask"].bool()]
            ours = Encoder.from_pretrained(tmp_path / "b")(pack(**batch)).last_hidden_state
        close(ours, expected, atol=2e-5)


def test_errors(tmp_path, capsys):
    source = save(model("roberta"), tmp_path / "a")
    bert = save(model("bert"), tmp_path / "bert")
    for arguments, message in (
        (
            (bert, tmp_path / "b"),
            r"is made of one of roberta, xlm-roberta, camembert, .* holds a bert",
        ),
        ((source, source), "has a checkpoint already: give another folder"),
        ((source, tmp_path / "b", 38), "must be more than the 38 that .* has, got 38"),
        ((source, tmp_path / "b", 100, 7), "^attention_window must be an even integer .*, got 7"),
        ((source, tmp_path / "b", 100, (8,) * 3), r"each of the 2 layers, got \(8, 8, 8\): give"),
    ):
        options = dict(zip(("max_positions", "attention_window"), arguments[2:], strict=False))
        with pytest.raises(ValueError, match=message):
            convert_to_longformer(*arguments[:2], **options)
    assert "--max-positions must be more than the 38" in failure(
        capsys, "lengthen", source, "-o", tmp_path / "b", "--max-positions", "20"
    )
    assert "--attention-window must be an even integer above 0" in failure(
        capsys, "lengthen", source, "-o", tmp_path / "b", "--attention-window", "33"
    )
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    "key, value", [("vocab_size", 300), ("num_hidden_layers", 4), ("intermediate_size", 99)]
)
def test_weights_must_fit_their_config(key, value, tmp_path):
    source = save(model("roberta"), tmp_path / "a")
    values = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(values | {key: value}))
    with pytest.raises(ValueError, match=f"but config.json .*{value}.*belong together"):
        convert_to_longformer(source, tmp_path / "b")
    assert not (tmp_path / "b").exists()


@needs_cpp
def test_a_converted_model_learns_from_long_documents(data_dir, tmp_path):
    with gzip.open(data_dir / "movie_reviews/train.tsv.gz", "rt", encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    of_each = [
        [row for row in rows if row["label"] == label and 2500 < len(row["text"]) < 3500][:4]
        for label in ["neg", "pos"]
    ]
    reviews = [row for pair in zip(*of_each, strict=True) for row in pair]
    save(model("roberta", vocab_size=600), tmp_path / "a")
    texts = [row["text"] for row in reviews]
    tokenizer = train_tokenizer(texts, model_type="bpe", vocab_size=600, show_progress=False)
    save_tokenizer(tokenizer, tmp_path / "a")
    long = ("--max-positions", "1500", "--attention-window", "32")
    run("lengthen", tmp_path / "a", "-o", tmp_path / "b", *long)
    ids = [tokenizer.encode(text).ids for text in texts]
    assert min(map(len, ids)) > 600 and max(map(len, ids)) <= 1500  # RoBERTa has 38 positions
    labels = torch.tensor([row["label"] == "pos" for row in reviews]).long()
    torch.manual_seed(0)
    classifier = SequenceClassifier.from_pretrained(tmp_path / "b", num_labels=2)
    optimizer, losses = torch.optim.AdamW(classifier.parameters(), lr=3e-3), []
    for _ in range(20):
        loss = classifier(pack_sequences(ids), labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0], losses
