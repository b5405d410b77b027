"""jina-embeddings-v3: XLM-RoBERTa with rotary positions instead of a table. Source: Sturua et al. 2024,
arXiv:2409.10173.

Checkpoints of the hub's remote code (model_type "xlm-roberta" with ``rotary_emb_base``, ``mixer.Wqkv``) are read too;
checkpoints are written in transformers' names. The remote code's checkpoints have a LoRA for each task, on every linear
layer and on the embeddings. They are written in folders of the PEFT library.
"""

import re

import torch
from torch import Tensor

from fastenc.models.architectures.modules import Biases, HeadSpec
from fastenc.models.architectures.names import BERT_CONFIG, QKV, Names, renamed_in_layer
from fastenc.models.architectures.nomic_bert import NomicBert
from fastenc.models.architectures.roberta import Roberta
from fastenc.models.architectures.values import (
    COUNT,
    NAMES,
    POSITIVE,
    PROBABILITY,
    TABLE,
    ConfigValues,
)
from fastenc.nn.layer_spec import AttentionSpec, FeedForwardSpec, LayerSpec, NormSpec
from fastenc.ops.activation import ACTIVATIONS

# The remote code's names in a layer → transformers'.
HUB_LAYER: Names = {
    "mixer.Wqkv": QKV,
    "mixer.out_proj": "self_attn.o_proj",
    "norm1": "post_attention_layernorm",
    "norm2": "post_mlp_layernorm",
}


class JinaEmbeddingsV3(NomicBert):
    name = "jina_embeddings_v3"
    class_prefix = "JinaEmbeddingsV3"
    prefix = "roberta"
    config_names = BERT_CONFIG
    defaults = {
        "eps": 1e-5,
        "pad_token_id": 1,
        "hidden_dropout_p": 0.1,
        "attention_dropout_p": 0.1,
        "max_positions": 8194,
    }
    new_config = {"type_vocab_size": 1, "pad_token_id": 1, "eps": 1e-5}
    has_pooler = True
    theta = 20_000.0
    lm_head = Roberta.lm_head
    classifier = Roberta.classifier
    question_answerer = HeadSpec({"out": "qa_outputs"}, dropout_after=False)
    task_keys = (
        *("lora_adaptations", "lora_rank", "lora_alpha", "lora_dropout_p", "task_instructions"),
        *("lora_main_params_trainable", "load_trained_adapters"),
    )
    rules = NomicBert.rules | {
        "lora_adaptations": NAMES,
        "lora_rank": COUNT,
        "lora_alpha": POSITIVE,
        "lora_dropout_p": PROBABILITY,
        "task_instructions": TABLE,
    }

    def describes(self, values: ConfigValues) -> bool:
        """Also the remote code's config.json, which says that it is an XLM-RoBERTa."""
        is_remote = values.get("model_type") == "xlm-roberta"
        rotary = values.get("position_embedding_type") == "rotary"
        return super().describes(values) or (is_remote and rotary)

    def normalize_config(self, values: ConfigValues) -> ConfigValues:
        if values["model_type"] == self.name:
            return values
        dropped = ("auto_map", "position_embedding_type", "rotary_emb_base")
        kept = {key: value for key, value in values.items() if key not in dropped}
        names = [name.removeprefix("XLMRoberta") for name in values.get("architectures") or []]
        theta = values.get("rotary_emb_base", 10_000.0)
        return {
            **kept,
            "model_type": self.name,
            "architectures": [self.class_prefix + name for name in names],
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        }

    def layer(self, config, number: int) -> LayerSpec:
        norm = NormSpec("layer", config.eps)
        return LayerSpec(
            AttentionSpec(config.num_heads, config.head_dim, config.head_dim**-0.5),
            FeedForwardSpec(config.intermediate_size, ACTIVATIONS[config.activation]),
            norm,
            norm,
        )

    def biases(self, config) -> Biases:
        return Biases()

    def names(self, config) -> Names:
        names = super().names(config)
        for i in range(config.num_layers):
            names |= {
                f"layers.{i}.up": f"layers.{i}.mlp.fc1",
                f"layers.{i}.down": f"layers.{i}.mlp.fc2",
            }
        return names

    def tasks(self, config) -> dict[str, str]:
        instructions = config.extra.get("task_instructions") or {}
        names = config.extra.get("lora_adaptations") or []
        if not config.extra.get("load_trained_adapters", True):
            return {}
        return {name: str(instructions.get(name, "")) for name in names}

    def lora_of_tasks(self, config) -> ConfigValues:
        extra = config.extra
        alpha, p = float(extra.get("lora_alpha", 1)), extra.get("lora_dropout_p", 0.0)
        return {"rank": extra.get("lora_rank", 4), "alpha": alpha, "dropout_p": p}

    def take_lora(self, config, tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        stored = {name: tensors.pop(name) for name in [*tensors] if ".lora_" in name}
        tasks = [*self.tasks(config)] if stored else []
        for name, tensor in stored.items():
            if tensor.shape[0] != len(tasks):
                raise ValueError(
                    f"{name} must have a matrix for each of the {len(tasks)} lora_adaptations of config.json, got "
                    f"shape {tuple(tensor.shape)}: do the two files belong together?"
                )
        return {
            task: {name: tensor[i] for name, tensor in stored.items()}
            for i, task in enumerate(tasks)
        }

    def renamed(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        name = name.replace(".parametrizations.weight.original", ".weight")
        lora = re.match(r"(.+)\.parametrizations\.weight\.0\.lora_([AB])$", name)
        if lora:
            return self._renamed_lora(lora[1], lora[2], tensor)
        name = name.removeprefix("roberta.").replace("emb_ln.", "embeddings.LayerNorm.")
        name = name.removeprefix("encoder.")
        return renamed_in_layer(name, tensor, HUB_LAYER)

    def _renamed_lora(self, module: str, letter: str, tensor: Tensor) -> dict[str, Tensor]:
        """A module's LoRA matrices (tasks, rows, columns) by PEFT's names. In the files q, k and v share A."""
        if tensor.dim() != 3:
            raise ValueError(
                f"{module}: lora_{letter} must be (tasks, rows, columns), got {tuple(tensor.shape)}: is the file "
                "damaged?"
            )
        weights = self.renamed(f"{module}.weight", torch.empty(3, device="meta"))
        modules = [name.removesuffix(".weight") for name in weights]
        if module.endswith("_embeddings"):
            return {f"{modules[0]}.lora_embedding_{letter}": tensor.transpose(1, 2)}
        parts = tensor.chunk(len(modules), 1) if letter == "B" else [tensor] * len(modules)
        names = [f"{each}.lora_{letter}.weight" for each in modules]
        return dict(zip(names, parts, strict=True))
