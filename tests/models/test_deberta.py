"""DeBERTa's first version: its byte-level BPE tokenizer, the names in its original files, and what is refused."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fastenc.models import MaskedLM
from fastenc.packing import pack_sequences
from tests.helpers.commands import run
from tests.helpers.families import model
from tests.helpers.training_run import documents

TEXTS = ["The cat sat.", "A dog ran slowly under a tree.", "the mat"]


def same_predictions(folder, texts_as_ids):
    ours = MaskedLM.from_pretrained(folder).eval()
    theirs = transformers.DebertaForMaskedLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = ours(pack_sequences(texts_as_ids)).logits
        expected = [theirs(input_ids=torch.tensor([ids])).logits[0] for ids in texts_as_ids]
    torch.testing.assert_close(logits, torch.cat(expected), rtol=0, atol=2e-5)


def test_a_pretrained_model_reads_texts_and_predicts_as_transformers(tmp_path):
    texts = documents(60)
    tokenizer = transformers.DebertaTokenizer().train_new_from_iterator(texts + TEXTS, 320)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "text.txt").write_text("\n\n".join(texts))
    sizes = ("--layers", 2, "--hidden", 32, "--heads", 2, "--block-size", 96)
    family = ("--family", "deberta", "--tokenizer", tmp_path / "tokenizer", *sizes)
    steps = ("--objective", "mlm", "--batch-size", 4, "--max-steps", 2)
    run("pretrain", tmp_path / "text.txt", "-o", tmp_path / "run", *family, *steps)
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "run")
    assert "Ġmat" in read.tokenize("the mat")
    ids = [MaskedLM.from_pretrained(tmp_path / "run").own_tokenizer().encode(t).ids for t in TEXTS]
    assert ids == read(TEXTS)["input_ids"]
    same_predictions(tmp_path / "run", ids)


def test_original_files_have_a_position_table_that_the_encoder_does_not_read(tmp_path):
    theirs = model("deberta", "ForMaskedLM", legacy=False)
    theirs.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert "lm_predictions.lm_head.dense.weight" in weights
    table = {"deberta.embeddings.position_embeddings.weight": torch.randn(40, 32)}
    save_file(weights | table, tmp_path / "model.safetensors", metadata={"format": "pt"})
    same_predictions(tmp_path, [[5, 9, 33], [7] * 11])


def test_talking_heads_are_refused(tmp_path):
    model("deberta", talking_head=True).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="talking_head must be False, got True"):
        MaskedLM.from_pretrained(tmp_path)
