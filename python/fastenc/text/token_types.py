"""The types that a tokenizer gives to tokens: 0, or 1 for those of a pair's second text."""

import json
from typing import Any

from fastenc._base.extras import require


def set_type_0(tokenizer: Any) -> None:
    """Give all tokens the type 0.

    Args: tokenizer: of the tokenizers library, without truncation.
    """
    if tokenizer.post_processor is None or not any(tokenizer.encode("a", "a").type_ids):
        return
    tokenizers = require("tokenizers", extra="models")
    # Only as a part of a tokenizer can a post-processor be written and read. This one has no words to write.
    carrier = tokenizers.Tokenizer(tokenizers.models.WordLevel())
    carrier.post_processor = tokenizer.post_processor
    values = json.loads(carrier.to_str())
    values["post_processor"] = _of_type_0(values["post_processor"])
    changed = tokenizers.Tokenizer.from_str(json.dumps(values))
    tokenizer.post_processor = changed.post_processor


def _of_type_0(value: Any) -> Any:
    """A post-processor of tokenizer.json, or a part of one, in which every type is 0."""
    if isinstance(value, list):
        return [_of_type_0(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "BertProcessing":  # it has no types to change
        return _template(*value["cls"], *value["sep"])
    return {key: 0 if key == "type_id" else _of_type_0(each) for key, each in value.items()}


def _template(cls: str, cls_id: int, sep: str, sep_id: int) -> dict[str, Any]:
    """The post-processor that writes [CLS] A [SEP] B [SEP], with the type 0."""
    begin, end = ({"SpecialToken": {"id": name, "type_id": 0}} for name in (cls, sep))
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    special = {
        name: {"id": name, "ids": [number], "tokens": [name]}
        for name, number in ((cls, cls_id), (sep, sep_id))
    }
    return {
        "type": "TemplateProcessing",
        "single": [begin, first, end],
        "pair": [begin, first, end, second, end],
        "special_tokens": special,
    }
