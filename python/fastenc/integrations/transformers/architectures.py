"""Where the supported Hugging Face classes keep what the fused forward needs."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from fastenc.nn.encoder_layer import ACTIVATIONS, LayerOptions, LayerWeights

BASE_MODELS = {
    "BertModel": "bert",
    "RobertaModel": "roberta",
    "XLMRobertaModel": "roberta",
    "DistilBertModel": "distilbert",
    "ElectraModel": "bert",
}


# Their embeddings: dropout(LayerNorm(word + token type + position)).
EMBEDDINGS = {
    "BertEmbeddings",
    "RobertaEmbeddings",
    "XLMRobertaEmbeddings",
    "Embeddings",
    "ElectraEmbeddings",
}


class LayerParts(NamedTuple):
    """The modules of one transformer layer, in the canonical roles."""

    query: Any
    key: Any
    value: Any
    attention_out: Any
    attention_norm: Any
    up: Any
    down: Any
    out_norm: Any
    attention_dropout: Any
    attention_out_dropout: Any
    down_dropout: Any
    # The modules around them, whose own forward the fused one stands in for.
    containers: tuple[nn.Module, ...]

    def linears(self) -> tuple[nn.Module, ...]:
        return (self.query, self.key, self.value, self.attention_out, self.up, self.down)

    def norms(self) -> tuple[nn.Module, ...]:
        return (self.attention_norm, self.out_norm)

    def weights(self) -> LayerWeights:
        """The live parameters, read at every call."""
        return LayerWeights(
            (self.query.weight, self.key.weight, self.value.weight),
            (self.query.bias, self.key.bias, self.value.bias),
            self.attention_out.weight,
            self.attention_out.bias,
            self.attention_norm.weight,
            self.attention_norm.bias,
            self.up.weight,
            self.up.bias,
            self.down.weight,
            self.down.bias,
            self.out_norm.weight,
            self.out_norm.bias,
        )

    def options(self, num_heads: int, activation: str) -> LayerOptions:
        p = lambda module: module.p if module is not None and module.training else 0.0
        return LayerOptions(
            num_heads,
            activation,
            self.attention_norm.eps,
            p(self.attention_dropout),
            p(self.attention_out_dropout),
            p(self.down_dropout),
        )


def _bert_layer(layer) -> LayerParts:
    attention, out = layer.attention.self, layer.attention.output
    return LayerParts(
        attention.query,
        attention.key,
        attention.value,
        out.dense,
        out.LayerNorm,
        layer.intermediate.dense,
        layer.output.dense,
        layer.output.LayerNorm,
        attention.dropout,
        out.dropout,
        layer.output.dropout,
        (layer, layer.attention, attention, out, layer.intermediate, layer.output),
    )


def _distilbert_layer(layer) -> LayerParts:
    attention, ffn = layer.attention, layer.ffn
    return LayerParts(
        attention.q_lin,
        attention.k_lin,
        attention.v_lin,
        attention.out_lin,
        layer.sa_layer_norm,
        ffn.lin1,
        ffn.lin2,
        layer.output_layer_norm,
        attention.dropout,
        None,
        ffn.dropout,
        (layer, attention, ffn),
    )


class EmbeddingParts(NamedTuple):
    """The modules of the embeddings, in the canonical roles; families without token types have none of theirs."""

    word: Any
    position: Any
    token_type: Any
    norm: Any
    dropout: Any

    def tables(self) -> tuple[nn.Module, ...]:
        return tuple(table for table in self[:3] if table is not None)


def embedding_parts(base: Any) -> EmbeddingParts:
    """Raises: AttributeError if the embeddings lack a part."""
    module = base.embeddings
    return EmbeddingParts(
        module.word_embeddings,
        module.position_embeddings,
        module.token_type_embeddings if takes_token_types(base) else None,
        module.LayerNorm,
        module.dropout,
    )


def layers_of(base: Any) -> list[nn.Module]:
    """The transformer layers of a base model, first to last."""
    if BASE_MODELS[type(base).__name__] == "distilbert":
        return list(base.transformer.layer)
    return list(base.encoder.layer)


def parts_of(base: Any, layer: Any) -> LayerParts:
    distilbert = BASE_MODELS[type(base).__name__] == "distilbert"
    return _distilbert_layer(layer) if distilbert else _bert_layer(layer)


def stack_of(base: Any) -> nn.Module:
    """The module that holds the layers."""
    return base.transformer if BASE_MODELS[type(base).__name__] == "distilbert" else base.encoder


def num_heads(base: Any) -> int:
    return base.config.num_attention_heads


def activation(base: Any) -> str | None:
    """The activation's name if the fused layer knows it."""
    name = getattr(base.config, "hidden_act", None) or getattr(base.config, "activation", None)
    return name if isinstance(name, str) and name in ACTIVATIONS else None


def takes_token_types(base: Any) -> bool:
    return hasattr(base.embeddings, "token_type_embeddings")


# Masked-LM classes: everything before the decoder as a function of token vectors, and the decoder.
def _bert_head(model) -> tuple[Callable[[Tensor], Tensor], nn.Module]:
    predictions = model.cls.predictions
    return predictions.transform, predictions.decoder


def _roberta_head(model):
    head = model.lm_head
    gelu = nn.functional.gelu
    return lambda hidden: head.layer_norm(gelu(head.dense(hidden))), head.decoder


def _distilbert_head(model):
    def transform(hidden: Tensor) -> Tensor:
        return model.vocab_layer_norm(model.activation(model.vocab_transform(hidden)))

    return transform, model.vocab_projector


def _electra_head(model):
    return model.generator_predictions, model.generator_lm_head


MASKED_LM_HEADS = {
    "BertForMaskedLM": _bert_head,
    "RobertaForMaskedLM": _roberta_head,
    "XLMRobertaForMaskedLM": _roberta_head,
    "DistilBertForMaskedLM": _distilbert_head,
    "ElectraForMaskedLM": _electra_head,
}
