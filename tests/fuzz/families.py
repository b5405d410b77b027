"""Families with random configurations over their switches: results and gradients are those of transformers."""

import tempfile
from pathlib import Path
from random import Random
from typing import Any

import torch

from tests.helpers.checkpoints import save
from tests.helpers.families import BY_NAME, FAMILIES, model
from tests.helpers.family_examples import (
    MODEL_CLASSES,
    WITH_QUESTIONS,
    Example,
    assert_same_results,
)

Values = tuple[Any, ...]
ACTIVATIONS = ("gelu", "gelu_new", "relu", "silu")
BOTH = (True, False)
COMMON: dict[str, Values] = {
    "hidden_act": ACTIVATIONS,
    "layer_norm_eps": (1e-12, 1e-5, 1e-2),
    "tie_word_embeddings": BOTH,
}
TERMS: Values = (["c2p", "p2c"], ["c2p"], ["p2c"], "p2c|c2p", [], None)
DEBERTA: dict[str, Values] = COMMON | {
    "relative_attention": (True, True, False),
    "position_biased_input": BOTH,
    "pos_att_type": TERMS,
    "max_relative_positions": (-1, 8, 20, 40),
    "type_vocab_size": (0, 2),
    "embedding_size": (32, 16),
    "pooler_hidden_act": ("gelu", "tanh", "relu"),
    "legacy": BOTH,
}
ROPE: Values = tuple({"rope_type": "default", "rope_theta": theta} for theta in (50.0, 1e4, 1e6))
# Of families with 4 heads.
GROUPED: dict[str, Values] = {
    "num_key_value_heads": (1, 2, 4),
    "head_dim": (8, 16, 32),
    "hidden_act": ACTIVATIONS,
    "rms_norm_eps": (1e-6, 1e-2),
    "attention_bias": BOTH,
    "rope_parameters": ROPE,
}
LAYER_TYPES: Values = tuple(
    [f"{first}_attention", f"{second}_attention"]
    for first in ("full", "sliding")
    for second in ("full", "sliding")
)
# Family → switch → values.
SWITCHES: dict[str, dict[str, Values]] = {
    "deberta": DEBERTA,
    "deberta-v2": DEBERTA
    | {
        "position_buckets": (8, 4, -1),
        "share_att_key": BOTH,
        "norm_rel_ebd": ("layer_norm", "none"),
        "conv_kernel_size": (0, 3, 5),
        "conv_act": ("tanh", "gelu", "relu"),
        "conv_groups": (1, 2),
    },
    # transformers fails with a window of 2.
    "longformer": COMMON
    | {"attention_window": (4, 8, 64, [4, 12], [64, 4]), "type_vocab_size": (1, 2)},
    "big_bird": COMMON | {"use_bias": BOTH, "rescale_embeddings": BOTH, "type_vocab_size": (2, 3)},
    "big_bird-sparse": COMMON
    | {"use_bias": BOTH, "block_size": (2, 3, 4), "num_random_blocks": (1, 2)},
    "ernie": COMMON
    | {"use_task_id": BOTH, "task_type_vocab_size": (1, 16), "type_vocab_size": (2, 4)},
    "megatron-bert": COMMON,
    "rembert": {name: values for name, values in COMMON.items() if name != "tie_word_embeddings"}
    | {"input_embedding_size": (32, 16), "output_embedding_size": (16, 40)},
    "roformer": COMMON | {"embedding_size": (32, 16), "type_vocab_size": (2, 4)},
    "eurobert-grouped": GROUPED
    | {
        "mlp_bias": BOTH,
        "classifier_pooling": ("bos", "mean", "late"),
        "tie_word_embeddings": BOTH,
    },
    "jina_embeddings_v3": COMMON | {"rope_parameters": ROPE, "type_vocab_size": (1, 2)},
    "esm": {name: values for name, values in COMMON.items() if name != "hidden_act"}
    | {
        "token_dropout": BOTH,
        "emb_layer_norm_before": BOTH,
        "position_embedding_type": ("rotary", "rotary", "absolute"),
        "rope_theta": (50.0, 1e4),
    },
    "esmc": {
        "hidden_act": ACTIVATIONS,
        "num_hidden_layers": (1, 2, 5),
        "attention_bias": BOTH,
        "mlp_bias": BOTH,
        "rope_parameters": ROPE,
    },
    "qwen3": GROUPED
    | {
        "token_classification_bias": BOTH,
        "use_sliding_window": BOTH,
        "sliding_window": (1, 4, 80),
        "max_window_layers": (0, 1, 2),
    },
    "gemma3": {name: values for name, values in GROUPED.items() if name != "rope_parameters"}
    | {
        "hidden_activation": ACTIVATIONS,
        "layer_types": LAYER_TYPES,
        "sliding_window": (2, 5, 9, 80),
        "query_pre_attn_scalar": (16, 100),
    },
}
del SWITCHES["gemma3"]["hidden_act"]
SWITCHES["embedding_gemma2"] = SWITCHES["gemma3"] | {
    "layer_types": (["sliding_attention", "full_attention"], ["full_attention"] * 2),
    "global_head_dim": (16, 48),
    "num_global_key_value_heads": (1, 2, 4),
    "hidden_size_per_layer_input": (16, 24),
    "embedding_dim": (16, 40),
}
del SWITCHES["embedding_gemma2"]["query_pre_attn_scalar"]
SWITCHES["ultrabert"] = GROUPED | {
    "rope_parameters": tuple(
        {"sliding_attention": one, "full_attention": other} for one in ROPE for other in ROPE
    ),
    "mlp_bias": BOTH,
    "classifier_pooling": ("cls", "mean"),
    "layer_types": tuple([*types, "full_attention"] for types in LAYER_TYPES),
    "sliding_window": (0, 1, 4, 80),
    "prediction_head_size": (16, 48),
    "tie_word_embeddings": BOTH,
}


def tasks_of(family: str) -> tuple[str, ...]:
    if BY_NAME[family].no_heads:
        return ("Model", *BY_NAME[family].heads)
    if family == "big_bird-sparse":
        return ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
    assert family in FAMILIES
    return tuple(
        task for task in MODEL_CLASSES if task != "ForQuestionAnswering" or family in WITH_QUESTIONS
    )


def check(family: str, rng: Random) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for models so small, threads beside another process mostly wait
    try:
        _check(family, rng)
    finally:
        torch.set_num_threads(threads)


def _check(family: str, rng: Random) -> None:
    task = rng.choice(tasks_of(family))
    changes = {
        name: rng.choice(values) for name, values in SWITCHES[family].items() if rng.random() < 0.6
    }
    if not changes.get("legacy", True):  # this head multiplies vectors of the layers' width
        changes.pop("embedding_size", None)
    theirs = model(family, task, **changes)
    seed = rng.getrandbits(30)
    example = Example(
        family, task, seed, global_tokens=family == "longformer" and rng.random() < 0.5
    )
    try:
        if family == "big_bird-sparse":  # a packed text has its own blocks, not the padded batch's
            assert_same_results(theirs, example)
            return
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            assert_same_results(theirs, example, folder=save(theirs, Path(folder)))
    except Exception as error:
        raise AssertionError(f"{family}{task} {changes}: {error}") from error
