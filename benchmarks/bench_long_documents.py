"""Models of long documents on a CPU: a text of 4,096 tokens through two layers of base size, forward and backward.

Random weights, no dropout, in float32, in bfloat16 and in int8. Longformer's first token is global, as in
classification. BigBird's blocks are those of evaluation. The states, and the gradient of the first layer's query
weights, are compared with Hugging Face's in float32 before anything is timed.
"""

import tempfile
from functools import partial

import torch

from benchmarks._compare import compare
from benchmarks._device import ON_GPU
from benchmarks._formats import (
    OWN_AUTOCAST,
    THEIRS_AUTOCAST,
    frozen_formats,
    largest_error,
    their_autocast,
)
from benchmarks._products import FLOOR
from benchmarks._results import run_groups
from fastenc import Encoder, patch
from fastenc.ops.gemm import gemm
from fastenc.packing import pack

TABLES = {"long_documents": "Models of long documents: 4,096 tokens, two layers of base size"}
NOTE = (
    "One text, forward as in inference, and forward with backward; in float32 where nothing else is said. Results in "
    "bfloat16 and int8 may be 5 % from float32's. The products alone are those that fastenc computes: q, k, v, the "
    "attention's output and the feed-forward layer, with both gradients of each."
)
LENGTH, LAYERS, HIDDEN, INNER = 4096, 2, 768, 3072
SIZES = dict(
    vocab_size=1000,
    num_hidden_layers=LAYERS,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
# (class, class of its configuration, changes to the configuration's defaults)
MODELS = {
    f"Longformer, window {window}": (
        "LongformerModel",
        "LongformerConfig",
        dict(attention_window=[window] * LAYERS, max_position_embeddings=LENGTH + 2),
    )
    for window in (512, 64)
}
MODELS["BigBird, block_sparse"] = (
    "BigBirdModel",
    "BigBirdConfig",
    dict(attention_type="block_sparse", max_position_embeddings=LENGTH),
)


def transformers_model(name: str) -> torch.nn.Module:
    """A model with random weights, the same at every call."""
    import transformers

    model_class, config_class, changes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**SIZES, **changes)
    return getattr(transformers, model_class)(config, add_pooling_layer=False).eval()


def products(with_gradients: bool) -> None:
    """The matrix products of the layers and nothing between them."""
    for _ in range(LAYERS):
        for inner, outer in (
            (HIDDEN, 3 * HIDDEN),
            (HIDDEN, HIDDEN),
            (HIDDEN, INNER),
            (INNER, HIDDEN),
        ):
            x, weight = torch.zeros(LENGTH, inner), torch.zeros(outer, inner)
            y = gemm(x, weight.t())
            if with_gradients:
                gemm(y, weight)
                gemm(y.t(), x)


def encoder_of(model: torch.nn.Module) -> Encoder:
    """fastenc's encoder with the weights of a transformers model."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return Encoder.from_pretrained(folder)


def measure(name: str) -> dict[str, dict]:
    theirs = transformers_model(name)
    models = {
        "Hugging Face": theirs,
        "Hugging Face, patched by fastenc": patch(transformers_model(name)),
        "fastenc": encoder_of(theirs),
    }
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, SIZES["vocab_size"], (1, LENGTH), generator=generator)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if name.startswith("Longformer"):
        given["global_attention_mask"] = torch.zeros_like(ids)
        given["global_attention_mask"][:, 0] = 1
    batch = pack(**given)
    dy = torch.randn(LENGTH, HIDDEN, generator=generator)

    def states(model: torch.nn.Module) -> torch.Tensor:
        if isinstance(model, Encoder):
            return model(batch).last_hidden_state
        return model(**given).last_hidden_state[0]

    def forward(model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return states(model)

    def step(model: torch.nn.Module, autocast: bool = False) -> torch.Tensor:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = states(model)
        y.backward(dy.to(y.dtype))
        if isinstance(model, Encoder):
            return model.layers[0].qkv.weight.grad[:HIDDEN]
        return model.get_parameter(QUERY).grad

    inferring = models | frozen_formats(theirs, models["fastenc"])
    forwards = {
        provider: model if isinstance(model, str) else partial(forward, model)
        for provider, model in inferring.items()
    }
    forwards[FLOOR] = partial(products, with_gradients=False)
    steps = {provider: partial(step, model) for provider, model in models.items()}
    steps[THEIRS_AUTOCAST] = their_autocast(partial(step, theirs, autocast=True))
    steps[OWN_AUTOCAST] = partial(step, models["fastenc"], autocast=True)
    steps[FLOOR] = partial(products, with_gradients=True)
    rows = {}
    for direction, providers in (("forward", forwards), ("forward and backward", steps)):
        truth = providers["Hugging Face"]().clone()

        def check(provider: str, result: torch.Tensor | None, truth=truth) -> str | None:
            if result is None:
                return None
            error = ((result.float() - truth).norm() / truth.norm()).item()
            return None if error < largest_error(provider, 1e-4) else f"relative error {error:.2g}"

        rows[f"{name}, {direction}"] = compare(
            providers, baseline="Hugging Face", check=check, seconds=12, min_rounds=3
        )
    return rows


QUERY = "encoder.layer.0.attention.self.query.weight"


def main() -> None:
    if ON_GPU:
        print(
            "a benchmark of CPUs: global_window_attention and block_sparse_attention run on a GPU"
        )
        return
    run_groups("long_documents", {name: partial(measure, name) for name in MODELS})


if __name__ == "__main__":
    main()
