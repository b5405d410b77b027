"""Qwen3 and Gemma 3 as encoders through the command: fine-tuned on real texts, read by transformers."""

import gzip

import pytest
import torch
import transformers

import fastenc
from fastenc.data import train_tokenizer
from fastenc.models import Encoder, EncoderConfig
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
    encoder.tokenizer = train_tokenizer(texts, model_type="bpe", vocab_size=400)
    encoder.save_pretrained(tmp_path / "base")
    options = ("--max-length", 64, "--max-steps", 3, "--batch-size", 8)
    run("finetune", tmp_path / "base", tmp_path / "train.tsv", "-o", tmp_path / "run", *options)
    rows = fastenc.predictor(tmp_path / "run").predict(texts[:5])
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run")
    for text, row in zip(texts, rows, strict=False):
        with torch.no_grad():
            logits = theirs.eval()(**tokenizer(text, return_tensors="pt")).logits
        names = [f"p({name})" for name in theirs.config.label2id]
        assert [row[name] for name in names] == pytest.approx(
            logits[0].softmax(0).tolist(), abs=1e-5
        )
