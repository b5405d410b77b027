"""Freezing lower layers, and learning rates that decrease towards them."""

import pytest
import torch

from fastenc.adapt import (
    Lora,
    PromptTuning,
    add_adaptation,
    freeze_encoder,
    trained_parameters,
)
from fastenc.models import Encoder, EncoderConfig, MaskedLM, SequenceClassifier, SpanClassifier
from fastenc.objectives import PairMaskedLM, SpanMaskedLM
from fastenc.packing import pack_sequences
from fastenc.text import LongTexts
from fastenc.train.optimizer import parameter_groups
from tests.helpers import families
from tests.helpers.checkpoints import save

CONFIG = EncoderConfig(
    vocab_size=40, hidden_size=16, num_layers=3, num_heads=2, intermediate_size=32, max_positions=16
)
BATCH = pack_sequences([[1, 5, 9, 2], [1, 7, 2]])


@pytest.fixture
def model():
    torch.manual_seed(0)
    return SequenceClassifier(CONFIG, num_labels=3)


@pytest.mark.parametrize("layers", [0, 2, None])
def test_frozen_part_gets_no_gradient_and_keeps_no_activations(model, layers):
    freeze_encoder(model, layers)
    model.train()
    frozen = CONFIG.num_layers if layers is None else layers
    requires = []
    for layer in model.encoder.layers:
        layer.register_forward_hook(
            lambda module, inputs, out: requires.append(out.x.requires_grad)
        )
    model(BATCH, torch.tensor([0, 2])).loss.backward()
    assert requires == [False] * frozen + [True] * (CONFIG.num_layers - frozen)
    for name, parameter in model.named_parameters():
        below = "embeddings" in name or any(f"layers.{i}." in name for i in range(frozen))
        assert (parameter.grad is None) == below, name


@pytest.mark.parametrize("layers", [1, None])
def test_what_a_family_adds_below_its_layers_is_frozen(layers):
    settings = families.config("deberta-v2", conv_kernel_size=3)
    model = SequenceClassifier(EncoderConfig.from_hf(settings.to_dict()), num_labels=3)
    freeze_encoder(model, layers)
    model.train()(BATCH, torch.tensor([0, 2])).loss.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    upper = {
        name for name in dict(model.named_parameters()) if name.startswith("encoder.layers.1.")
    }
    assert {name for name in trained if not name.startswith("head.")} == (
        upper if layers else set()
    )


@pytest.mark.parametrize(("layers", "kept"), [(1, {"layers.1", "layers.2"}), (None, set())])
def test_what_adaptations_add_below_is_frozen(model, layers, kept):
    add_adaptation(model, PromptTuning(2), "prompt")
    add_adaptation(model, Lora(2, targets=("word", "query", "pooler")), "lora")
    model.requires_grad_(True)
    freeze_encoder(model, layers)
    added = (n for n, p in model.named_parameters() if p.requires_grad and "adapt" in n)
    parts = {name.removeprefix("encoder.").split(".adaptations")[0] for name in added}
    pooler = {f"adapted.parts.lora.pooler.{matrix}.pooler" for matrix in "ab"}
    assert parts == kept | pooler


def test_counts_of_trained_parameters(model):
    everything = sum(p.numel() for p in model.parameters())
    assert trained_parameters(model) == (everything, everything)
    freeze_encoder(model)
    head = sum(p.numel() for p in [*model.head.parameters(), *model.encoder.pooler.parameters()])
    assert trained_parameters(model) == (head, everything)


def test_layers_that_do_not_exist_are_an_error(model):
    with pytest.raises(ValueError, match=r"from 0 to 3 layers can be frozen, .* got 4"):
        freeze_encoder(model, 4)


def test_rates_fall_from_the_top_layer_to_the_embeddings(model):
    scales = {}
    names = {id(p): name for name, p in model.named_parameters()}
    for group in parameter_groups(model, 0.1, layer_decay=0.5):
        for parameter in group["params"]:
            name = names.pop(id(parameter))
            scales[name] = group["lr_scale"]
            assert group["weight_decay"] == (0.1 if parameter.dim() >= 2 else 0.0)
    assert not names
    for name, scale in scales.items():
        if "embeddings" in name:
            assert scale == 0.5**3, name
        elif "layers." in name:
            assert scale == 0.5 ** (2 - int(name.split("layers.")[1][0])), name
        else:
            assert scale == 1.0, name


def test_rates_of_what_adaptations_add_are_those_of_what_it_is_added_to(model):
    add_adaptation(model, PromptTuning(2), "prompt")
    add_adaptation(model, Lora(2, targets=("word", "token_type", "query", "pooler")), "lora")
    model.requires_grad_(True)
    names, scales = {id(p): name for name, p in model.named_parameters()}, {}
    for group in parameter_groups(model, 0.1, layer_decay=0.5):
        scales |= {names[id(p)]: group["lr_scale"] for p in group["params"]}
    rates = {"prompts.": 0.125, ".word.": 0.125, ".token_type.": 0.125, ".pooler.": 1.0}
    rates |= {f"layers.{layer}.": 0.5 ** (2 - layer) for layer in range(3)}
    for part, rate in rates.items():
        of_part = {scale for n, scale in scales.items() if part in n and "adapt" in n}
        assert of_part == {rate}, part


@pytest.mark.parametrize(
    "make",
    [
        MaskedLM,
        PairMaskedLM,
        SpanMaskedLM,
        lambda config: SpanClassifier(config, num_labels=2),
        lambda config: SequenceClassifier(
            config, num_labels=2, long_texts=LongTexts(chunks="transformer")
        ),
    ],
    ids=["mlm", "pairs", "span", "span-ner", "chunks"],
)
def test_heads_have_the_highest_rate(make):
    model = make(CONFIG)
    below = {id(parameter) for parameter in model.encoder.parameters()}
    names = {id(p): n for n, p in model.named_parameters() if id(p) not in below}
    assert names
    for group in parameter_groups(model, 0.1, layer_decay=0.5):
        for parameter in group["params"]:
            if id(parameter) in names:
                assert group["lr_scale"] == 1.0, names[id(parameter)]


@pytest.mark.parametrize(
    ("family", "options"),
    [("deberta-v2", {}), ("deberta-v2", {"conv_kernel_size": 3}), ("megatron-bert", {})],
    ids=["deberta-v2", "convolution", "megatron-bert"],
)
def test_rates_of_what_is_frozen_before_the_layers_are_those_of_the_embeddings(
    family, options, tmp_path
):
    encoder = Encoder.from_pretrained(save(families.model(family, **options), tmp_path))
    freeze_encoder(encoder, 0)
    below = {id(p) for p in encoder.parameters() if not p.requires_grad}
    freeze_encoder(encoder, 1)
    lowest = {id(p) for p in encoder.parameters() if not p.requires_grad} - below
    encoder.requires_grad_(True)
    depth, scales = len(encoder.layers), {}
    for group in parameter_groups(encoder, 0.1, layer_decay=0.5):
        scales |= {id(p): group["lr_scale"] for p in group["params"]}
    assert {scales[each] for each in below} == {0.5**depth}
    assert {scales[each] for each in lowest} == {0.5 ** (depth - 1)}


def test_encoder_itself_can_be_frozen():
    encoder = Encoder(CONFIG)
    freeze_encoder(encoder, 1)
    assert not encoder.layers[0].qkv.weight.requires_grad
    assert encoder.layers[1].qkv.weight.requires_grad
