"""Whole encoders of the families: batches of texts of real lengths, random weights of base size.

On a CPU batches of 32 texts, in float32, in bfloat16 and in int8. On a GPU some of the families, 128 texts, in
bfloat16. In bfloat16, inference has bfloat16 weights, and training has float32 weights under autocast.

Random weights do, because speed does not depend on their values. Hugging Face runs with its "sdpa" attention, or with
"eager" where the family has no other, such as MPNet and DeBERTa. Batches come in the corpus's order. Before anything
is timed, results are compared with Hugging Face's in float32 at every real token. A training step is forward and
backward of one batch, without dropout, so that the gradients of the word embeddings can be compared.
"""

import tempfile
from functools import partial
from typing import NamedTuple

import torch

from benchmarks._compare import compare
from benchmarks._device import DEVICE, ON_GPU
from benchmarks._formats import (
    OWN_AUTOCAST,
    THEIRS_AUTOCAST,
    frozen_formats,
    in_bfloat16,
    largest_error,
    their_autocast,
)
from benchmarks._peers import padded
from benchmarks._products import FLOOR, Products
from benchmarks._results import run_groups
from benchmarks.lengths import lengths
from fastenc import compile_inference, patch
from fastenc.graphs import InferenceRunner
from fastenc.models import Encoder
from fastenc.packing import PackedBatch, pack_sequences

BATCH = 128 if ON_GPU else 32
TEXTS = 2 * BATCH
TOLERANCE = 5e-2 if ON_GPU else 1e-4  # bfloat16 through up to 22 layers
# Of gradients, in float32 and in the other formats. Rounding moves some inputs of T5's ReLU across 0, where its
# gradient jumps: in float32, transformers' own gradients are 4e-4 from those in float64.
GRADIENT_TOLERANCES = {"t5": (1e-3, 1e-1)}
ON_GPUS = ("deberta-v3", "modernbert")
VOCABULARY = 32000
# (class, class of its configuration, changes to the configuration's defaults), each as its base checkpoint
BASE = {
    "bert": ("BertModel", "BertConfig", {}),
    "mpnet": ("MPNetModel", "MPNetConfig", {"max_position_embeddings": 514}),
    "deberta-v3": (
        "DebertaV2Model",
        "DebertaV2Config",
        dict(
            hidden_size=768,
            num_hidden_layers=12,
            num_attention_heads=12,
            intermediate_size=3072,
            relative_attention=True,
            position_buckets=256,
            norm_rel_ebd="layer_norm",
            share_att_key=True,
            pos_att_type="p2c|c2p",
            position_biased_input=False,
        ),
    ),
    "albert": (
        "AlbertModel",
        "AlbertConfig",
        dict(hidden_size=768, num_attention_heads=12, intermediate_size=3072),
    ),
    "t5": ("T5EncoderModel", "T5Config", dict(d_model=768, d_ff=3072, num_layers=12, num_heads=12)),
    "modernbert": ("ModernBertModel", "ModernBertConfig", {}),
    # EuroBERT-210m; here and below with another number of tokens in the vocabulary.
    "eurobert": (
        "EuroBertModel",
        "EuroBertConfig",
        dict(
            vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2, mask_token_id=3
        ),
    ),
    # Six layers of larger encoders: of RemBERT, jina-embeddings-v3, ESM-2 (150M), ESM C (300M), Qwen3-0.6B,
    # EmbeddingGemma-300m and EmbeddingGemma 2.
    "rembert": (
        "RemBertModel",
        "RemBertConfig",
        dict(vocab_size=VOCABULARY, num_hidden_layers=6),
    ),
    "jina-embeddings-v3": (
        "JinaEmbeddingsV3Model",
        "JinaEmbeddingsV3Config",
        dict(vocab_size=VOCABULARY, num_hidden_layers=6),
    ),
    "esm2": (
        "EsmModel",
        "EsmConfig",
        dict(
            vocab_size=VOCABULARY,
            hidden_size=640,
            num_hidden_layers=6,
            num_attention_heads=20,
            intermediate_size=2560,
            pad_token_id=1,
            mask_token_id=32,
            token_dropout=True,
            emb_layer_norm_before=False,
            position_embedding_type="rotary",
        ),
    ),
    "esmc": (
        "EsmcModel",
        "EsmcConfig",
        dict(
            vocab_size=VOCABULARY,
            hidden_size=960,
            num_hidden_layers=6,
            num_attention_heads=15,
            intermediate_size=2560,
        ),
    ),
    "qwen3": (
        "Qwen3Model",
        "Qwen3Config",
        dict(
            vocab_size=VOCABULARY,
            hidden_size=1024,
            num_hidden_layers=6,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            intermediate_size=3072,
            is_causal=False,
            use_cache=False,
        ),
    ),
    "gemma3": (
        "Gemma3TextModel",
        "Gemma3TextConfig",
        dict(
            vocab_size=VOCABULARY,
            hidden_size=768,
            num_hidden_layers=6,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=256,
            intermediate_size=1152,
            sliding_window=512,
            use_bidirectional_attention=True,
            use_cache=False,
        ),
    ),
    "embedding_gemma2": (
        "EmbeddingGemma2TextModel",
        "EmbeddingGemma2TextConfig",
        dict(vocab_size=VOCABULARY, num_hidden_layers=6),
    ),
}
LONG = ("modernbert",)  # families that read 2,048 tokens
TRAINED = ("lengths of SST-2",)  # corpora of training steps
PATCHED = "Hugging Face, patched by fastenc"
GRAPHS = "fastenc.compile_inference"  # on a GPU only
TRAINED_LONGER = ("deberta-v3",)  # families with a training step at lengths 10 to 256 too


def transformers_model(family: str) -> torch.nn.Module:
    """A model with random weights, the same at every call."""
    import transformers

    model_class, config_class, sizes = BASE[family]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**sizes)
    for attention in ("sdpa", "eager"):
        config._attn_implementation = attention
        try:
            model = getattr(transformers, model_class)(config).eval()
        except ValueError:  # the family has no sdpa
            continue
        if family == "embedding_gemma2":
            _scale_queries(model)
        return model.to(DEVICE)
    raise RuntimeError(f"{model_class} takes neither sdpa nor eager attention")


@torch.no_grad()
def _scale_queries(model: torch.nn.Module) -> None:
    """Scale the queries of EmbeddingGemma 2, whose scores are not divided by the root of a head's width.

    The norms' weights can do that. With weights of 1 almost all of a token's attention goes to one key, and rounding
    decides to which.
    """
    for name, norm in model.named_modules():
        if name.endswith("q_norm"):
            norm.weight.fill_(norm.weight.numel() ** -0.5)


def random_lengths(low: int, high: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(low, high + 1, (count,), generator=generator).tolist()


def corpora(family: str) -> dict[str, list[int]]:
    """Lengths of the texts of each corpus."""
    sst2 = lengths("SST-2", 16 * TEXTS)[:TEXTS]
    longest = 128 if ON_GPU else 256
    lengths_by_name = {
        "lengths of SST-2": sst2,
        f"lengths 10 to {longest}": random_lengths(10, longest, BATCH),
    }
    if ON_GPU:
        lengths_by_name["16 texts of 512"] = [512] * 16
    if family in LONG:
        texts = 16 if ON_GPU else 5
        lengths_by_name["lengths 10 to 2048"] = random_lengths(10, 2048, texts)
    return lengths_by_name


def is_trained(family: str, corpus: str) -> bool:
    """On a GPU every corpus has a training step."""
    longer = family in TRAINED_LONGER and corpus == "lengths 10 to 256"
    return ON_GPU or longer or corpus in TRAINED


def measure(family: str) -> dict[str, dict]:
    model, patched = transformers_model(family), patch(transformers_model(family))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        encoder = Encoder.from_pretrained(folder).eval().to(DEVICE)
    trained = {"Hugging Face": model, PATCHED: patched, "fastenc": encoder}
    batches = {corpus: batches_of(sizes) for corpus, sizes in corpora(family).items()}
    # Before the copies in other formats are made: beside them, 24 GB are too few for Hugging Face's longest step.
    steps = {
        f"{family}, {corpus}, training step": training_step(
            trained, batches[corpus][0], *GRADIENT_TOLERANCES.get(family, ())
        )
        for corpus in batches
        if is_trained(family, corpus)
    }
    for each in trained.values():
        each.zero_grad()
    if ON_GPU:
        own = in_bfloat16(encoder)
        inferring = {
            "Hugging Face": in_bfloat16(model),
            PATCHED: patch(in_bfloat16(model)),
            "fastenc": own,
            GRAPHS: compile_inference(own, max_tokens=BATCH * 512),
        }
    else:
        inferring = trained | frozen_formats(model, encoder)
    forwards = {
        f"{family}, {corpus}": inference(inferring, model, batches[corpus]) for corpus in batches
    }
    rows = forwards | steps
    return {name: rows[name] for name in sorted(rows)}


class Batch(NamedTuple):
    """A batch in both layouts. ``real``: bool (batch, length), False at padding."""

    inputs: dict[str, torch.Tensor]
    real: torch.Tensor
    packed: PackedBatch


def batches_of(sizes: list[int]) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(1000, 30000, (n,), generator=generator).tolist()
    sequences = [draw(size) for size in sizes]
    batches = []
    for start in range(0, len(sequences), BATCH):
        chunk = sequences[start : start + BATCH]
        inputs = {name: value.to(DEVICE) for name, value in padded(chunk).items()}
        del inputs["token_type_ids"]
        real = inputs["attention_mask"].bool()
        batches.append(Batch(inputs, real, pack_sequences(chunk).to(DEVICE)))
    return batches


def states(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The states of the real tokens."""
    if isinstance(model, (Encoder, InferenceRunner)):
        return model(batch.packed).last_hidden_state
    return model(**batch.inputs).last_hidden_state[batch.real]


def near(
    provider: str, result: torch.Tensor, truth: torch.Tensor, *tolerances: float
) -> str | None:
    error = ((result.float() - truth).norm() / truth.norm()).item()
    right = error < largest_error(provider, *(tolerances or (TOLERANCE,)))
    return None if right else f"relative error {error:.2g}"


@torch.inference_mode()
def inference(models: dict, exact: torch.nn.Module, batches: list[Batch]) -> dict[str, dict]:
    def forward(model):
        return torch.cat([states(model, batch) for batch in batches])

    providers = {
        name: model if isinstance(model, str) else partial(forward, model)
        for name, model in models.items()
    }
    if not ON_GPU:
        products = Products(models["fastenc"])
        providers[FLOOR] = lambda: [products(batch.packed.total_tokens) for batch in batches]
    truth = forward(exact)
    check = lambda name, result: None if name == FLOOR else near(name, result, truth)
    return with_speed(timed(providers, check, seconds=20), batches)


def training_step(models: dict, batch: Batch, *tolerances: float) -> dict[str, dict]:
    """Forward, and backward to all weights.

    Args: tolerances: of the gradients, as in :func:`benchmarks._formats.largest_error`.
    """
    width = models["fastenc"].config.output_size
    dy = torch.randn(batch.packed.total_tokens, width).to(DEVICE)

    def step(model: torch.nn.Module, autocast: bool = ON_GPU) -> torch.Tensor:
        model.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
            y = states(model, batch)
        y.backward(dy.to(y.dtype))
        own = isinstance(model, Encoder)
        return (model.embeddings.word if own else model.get_input_embeddings()).weight.grad

    truth = step(models["Hugging Face"], autocast=False).clone()
    providers = {name: partial(step, model) for name, model in models.items()}
    if not ON_GPU:
        theirs = partial(step, models["Hugging Face"], autocast=True)
        providers[THEIRS_AUTOCAST] = their_autocast(theirs)
        providers[OWN_AUTOCAST] = partial(step, models["fastenc"], autocast=True)
    check = lambda name, result: near(name, result, truth, *tolerances)
    rows = timed(providers, check, seconds=10)
    return with_speed(rows, [batch])


def timed(providers: dict, check, seconds: float) -> dict[str, dict]:
    """Args: seconds: of timing on a CPU."""
    options = {"end_to_end": True} if ON_GPU else {"seconds": seconds, "min_rounds": 3}
    return compare(providers, baseline="Hugging Face", check=check, **options)


def with_speed(rows: dict[str, dict], batches: list[Batch]) -> dict[str, dict]:
    tokens = sum(batch.packed.total_tokens for batch in batches)
    for row in rows.values():
        if "median_ms" in row:
            row["tokens_per_s"] = tokens / row["median_ms"] * 1e3
    return rows


def main() -> None:
    families = ON_GPUS if ON_GPU else BASE
    run_groups("families", {family: partial(measure, family) for family in families})


if __name__ == "__main__":
    main()
