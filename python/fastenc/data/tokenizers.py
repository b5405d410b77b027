"""Tokenizers of the ``tokenizers`` library: loaded, trained and saved as transformers reads them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from fastenc._extras import require
from fastenc._files import write_atomically

KINDS = ("wordpiece", "bpe", "unigram")
# (pad, unk, cls, sep, mask)
BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROBERTA_TOKENS = ("<pad>", "<unk>", "<s>", "</s>", "<mask>")


class SpecialTokens(NamedTuple):
    """Ids of the tokens with a role; ``all`` holds every special token's id."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int
    all: frozenset[int]


def load_tokenizer(folder: str | Path) -> Any:
    """The ``tokenizers.Tokenizer`` of a model folder, with its padding and truncation switched off.

    Raises: ValueError without a readable tokenizer.json.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"{folder} has no tokenizer.json: save it with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        tokenizer = require("tokenizers", extra="models").Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path} is not a tokenizer of the tokenizers library: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def special_tokens(tokenizer: Any) -> SpecialTokens:
    """The special tokens of a BERT-like ([CLS]) or RoBERTa-like (<s>) tokenizer.

    Raises: ValueError naming the token that is missing.
    """
    names = BERT_TOKENS if tokenizer.token_to_id(BERT_TOKENS[2]) is not None else ROBERTA_TOKENS
    ids = [tokenizer.token_to_id(name) for name in names]
    if None in ids:
        raise ValueError(
            f"the tokenizer has no token {names[ids.index(None)]!r}, which masked-LM data needs"
        )
    added = tokenizer.get_added_tokens_decoder()
    special = {place for place, token in added.items() if token.special}
    return SpecialTokens(*ids, frozenset(special | set(ids)))


def train_tokenizer(
    texts: Iterable[str],
    *,
    kind: str = "wordpiece",
    vocab_size: int = 30522,
    lowercase: bool | None = None,
    show_progress: bool = False,
) -> Any:
    """Learn a vocabulary from texts.

    Args:
        kind: "wordpiece" (BERT), "bpe" (byte-level, RoBERTa) or "unigram" (XLM-R).
        vocab_size: largest number of tokens, special tokens included.
        lowercase: also strips accents; None: for WordPiece only.
    Returns: a ``tokenizers.Tokenizer`` that adds the family's special tokens around one and two texts.
    Raises: ValueError for an unknown kind, no text, or a vocabulary below the alphabet's size.
    Source: Sennrich et al. 2016, arXiv:1508.07909 (BPE); Kudo 2018, arXiv:1804.10959 (Unigram);
        Wu et al. 2016, arXiv:1609.08144 (WordPiece).
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS}, got {kind!r}")
    texts = list(texts)
    if not any(text.strip() for text in texts):
        raise ValueError("a tokenizer needs texts to learn from, got none that is not empty")
    if vocab_size < 300 and kind == "bpe":
        raise ValueError(
            f"byte-level BPE needs vocab_size of at least 300 (256 bytes), got {vocab_size}"
        )
    library = require("tokenizers", extra="models")
    lowercase = kind == "wordpiece" if lowercase is None else lowercase
    tokenizer, trainer = _parts(library, kind, vocab_size, lowercase, show_progress)
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    _frame(library, tokenizer, BERT_TOKENS if kind == "wordpiece" else ROBERTA_TOKENS)
    return tokenizer


def _parts(library, kind: str, vocab_size: int, lowercase: bool, show_progress: bool):
    models, trainers = library.models, library.trainers
    common = dict(vocab_size=vocab_size, show_progress=show_progress)
    lower = (
        [library.normalizers.Lowercase(), library.normalizers.StripAccents()] if lowercase else []
    )
    if kind == "wordpiece":
        tokenizer = library.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=lowercase)
        tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = library.decoders.WordPiece()
        return tokenizer, trainers.WordPieceTrainer(special_tokens=list(BERT_TOKENS), **common)
    roberta = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]  # RoBERTa's order of ids
    if kind == "bpe":
        tokenizer = library.Tokenizer(models.BPE())
        tokenizer.normalizer = (
            library.normalizers.Sequence([library.normalizers.NFD(), *lower]) if lower else None
        )
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        alphabet = library.pre_tokenizers.ByteLevel.alphabet()
        return tokenizer, trainers.BpeTrainer(
            special_tokens=roberta, initial_alphabet=alphabet, **common
        )
    tokenizer = library.Tokenizer(models.Unigram())
    tokenizer.normalizer = library.normalizers.Sequence([library.normalizers.NFKC(), *lower])
    tokenizer.pre_tokenizer = library.pre_tokenizers.Metaspace()
    tokenizer.decoder = library.decoders.Metaspace()
    return tokenizer, trainers.UnigramTrainer(special_tokens=roberta, unk_token="<unk>", **common)


def _frame(library, tokenizer, names: tuple[str, ...]) -> None:
    """[CLS] a [SEP] and [CLS] a [SEP] b [SEP], or RoBERTa's <s> a </s> and <s> a </s></s> b </s>."""
    cls, sep = names[2], names[3]
    bert = names is BERT_TOKENS
    tokenizer.post_processor = library.processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} $B:1 {sep}:1" if bert else f"{cls} $A {sep} {sep} $B {sep}",
        special_tokens=[(cls, tokenizer.token_to_id(cls)), (sep, tokenizer.token_to_id(sep))],
    )


def save_tokenizer(tokenizer: Any, folder: str | Path) -> None:
    """Write tokenizer.json, and a tokenizer_config.json where there is none, as AutoTokenizer reads them."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "tokenizer.json", lambda path: tokenizer.save(str(path)))
    if (folder / "tokenizer_config.json").exists():
        return
    names = BERT_TOKENS if tokenizer.token_to_id(BERT_TOKENS[2]) is not None else ROBERTA_TOKENS
    keys = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict(zip(keys, names, strict=True)),
        "model_input_names": ["input_ids", "attention_mask"]
        + (["token_type_ids"] if names is BERT_TOKENS else []),
    }
    text = json.dumps(values, indent=2) + "\n"
    write_atomically(
        folder / "tokenizer_config.json", lambda path: path.write_text(text, encoding="utf-8")
    )
