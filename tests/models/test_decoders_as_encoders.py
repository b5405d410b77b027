"""Qwen3 and Gemma 3 as encoders through the command: fine-tuned on real texts, read by transformers."""

import gzip
import json

import pytest
import torch
import transformers

import fastenc
from fastenc.models import Encoder, EncoderConfig
from tests.helpers.byte_tokenizers import byte_tokenizer
from tests.helpers.checkpoints import save
from tests.helpers.commands import run
from tests.helpers.families import config, model


def test_layers_with_a_window_need_its_size():
    values = config("qwen3").to_dict() | {"layer_types": ["sliding_attention", "full_attention"]}
    for size in (
        {"use_sliding_window": False},
        {"use_sliding_window": True, "sliding_window": None},
    ):
        with pytest.raises(
            ValueError, match="sliding_window must be an integer if layer_types has"
        ):
            EncoderConfig.from_hf(values | size)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_fine_tuned_on_real_texts_transformers_predicts_the_same(family, data_dir, tmp_path):
    with gzip.open(data_dir / "sst2" / "dev.tsv.gz", "rt", encoding="utf-8") as file:
        header, *lines = file.read().splitlines()[:200]
    (tmp_path / "train.tsv").write_text("\n".join([header, *lines]) + "\n")
    texts = [line.split("\t")[0] for line in lines]
    encoder = Encoder.from_pretrained(
        save(model(family, vocab_size=400, max_position_embeddings=64), tmp_path / "base")
    )
    encoder.tokenizer = byte_tokenizer(family, texts)
    encoder.save_pretrained(tmp_path / "base")
    options = ("--max-length", 64, "--max-steps", 3, "--batch-size", 8)
    run("finetune", tmp_path / "base", tmp_path / "train.tsv", "-o", tmp_path / "run", *options)
    rows = fastenc.predictor(tmp_path / "run").predict(texts[:5])
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run")
    batch = tokenizer(texts[:5], padding=True, truncation=True, max_length=64, return_tensors="pt")
    with torch.no_grad():
        logits = theirs.eval()(**batch).logits
    names = [f"p({name})" for name in theirs.config.label2id]
    ours = torch.tensor([[row[name] for name in names] for row in rows])
    torch.testing.assert_close(ours, logits.softmax(1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("task", ["token-classification", "span-ner"])
def test_words_of_a_tokenizer_without_a_first_token_are_labelled(task, tmp_path):
    words = tmp_path / "words.conll"
    words.write_text("The O\ncat B-ANIMAL\nsleeps O\n\nA O\nlazy O\ndog B-ANIMAL\n\n" * 8)
    encoder = Encoder.from_pretrained(
        save(model("qwen3", vocab_size=400, max_position_embeddings=64), tmp_path / "base")
    )
    encoder.tokenizer = byte_tokenizer("qwen3", ["The cat sleeps", "A lazy dog"])
    encoder.save_pretrained(tmp_path / "base")
    options = ("--task", task, "--max-steps", 60, "--lr", 1e-2, "--batch-size", 8)
    run("finetune", tmp_path / "base", words, "-o", tmp_path / "run", *options)
    run("evaluate", tmp_path / "run", words, "-o", tmp_path / "metrics.json")
    assert json.loads((tmp_path / "metrics.json").read_text())["f1"] > 0.9
