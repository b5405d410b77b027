"""How each family names its configuration and its weights.

Inside, every encoder has the same canonical names with q, k and v in one matrix; a checkpoint keeps its family's
names. A canonical name maps to one name, or to three whose tensors are stacked.
"""

from dataclasses import dataclass

_BERT_CONFIG = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "type_vocab_size": "type_vocab_size",
    "activation": "hidden_act",
    "eps": "layer_norm_eps",
    "hidden_dropout_p": "hidden_dropout_prob",
    "attention_dropout_p": "attention_probs_dropout_prob",
    "classifier_dropout_p": "classifier_dropout",
    "initializer_range": "initializer_range",
}
_DISTILBERT_CONFIG = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_layers": "n_layers",
    "num_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "max_positions": "max_position_embeddings",
    "activation": "activation",
    "hidden_dropout_p": "dropout",
    "attention_dropout_p": "attention_dropout",
    "classifier_dropout_p": "seq_classif_dropout",
    "initializer_range": "initializer_range",
}
_EMBEDDINGS = {
    "embeddings.word": "embeddings.word_embeddings",
    "embeddings.position": "embeddings.position_embeddings",
    "embeddings.token_type": "embeddings.token_type_embeddings",
    "embeddings.norm": "embeddings.LayerNorm",
    "embeddings.projection": "embeddings_project",
}
_BERT_LAYER: dict[str, str | tuple[str, ...]] = {
    "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention_out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "out_norm": "output.LayerNorm",
}
_DISTILBERT_LAYER: dict[str, str | tuple[str, ...]] = {
    "qkv": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    "attention_out": "attention.out_lin",
    "attention_norm": "sa_layer_norm",
    "up": "ffn.lin1",
    "down": "ffn.lin2",
    "out_norm": "output_layer_norm",
}


@dataclass(frozen=True)
class Family:
    """One family's names and habits.

    Fields:
        prefix: what precedes the encoder's names in a checkpoint with a head.
        layers, layer: where the layers are, and the names in one.
        lm_head, classifier: names of the heads' parts, without the prefix.
        classifier_kind: "pooler" (a linear layer over the pooler) or the activation of a dense layer of its own.
        class_prefix: what precedes a model class's ``architecture`` in the class names of transformers.
        type_vocab_size: token types of a new model.
    """

    prefix: str
    config_names: dict[str, str]
    layers: str
    layer: dict[str, str | tuple[str, ...]]
    lm_head: dict[str, str]
    classifier: dict[str, str]
    classifier_kind: str
    class_prefix: str
    has_pooler: bool = True
    drops_attention_output: bool = True
    positions_after_padding: bool = False
    default_pad: int = 0
    default_eps: float = 1e-12
    default_classifier_dropout: float | None = None
    type_vocab_size: int = 2

    def names(self, num_layers: int) -> dict[str, str | tuple[str, ...]]:
        """Canonical module name → the family's, for the encoder."""
        table: dict[str, str | tuple[str, ...]] = dict(_EMBEDDINGS)
        for i in range(num_layers):
            for ours, theirs in self.layer.items():
                place = f"{self.layers}.{i}."
                table[f"layers.{i}.{ours}"] = (
                    place + theirs
                    if isinstance(theirs, str)
                    else tuple(place + name for name in theirs)
                )
        table["pooler"] = "pooler.dense"
        return table


def _roberta(class_prefix: str) -> Family:
    return Family(
        prefix="roberta",
        config_names=_BERT_CONFIG,
        layers="encoder.layer",
        layer=_BERT_LAYER,
        lm_head={
            "dense": "lm_head.dense",
            "norm": "lm_head.layer_norm",
            "decoder": "lm_head.decoder",
            "bias": "lm_head.bias",
        },
        classifier={"dense": "classifier.dense", "out": "classifier.out_proj"},
        classifier_kind="tanh",
        class_prefix=class_prefix,
        positions_after_padding=True,
        default_pad=1,
        type_vocab_size=1,
    )


FAMILIES = {
    "bert": Family(
        prefix="bert",
        config_names=_BERT_CONFIG,
        layers="encoder.layer",
        layer=_BERT_LAYER,
        lm_head={
            "dense": "cls.predictions.transform.dense",
            "norm": "cls.predictions.transform.LayerNorm",
            "decoder": "cls.predictions.decoder",
            "bias": "cls.predictions.bias",
        },
        classifier={"out": "classifier"},
        classifier_kind="pooler",
        class_prefix="Bert",
    ),
    "roberta": _roberta("Roberta"),
    "xlm-roberta": _roberta("XLMRoberta"),
    "distilbert": Family(
        prefix="distilbert",
        config_names=_DISTILBERT_CONFIG,
        layers="transformer.layer",
        layer=_DISTILBERT_LAYER,
        lm_head={
            "dense": "vocab_transform",
            "norm": "vocab_layer_norm",
            "decoder": "vocab_projector",
            "bias": "vocab_projector.bias",
        },
        classifier={"dense": "pre_classifier", "out": "classifier"},
        classifier_kind="relu",
        class_prefix="DistilBert",
        has_pooler=False,
        drops_attention_output=False,
        default_classifier_dropout=0.2,
        type_vocab_size=0,
    ),
    "electra": Family(
        prefix="electra",
        config_names={**_BERT_CONFIG, "embedding_size": "embedding_size"},
        layers="encoder.layer",
        layer=_BERT_LAYER,
        lm_head={
            "dense": "generator_predictions.dense",
            "norm": "generator_predictions.LayerNorm",
            "decoder": "generator_lm_head",
            "bias": "generator_lm_head.bias",
        },
        classifier={"dense": "classifier.dense", "out": "classifier.out_proj"},
        classifier_kind="gelu",
        class_prefix="Electra",
        has_pooler=False,
    ),
}


def family_named(name: str | None) -> Family:
    """Raises: ValueError listing the families that exist."""
    if name not in FAMILIES:
        raise ValueError(
            f"model_type must be one of {sorted(FAMILIES)}, got {name!r}: "
            "is config.json that of an encoder of these families?"
        )
    return FAMILIES[name]
