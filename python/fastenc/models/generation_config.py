"""The settings of a search: a call's arguments, and what a checkpoint's generation_config.json says.

Older checkpoints have the same keys in config.json.
"""

from collections.abc import Mapping
from typing import Any

from fastenc.models.architectures.values import (
    AT_LEAST_0,
    COUNT,
    ID,
    NUMBER,
    SWITCH,
    Rule,
    check,
    shown,
)
from fastenc.models.generation import SearchOptions
from fastenc.models.next_tokens import TokenRules

GENERATION_CONFIG = "generation_config.json"
MAX_NEW_TOKENS = 128
SINGLE_TOKENS = Rule(
    "a list of lists of one token each",
    lambda value: isinstance(value, list) and all(map(_is_one_token, value)),
)
RULES: dict[str, Rule] = {
    "max_new_tokens": COUNT,
    "max_length": COUNT,
    "min_new_tokens": AT_LEAST_0,
    "min_length": AT_LEAST_0,
    "num_beams": COUNT,
    "length_penalty": NUMBER,
    "early_stopping": SWITCH,
    "no_repeat_ngram_size": AT_LEAST_0,
    "decoder_start_token_id": ID,
    "forced_bos_token_id": ID,
    "forced_eos_token_id": ID,
    "bad_words_ids": SINGLE_TOKENS,
    "renormalize_logits": SWITCH,
}
# Files made by older versions of transformers have it although nobody chose it.
UNCHOSEN_MAX_LENGTH = 20
# What would change the tokens and is not computed here → its values without effect.
NOT_COMPUTED: dict[str, tuple[object, ...]] = {
    "repetition_penalty": (1,),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "exponential_decay_length_penalty": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": (),
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
    "penalty_alpha": (0,),
    "guidance_scale": (1,),
    "stop_strings": ([],),
}


def _is_one_token(value: object) -> bool:
    return isinstance(value, list) and len(value) == 1 and type(value[0]) is int and value[0] >= 0


def search_settings(
    stored: Mapping[str, Any], given: Mapping[str, Any], file: str = GENERATION_CONFIG
) -> dict[str, Any]:
    """The values of ``RULES`` that a call or else its checkpoint gives.

    Args:
        stored: the contents of generation_config.json, or of config.json.
        given: a call's arguments; None: as stored.
        file: the name of the file that has the stored settings.
    Raises: ValueError for a value that is not what its rule says, and for a stored setting that changes the tokens and
        is not computed here.
    """
    for name in ("max_new_tokens", "num_beams"):
        value = given.get(name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    known = {
        name: stored[name]
        for name in RULES
        if stored.get(name) is not None
        and (name, stored[name]) != ("max_length", UNCHOSEN_MAX_LENGTH)
    }
    check(known, RULES, f"{file}: ")
    for name, harmless in NOT_COMPUTED.items():
        value = stored.get(name)
        if value is not None and value not in harmless:
            raise ValueError(
                f"{file}: {name} must not be set, because generate does not compute it, got "
                f"{shown(value)}: remove it from the file, or generate with transformers"
            )
    arguments = {name: value for name, value in given.items() if value is not None}
    check(arguments, RULES, "")
    return known | arguments


def search_options(settings: Mapping[str, Any], start: int, ends: tuple[int, ...]) -> SearchOptions:
    """The options of a search. Lengths of the settings count the start token, numbers of new tokens do not.

    A number of new tokens stands above the length, as in transformers.
    """
    most = settings.get("max_new_tokens")
    if most is None:
        most = max(1, settings.get("max_length", MAX_NEW_TOKENS + 1) - 1)
    least = settings.get("min_new_tokens")
    if least is None:
        least = max(0, settings.get("min_length", 1) - 1)
    forced = {0: settings.get("forced_bos_token_id")}
    if settings.get("forced_eos_token_id") is not None:
        forced[most - 1] = settings["forced_eos_token_id"]
    rules = TokenRules(
        start=start,
        ends=ends,
        forced={place: token for place, token in forced.items() if token is not None},
        min_new_tokens=least,
        no_repeat_ngram_size=settings.get("no_repeat_ngram_size", 0),
        # As in transformers, a token that ends a target stays.
        left_out=tuple(
            token for (token,) in settings.get("bad_words_ids", ()) if token not in ends
        ),
        renormalize=settings.get("renormalize_logits", False),
    )
    return SearchOptions(
        max_new_tokens=most,
        num_beams=settings.get("num_beams", 1),
        length_penalty=settings.get("length_penalty", 1.0),
        early_stopping=settings.get("early_stopping", False),
        rules=rules,
    )
