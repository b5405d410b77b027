"""Tokenizers in model folders, in transformers' format."""

import json
import warnings
from pathlib import Path
from typing import Any, cast

from fastenc._base.extras import require
from fastenc._base.files import write_atomically, write_text_atomically
from fastenc.text.special_tokens import BERT_TOKENS, named_roles
from fastenc.text.token_types import set_type_0
from fastenc.text.tokenizer_like import TokenizerLike

# tokenizer_config.json's options of tokenizers like BERT's → attributes of their normalizer.
NORMALIZER_OPTIONS = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
# Classes of tokenizers, also with "Fast" at the end. An option that tokenizer_config.json lacks has its default.
BERT_CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MPNetTokenizer")
BERT_DEFAULTS = {"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True}
# These classes take tokenizer.json as it is, but give no token types unless tokenizer_config.json names them.
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
# What transformers makes a tokenizer.json from.
SENTENCEPIECE_FILES = ("spm.model", "spiece.model", "sentencepiece.bpe.model")
OTHER_FILES = (*SENTENCEPIECE_FILES, "vocab.txt", "vocab.json")


def load_tokenizer(folder: str | Path) -> TokenizerLike:
    """The ``tokenizers.Tokenizer`` of a model folder, with its padding and truncation switched off.

    For tokenizers like BERT's, options of tokenizer_config.json count for more than tokenizer.json, as in transformers.
    Options that it lacks have transformers' defaults. Where transformers gives no token types, all are 0.

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
    values = _options(path.with_name("tokenizer_config.json"))
    _apply_options(tokenizer, values)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if not _gives_token_types(values):
        set_type_0(tokenizer)
    return tokenizer


def _options(file: Path) -> dict[str, Any]:
    """The options of tokenizer_config.json. A missing or malformed file has none here: reading the length of texts from
    a malformed one is an error."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _gives_token_types(values: dict[str, Any]) -> bool:
    """Whether transformers' tokenizer gives the types of tokens that tokenizer.json has."""
    names = values.get("model_input_names")
    if isinstance(names, list):
        return "token_type_ids" in names
    return values.get("tokenizer_class") not in PLAIN_CLASSES


def _apply_options(tokenizer: Any, values: dict[str, Any]) -> None:
    """Apply the options of tokenizer_config.json to a normalizer like BERT's."""
    normalizer = tokenizer.normalizer
    if type(normalizer).__name__ != "BertNormalizer" or not values:
        return
    if values.get("tokenizer_class") in PLAIN_CLASSES:
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
        if not hasattr(made, "backend_tokenizer"):  # Marian's and M2M100's
            raise ValueError(f"{type(made).__name__} is not one of the tokenizers library")
        tokenizer = cast(TokenizerLike, made.backend_tokenizer)
    except Exception as error:  # of the libraries that read these files, too
        warnings.warn(
            f"the model has no tokenizer: transformers cannot make one from {given[0]} ({error}). Give token ids "
            "instead of texts",
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
    roles = named_roles(tokenizer)
    inputs = ["input_ids", "attention_mask"]
    if token_types and BERT_TOKENS[2] in roles.values():
        inputs.append("token_type_ids")
    values: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **roles,
        "model_input_names": inputs,
    }
    if max_length is not None:
        values["model_max_length"] = max_length
    normalizer = json.loads(tokenizer.to_str())["normalizer"] or {}
    if normalizer.get("type") == "BertNormalizer":
        # BertTokenizerFast ignores the normalizer in tokenizer.json and reads this entry.
        values["do_lower_case"] = normalizer["lowercase"]
    write_text_atomically(folder / "tokenizer_config.json", json.dumps(values, indent=2) + "\n")
