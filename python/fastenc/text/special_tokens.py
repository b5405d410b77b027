"""The special tokens of tokenizers, by their roles."""

from itertools import count
from typing import NamedTuple

from fastenc.text.tokenizer_like import TokenizerLike

# (pad, unk, cls, sep, mask); None: there is none.
BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROBERTA_TOKENS = ("<pad>", "<unk>", "<s>", "</s>", "<mask>")
T5_TOKENS = ("<pad>", "<unk>", None, "</s>", None)
# ALBERT's and BigBird's SentencePiece models have these.
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
SENTINEL = "<extra_id_{}>"


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


def named_roles(tokenizer: TokenizerLike) -> dict[str, str]:
    """tokenizer_config.json's name of each role that the tokenizer has → the token."""
    names = _role_names(tokenizer)
    roles = zip(OTHER_ROLES.get(names, ROLES), names, strict=True)
    return {role: name for role, name in roles if name is not None}


def _role_names(tokenizer: TokenizerLike) -> tuple[str | None, ...]:
    """Its tokens for padding, unknown words, begin, end and mask; None: there is none."""
    has = lambda name: tokenizer.token_to_id(name) is not None
    if has("[CLS]"):
        return ALBERT_TOKENS if has("<pad>") and not has("[PAD]") else BERT_TOKENS
    for names in (GEMMA_TOKENS, ESM_TOKENS, EUROBERT_TOKENS):
        if has(names[2]) and has(names[3]):
            return names
    if has("<|endoftext|>") and has("<|im_end|>"):
        return QWEN_TOKENS
    return T5_TOKENS if has("</s>") and not has("<s>") else ROBERTA_TOKENS
