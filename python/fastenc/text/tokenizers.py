"""Tokenizers of the ``tokenizers`` library, loaded from and saved to model folders in transformers' format."""

import json
import warnings
from collections.abc import Mapping, Sequence
from itertools import accumulate, count
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from fastenc._base.extras import require
from fastenc._base.files import write_atomically

# (pad, unk, cls, sep, mask); None: there is none.
BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROBERTA_TOKENS = ("<pad>", "<unk>", "<s>", "</s>", "<mask>")
T5_TOKENS = ("<pad>", "<unk>", None, "</s>", None)
# Of ALBERT's and BigBird's SentencePiece models.
ALBERT_TOKENS = (*ROBERTA_TOKENS[:2], *BERT_TOKENS[2:])
ESM_TOKENS = ("<pad>", "<unk>", "<cls>", "<eos>", "<mask>")
GEMMA_TOKENS = ("<pad>", "<unk>", "<bos>", "<eos>", "<mask>")
EUROBERT_TOKENS = ("<|pad|>", None, "<|begin_of_text|>", "<|end_of_text|>", "<|mask|>")
QWEN_TOKENS = ("<|endoftext|>", None, None, "<|endoftext|>", None)
# Their names in tokenizer_config.json, where they are not those of BERT.
ROLES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
OTHER_ROLES: dict[tuple[str | None, ...], tuple[str, ...]] = {
    ESM_TOKENS: ("pad_token", "unk_token", "cls_token", "eos_token", "mask_token"),
    **dict.fromkeys(
        (T5_TOKENS, GEMMA_TOKENS, EUROBERT_TOKENS, QWEN_TOKENS),
        ("pad_token", "unk_token", "bos_token", "eos_token", "mask_token"),
    ),
}
# tokenizer_config.json's options of tokenizers like BERT's → attributes of their normalizer.
NORMALIZER_OPTIONS = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
# Classes of tokenizers, also with "Fast" at the end. An option that tokenizer_config.json lacks has its default.
BERT_CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MPNetTokenizer")
BERT_DEFAULTS = {"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True}
# These classes take tokenizer.json as it is.
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
# What transformers makes a tokenizer.json from.
SENTENCEPIECE_FILES = ("spm.model", "spiece.model", "sentencepiece.bpe.model")
OTHER_FILES = (*SENTENCEPIECE_FILES, "vocab.txt", "vocab.json")
SENTINEL = "<extra_id_{}>"


class EncodingLike(Protocol):
    """What the package reads of a ``tokenizers.Encoding``."""

    @property
    def ids(self) -> list[int]: ...

    @property
    def type_ids(self) -> list[int]: ...

    @property
    def word_ids(self) -> list[int | None]: ...

    @property
    def sequence_ids(self) -> list[int | None]: ...

    @property
    def offsets(self) -> list[tuple[int, int]]: ...

    @property
    def special_tokens_mask(self) -> list[int]: ...

    @property
    def overflowing(self) -> "list[EncodingLike]": ...

    def truncate(self, max_length: int, stride: int = 0, direction: str = "right") -> None: ...


class AddedToken(Protocol):
    """A token beside the vocabulary of the tokenizer's model."""

    @property
    def special(self) -> bool: ...


class TokenizerLike(Protocol):
    """What the package calls of a ``tokenizers.Tokenizer``."""

    @property
    def model(self) -> object: ...

    @staticmethod
    def from_str(json: str) -> "TokenizerLike": ...

    def to_str(self, pretty: bool = False) -> str: ...

    def save(self, path: str, pretty: bool = True) -> None: ...

    def encode(
        self,
        sequence: str | Sequence[str],
        pair: str | None = None,
        is_pretokenized: bool = False,
        add_special_tokens: bool = True,
    ) -> EncodingLike: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def encode_batch(
        self,
        input: Sequence[str] | Sequence[Sequence[str]] | Sequence[tuple[str, str]],
        is_pretokenized: bool = False,
        add_special_tokens: bool = True,
    ) -> list[EncodingLike]: ...

    def encode_batch_fast(
        self,
        input: Sequence[str] | Sequence[Sequence[str]] | Sequence[tuple[str, str]],
        is_pretokenized: bool = False,
        add_special_tokens: bool = True,
    ) -> list[EncodingLike]: ...

    def post_process(self, encoding: EncodingLike) -> EncodingLike: ...

    def token_to_id(self, token: str) -> int | None: ...

    def id_to_token(self, id: int) -> str | None: ...

    def get_vocab_size(self, with_added_tokens: bool = True) -> int: ...

    def get_added_tokens_decoder(self) -> Mapping[int, AddedToken]: ...

    def num_special_tokens_to_add(self, is_pair: bool) -> int: ...

    def no_padding(self) -> None: ...

    def no_truncation(self) -> None: ...

    def enable_truncation(
        self, max_length: int, *, stride: int = 0, strategy: str = "longest_first"
    ) -> None: ...


class SpecialTokens(NamedTuple):
    """Ids of the special tokens by role.

    Fields:
        begin: the token that a text begins with, [CLS] or <s>; empty for T5's tokenizers, which have none.
        sep: the token that a text ends with.
        masks: the mask token; empty for a tokenizer without one.
        all: the ids of all special tokens, also those without a role.
    """

    pad: int
    unk: int
    begin: tuple[int, ...]
    sep: int
    masks: tuple[int, ...]
    all: frozenset[int]

    @property
    def cls(self) -> int:
        """The token that a text begins with. Raises: ValueError if there is none."""
        return _only(self.begin, "<s>")

    @property
    def mask(self) -> int:
        """The mask token. Raises: ValueError if there is none."""
        return _only(self.masks, "<mask>")


def load_tokenizer(folder: str | Path) -> TokenizerLike:
    """The ``tokenizers.Tokenizer`` of a model folder, with its padding and truncation switched off.

    For tokenizers like BERT's, options of tokenizer_config.json count for more than tokenizer.json, as in transformers.
    Options that it lacks have transformers' defaults.

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
    _apply_options(tokenizer, path.with_name("tokenizer_config.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _apply_options(tokenizer: Any, file: Path) -> None:
    """Apply the options of tokenizer_config.json to a normalizer like BERT's. A malformed file has none here: reading
    the length of texts from it is an error."""
    normalizer = tokenizer.normalizer
    if type(normalizer).__name__ != "BertNormalizer" or not file.is_file():
        return
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return
    if not isinstance(values, dict) or values.get("tokenizer_class") in PLAIN_CLASSES:
        return
    if str(values.get("tokenizer_class")).removesuffix("Fast") in BERT_CLASSES:
        values = BERT_DEFAULTS | values
    for name, attribute in NORMALIZER_OPTIONS.items():
        follows_case = name == "strip_accents" and values.get(name, False) is None
        if follows_case or isinstance(values.get(name), bool):
            setattr(normalizer, attribute, values[name])
    tokenizer.normalizer = normalizer


def find_tokenizer(folder: Path) -> TokenizerLike | None:
    """The tokenizer of a model folder, or None if it has none.

    Without a tokenizer.json, transformers makes one from the files of older checkpoints, such as DeBERTa's. Where it
    cannot, a warning says why.
    """
    if (folder / "tokenizer.json").exists():
        return load_tokenizer(folder)
    given = [name for name in OTHER_FILES if (folder / name).exists()]
    if not given:
        return None
    try:
        # Without one of the two, transformers' own error names tiktoken, which does not read these files.
        if given[0] in SENTENCEPIECE_FILES:
            for library in ("sentencepiece", "google.protobuf"):
                require(library, extra="transformers")
        made = require("transformers", extra="transformers").AutoTokenizer.from_pretrained(folder)
        tokenizer = cast(TokenizerLike, made.backend_tokenizer)
    except Exception as error:  # of the libraries that read these files, too
        warnings.warn(
            f"the model has no tokenizer: transformers makes none from {given[0]} ({error}). Token ids can be given",
            stacklevel=6,
        )
        return None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def save_tokenizer(
    tokenizer: TokenizerLike,
    folder: str | Path,
    token_types: bool = True,
    max_length: int | None = None,
) -> None:
    """Write tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer reads.

    Args:
        token_types: whether the model takes the types that a tokenizer like BERT's gives.
        max_length: the number of tokens to which transformers truncates a text if asked to; None: no limit.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "tokenizer.json", lambda path: tokenizer.save(str(path)))
    names = _role_names(tokenizer)
    roles = OTHER_ROLES.get(names, ROLES)
    inputs = ["input_ids", "attention_mask"]
    if token_types and BERT_TOKENS[2] in names:
        inputs.append("token_type_ids")
    values: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{role: name for role, name in zip(roles, names, strict=True) if name is not None},
        "model_input_names": inputs,
    }
    if max_length is not None:
        values["model_max_length"] = max_length
    normalizer = json.loads(tokenizer.to_str())["normalizer"] or {}
    if normalizer.get("type") == "BertNormalizer":
        # BertTokenizerFast ignores the normalizer in tokenizer.json and reads this entry.
        values["do_lower_case"] = normalizer["lowercase"]
    text = json.dumps(values, indent=2) + "\n"
    write_atomically(
        folder / "tokenizer_config.json", lambda path: path.write_text(text, encoding="utf-8")
    )


def special_tokens(tokenizer: TokenizerLike) -> SpecialTokens:
    """The special tokens of a tokenizer, by the names of BERT's ([CLS]), RoBERTa's (<s>), T5's, ALBERT's, BigBird's,
    ESM's, Gemma's, EuroBERT's or Qwen's. If there is no token for unknown words, the padding token stands for them.

    Raises: ValueError naming the token that is missing.
    """
    ids: list[tuple[int, ...]] = [
        () if name is None else (_only(_ids_of(tokenizer, name), name),)
        for name in _role_names(tokenizer)
    ]
    added = tokenizer.get_added_tokens_decoder()
    special = {number for number, token in added.items() if token.special}
    (pad,), unk, begin, (sep,), masks = ids
    unknown = unk[0] if unk else pad
    return SpecialTokens(pad, unknown, begin, sep, masks, frozenset(special.union(*ids)))


def tokens_around_text(tokenizer: TokenizerLike) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer adds before a text ([CLS]; T5: none) and after it."""
    encoding = tokenizer.encode("a")
    mask = encoding.special_tokens_mask
    begin = mask.index(0) if 0 in mask else min(1, len(mask))
    end = len(mask) - mask[::-1].index(0) if 0 in mask else begin
    return list(encoding.ids[:begin]), list(encoding.ids[end:])


def sentinel_ids(tokenizer: TokenizerLike) -> list[int]:
    """Ids of T5's sentinels <extra_id_0>, <extra_id_1>, … as far as the tokenizer has them.

    Raises: ValueError if it has none.
    """
    ids: list[int] = []
    for number in count():
        name = SENTINEL.format(number)
        # In mT5's vocabulary a sentinel is a piece that begins a word.
        known = _ids_of(tokenizer, name) or _ids_of(tokenizer, f"▁{name}")
        if not known:
            break
        ids += known
    if not ids:
        raise ValueError(
            f"the tokenizer must have T5's sentinels {SENTINEL.format(0)}, {SENTINEL.format(1)}, …, got none: take a "
            "tokenizer of T5, or train one with model_type t5"
        )
    return ids


def _ids_of(tokenizer: TokenizerLike, name: str) -> tuple[int, ...]:
    """The id of a token; empty if the tokenizer does not have it."""
    number = tokenizer.token_to_id(name)
    return () if number is None else (number,)


def _only(ids: tuple[int, ...], name: str) -> int:
    """The id. Raises: ValueError naming the token if there is none."""
    if not ids:
        raise ValueError(
            f"the tokenizer has no token {name!r}, which these data need: use one with BERT's or RoBERTa's special "
            "tokens"
        )
    return ids[0]


def without_limits(tokenizer: TokenizerLike) -> TokenizerLike:
    """A copy of the tokenizer without padding and truncation. The given tokenizer keeps its settings."""
    return _tokenizer_of(tokenizer, tokenizer.to_str())


def tokenizer_for_words(tokenizer: TokenizerLike) -> TokenizerLike:
    """A copy of the tokenizer that tokenizes a single word as inside a text, with a space before it."""
    values = json.loads(tokenizer.to_str())
    outer = values["pre_tokenizer"] or {}
    for part in outer.get("pretokenizers", [outer]):
        if part.get("type") == "ByteLevel":
            part["add_prefix_space"] = True
    return _tokenizer_of(tokenizer, json.dumps(values))


def lowercasing_tokenizer(tokenizer: TokenizerLike) -> TokenizerLike:
    """A copy of the tokenizer that lowercases texts before all else, or the tokenizer if it lowercases already."""
    values = json.loads(tokenizer.to_str())
    outer = values["normalizer"] or {"type": "Sequence", "normalizers": []}
    parts = outer.get("normalizers", [outer])
    if any(part["type"] == "Lowercase" or part.get("lowercase") for part in parts):
        return tokenizer
    values["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, *parts]}
    return _tokenizer_of(tokenizer, json.dumps(values))


def _tokenizer_of(original: TokenizerLike, content: str) -> TokenizerLike:
    """A tokenizer of the original's class with the content of a tokenizer.json, without padding and truncation."""
    made = type(original).from_str(content)
    made.no_padding()
    made.no_truncation()
    return made


def ids_and_starts(encoding: EncodingLike, count: int, unknown: int) -> tuple[list[int], list[int]]:
    """(token ids of a sentence, indices of each word's first token and of the end).

    Args:
        encoding: of the pre-tokenized sentence, without special tokens.
        count: number of words.
        unknown: the token id of a word for which the tokenizer gives no token.
    """
    # Without special tokens every token belongs to a word.
    ids, word_ids = encoding.ids, cast(list[int], encoding.word_ids)
    starts = [i for i, word in enumerate(word_ids) if i == 0 or word != word_ids[i - 1]]
    if len(starts) != count:
        tokens: list[list[int]] = [[] for _ in range(count)]
        for word, token in zip(word_ids, ids, strict=True):
            tokens[word].append(token)
        tokens = [of_word or [unknown] for of_word in tokens]
        ids = [token for of_word in tokens for token in of_word]
        starts = [0, *accumulate(map(len, tokens))][:-1]
    return ids, [*starts, len(ids)]


def _role_names(tokenizer: TokenizerLike) -> tuple[str | None, ...]:
    has = lambda name: tokenizer.token_to_id(name) is not None
    if has("[CLS]"):
        return ALBERT_TOKENS if has("<pad>") and not has("[PAD]") else BERT_TOKENS
    for names in (GEMMA_TOKENS, ESM_TOKENS, EUROBERT_TOKENS):
        if has(names[2]) and has(names[3]):
            return names
    if has("<|endoftext|>") and has("<|im_end|>"):
        return QWEN_TOKENS
    return T5_TOKENS if has("</s>") and not has("<s>") else ROBERTA_TOKENS
