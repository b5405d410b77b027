"""What happens to text before a model sees it: tokenizer files, special tokens, tags, windows over long texts."""

from fastenc.text.long_texts import LongTexts
from fastenc.text.special_tokens import SpecialTokens, special_tokens
from fastenc.text.tokenizer_files import load_tokenizer, save_tokenizer

__all__ = ["LongTexts", "SpecialTokens", "load_tokenizer", "save_tokenizer", "special_tokens"]
