"""What happens to text before a model sees it: tokenizer files, special tokens, tags, windows over long texts."""

from fastenc.text.long_texts import LongTexts
from fastenc.text.tokenizers import SpecialTokens, load_tokenizer, save_tokenizer, special_tokens

__all__ = ["LongTexts", "SpecialTokens", "load_tokenizer", "save_tokenizer", "special_tokens"]
