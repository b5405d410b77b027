"""A folder's tokenizer and its model: tokens without an embedding, texts without tokens."""

import pytest
import torch
from tokenizers import Tokenizer

from fastenc.models import Encoder
from fastenc.text import save_tokenizer
from tests.helpers.checkpoints import save
from tests.helpers.families import model
from tests.helpers.training_run import word_tokenizer


def folder_with(tokenizer, folder):
    theirs = model("bert", vocab_size=word_tokenizer().get_vocab_size())
    save(theirs, folder)
    save_tokenizer(tokenizer, folder)
    return theirs


def test_a_token_without_an_embedding_is_refused(tmp_path):
    tokenizer = word_tokenizer()
    tokenizer.add_tokens(["mouse"])
    theirs = folder_with(tokenizer, tmp_path)
    with pytest.raises(IndexError):  # which comes with the first text that has the token
        theirs(torch.tensor([tokenizer.encode("the mouse").ids]))
    with pytest.raises(
        ValueError, match=r"below 18, config.json's vocab_size, got 1 tokens .* as 'mouse'"
    ):
        Encoder.from_pretrained(tmp_path)


def test_a_special_token_may_lack_one(tmp_path):
    """So it is with the mask token of facebook/bart-large-cnn."""
    tokenizer = word_tokenizer()
    tokenizer.add_special_tokens(["<image>"])
    folder_with(tokenizer, tmp_path)
    assert Encoder.from_pretrained(tmp_path).encode(["the cat"]).shape[0] == 1


def test_a_text_without_tokens_is_named(tmp_path):
    """A tokenizer without special tokens makes none of an empty text, which transformers' model does not take."""
    tokenizer = Tokenizer(word_tokenizer().model)
    theirs = folder_with(tokenizer, tmp_path)
    with pytest.raises(RuntimeError):
        theirs(torch.tensor([tokenizer.encode("").ids], dtype=torch.int64))
    with pytest.raises(ValueError, match="at least one token, got '' as text 1: leave it out"):
        Encoder.from_pretrained(tmp_path).encode(["cat", "", "dog"])
