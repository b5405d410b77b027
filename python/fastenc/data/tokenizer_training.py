"""Trains tokenizers of the ``tokenizers`` library on texts."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from typing import Any

from fastenc._base.extras import require
from fastenc.text.special_tokens import BERT_TOKENS, ROBERTA_TOKENS, SENTINEL
from fastenc.text.tokenizer_like import TokenizerLike

MODEL_TYPES = ("wordpiece", "bpe", "unigram", "t5")
ROBERTA_ORDER = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")  # of the ids
T5_ORDER = ("<pad>", "</s>", "<unk>")
SENTINELS = 100  # of T5
MODES = ("[R]", "[S]", "[X]")  # of UL2's denoisers
# As in T5's vocabulary, the ids of the sentinels descend to the last ones.
T5_LAST = [*MODES, *(SENTINEL.format(number) for number in reversed(range(SENTINELS)))]


def train_tokenizer(
    texts: Iterable[str],
    *,
    model_type: str = "wordpiece",
    vocab_size: int = 30522,
    lowercase: bool | None = None,
    show_progress: bool | None = None,
) -> TokenizerLike:
    """Train a tokenizer on texts.

    Args:
        texts: read up to three times and not kept in memory. An iterator can be read only once, so its texts are kept.
        model_type: "wordpiece" (BERT), "bpe" (byte-level, RoBERTa and BART), "unigram" (XLM-R) or "t5" (a Unigram whose
            texts end with </s>, with 100 sentinels and the mode tokens of UL2 as its last ids).
        vocab_size: largest number of tokens, special tokens included. WordPiece keeps at most an eighth of it (at
            least 1000) for characters, the most frequent ones, so that rare scripts do not displace words.
        lowercase: lower-case the texts and strip accents; None: for WordPiece only.
        show_progress: None shows a bar if stderr is a terminal.
    Returns: a ``tokenizers.Tokenizer`` that adds the family's special tokens to single texts and to pairs.
    Numerics: the same texts give exactly the same WordPiece or BPE tokenizer. The order in which the library sums
        Unigram's probabilities varies. So scores may differ by rounding, and of pieces with almost equal scores another
        one may be kept.
    Raises: ValueError for an unknown model type, if all texts are empty, or for a ``vocab_size`` too small for the
        special tokens and the characters of the texts.
    Source: Sennrich et al. 2016, arXiv:1508.07909 (BPE); Kudo 2018, arXiv:1804.10959 (Unigram);
        Wu et al. 2016, arXiv:1609.08144 (WordPiece); Raffel et al. 2019, arXiv:1910.10683 (T5's sentinels); Tay et al.
        2022, arXiv:2205.05131 (the modes).
    """
    if model_type not in MODEL_TYPES:
        raise ValueError(
            f"model_type must be one of {MODEL_TYPES}, got {model_type!r}: give one of them"
        )
    if isinstance(texts, Iterator):
        texts = list(texts)
    if not any(text.strip() for text in texts):
        raise ValueError("a tokenizer learns from texts with words, got none: give other texts")
    library = require("tokenizers", extra="models")
    lowercase = model_type == "wordpiece" if lowercase is None else lowercase
    show = sys.stderr.isatty() if show_progress is None else show_progress
    builders: dict[str, Callable[..., tuple[Any, Any]]] = {
        "wordpiece": _wordpiece,
        "bpe": _byte_level_bpe,
        "unigram": partial(_unigram, special=ROBERTA_ORDER),
        "t5": partial(_unigram, special=T5_ORDER),
    }
    last = T5_LAST if model_type == "t5" else []
    number = len(T5_ORDER) + len(last) if model_type == "t5" else len(BERT_TOKENS)
    too_small = (
        f"vocab_size must hold the {number} special tokens and every character of the texts, got {vocab_size}: give "
        "more"
    )
    if vocab_size <= number:
        raise ValueError(too_small)
    options = dict(vocab_size=vocab_size - len(last), show_progress=show)
    tokenizer, trainer = builders[model_type](library, lowercase, texts, **options)
    try:
        length = len(texts) if isinstance(texts, Sized) else None
        tokenizer.train_from_iterator(texts, trainer, length=length)
    except Exception as error:
        # The library raises bare Exception. Any other error comes from reading the texts.
        if type(error) is not Exception:
            raise
        raise ValueError(f"{too_small} ({error})") from error
    tokenizer.add_special_tokens(last)
    if tokenizer.get_vocab_size() > vocab_size:
        raise ValueError(f"{too_small} (at least {tokenizer.get_vocab_size()})")
    if model_type == "wordpiece":
        tokenizer = _only_special(library, tokenizer, BERT_TOKENS)
    if model_type == "t5":
        end = T5_ORDER[1]
        tokenizer.post_processor = library.processors.TemplateProcessing(
            single=f"$A {end}",
            pair=f"$A {end} $B {end}",
            special_tokens=[(end, tokenizer.token_to_id(end))],
        )
    else:
        _add_template(
            library, tokenizer, BERT_TOKENS if model_type == "wordpiece" else ROBERTA_TOKENS
        )
    return tokenizer


def _wordpiece(library, lowercase: bool, texts: Iterable[str], **options):
    """(tokenizer, trainer) of WordPiece; the two functions below return those of BPE and Unigram."""
    tokenizer = library.Tokenizer(library.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = library.decoders.WordPiece()
    first, later = _alphabet(tokenizer, texts, limit=max(1000, options["vocab_size"] // 8))
    return tokenizer, library.trainers.WordPieceTrainer(
        # The library numbers other "##x" in the order of a hash table, which differs between processes, and breaks
        # ties between merges by these numbers. As special tokens they have fixed numbers.
        special_tokens=[*BERT_TOKENS, *(f"##{character}" for character in later)],
        initial_alphabet=first,
        limit_alphabet=len(first),
        **options,
    )


def _alphabet(tokenizer, texts: Iterable[str], limit: int) -> tuple[list[str], list[str]]:
    """(the most frequent characters, those of them that also occur inside words), both sorted."""
    words: Counter[str] = Counter()
    for text in texts:
        words.update(tokenizer.normalizer.normalize_str(text).split())
    characters: Counter[str] = Counter()
    inner: set[str] = set()
    for word, times in words.items():
        for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(word):
            for character in piece:
                characters[character] += times
            inner.update(piece[1:])
    kept = sorted(characters, key=lambda character: (-characters[character], character))[:limit]
    return sorted(kept), sorted(inner.intersection(kept))


def _only_special(library, trained, names: tuple[str, ...]):
    """The trained tokenizer with the named special tokens only."""
    model = library.models.WordPiece(trained.get_vocab(), unk_token=names[1])
    tokenizer = library.Tokenizer(model)
    tokenizer.normalizer, tokenizer.pre_tokenizer = trained.normalizer, trained.pre_tokenizer
    tokenizer.decoder = trained.decoder
    tokenizer.add_special_tokens(list(names))
    return tokenizer


def _byte_level_bpe(library, lowercase: bool, texts: Iterable[str], **options):
    tokenizer = library.Tokenizer(library.models.BPE())
    if lowercase:
        tokenizer.normalizer = _lowercase(library, library.normalizers.NFD())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer, library.trainers.BpeTrainer(
        special_tokens=list(ROBERTA_ORDER),
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        **options,
    )


def _unigram(
    library, lowercase: bool, texts: Iterable[str], *, special: tuple[str, ...], **options
):
    tokenizer = library.Tokenizer(library.models.Unigram())
    tokenizer.normalizer = (
        _lowercase(library, library.normalizers.NFKD()) if lowercase else library.normalizers.NFKC()
    )
    # Any white space separates words, as in SentencePiece's own normalisation.
    tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence(
        [library.pre_tokenizers.WhitespaceSplit(), library.pre_tokenizers.Metaspace()]
    )
    tokenizer.decoder = library.decoders.Metaspace()
    return tokenizer, library.trainers.UnigramTrainer(
        special_tokens=list(special), unk_token="<unk>", **options
    )


def _lowercase(library, decomposition):
    """A normalizer that decomposes characters, because accents can only be stripped then, and lower-cases."""
    steps = [decomposition, library.normalizers.StripAccents(), library.normalizers.Lowercase()]
    return library.normalizers.Sequence(steps)


def _add_template(library, tokenizer, names: tuple[str, ...]) -> None:
    """Add special tokens to texts: [CLS] a [SEP] and [CLS] a [SEP] b [SEP], or <s> a </s> and <s> a </s></s> b </s>."""
    cls, sep = names[2], names[3]
    bert = names is BERT_TOKENS
    tokenizer.post_processor = library.processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} $B:1 {sep}:1" if bert else f"{cls} $A {sep} {sep} $B {sep}",
        special_tokens=[(cls, tokenizer.token_to_id(cls)), (sep, tokenizer.token_to_id(sep))],
    )
