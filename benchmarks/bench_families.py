"""Whole encoders of the families on a CPU: batches of 32 texts of real lengths, float32, random weights of base size.

Random weights do, because speed does not depend on their values. Hugging Face runs with its "sdpa" attention, or with
"eager" where the family has no other, such as MPNet and DeBERTa. Batches come in the corpus's order. Before anything
is timed, results are compared with Hugging Face's at every real token. A training step is forward and backward of one
batch, without dropout, so that the gradients of the word embeddings can be compared.
"""

import tempfile
from functools import partial
from typing import NamedTuple

import torch

from benchmarks._harness import ON_GPU, compare, run_groups
from benchmarks._peers import padded
from benchmarks._products import FLOOR, Products
from benchmarks.lengths import lengths
from fastenc import patch
from fastenc.models import Encoder
from fastenc.packing import PackedBatch, pack_sequences

BATCH = 32
TEXTS = 2 * BATCH
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
    # Six layers of larger encoders: of jina-embeddings-v3, ESM-2 (150M), Qwen3-0.6B and EmbeddingGemma-300m.
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
}
LONG = ("modernbert",)  # families that read 2,048 tokens
TRAINED = ("lengths of SST-2",)  # corpora of training steps
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
            return getattr(transformers, model_class)(config).eval()
        except ValueError:  # the family has no sdpa
            continue
    raise RuntimeError(f"{model_class} takes neither sdpa nor eager attention")


def random_lengths(low: int, high: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(low, high + 1, (count,), generator=generator).tolist()


def corpora(family: str) -> dict[str, list[int]]:
    """Lengths of the texts of each corpus."""
    sst2 = lengths("SST-2", 16 * TEXTS)[:TEXTS]
    lengths_by_name = {
        "lengths of SST-2": sst2,
        "lengths 10 to 256": random_lengths(10, 256, BATCH),
    }
    if family in LONG:
        lengths_by_name["lengths 10 to 2048"] = random_lengths(10, 2048, 5)
    return lengths_by_name


def measure(family: str) -> dict[str, dict]:
    model, patched = transformers_model(family), patch(transformers_model(family))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        encoder = Encoder.from_pretrained(folder).eval()
    products = Products(encoder)
    rows = {}
    for corpus, sizes in corpora(family).items():
        batches = batches_of(sizes)
        rows[f"{family}, {corpus}"] = inference(model, patched, encoder, products, batches)
        longer = family in TRAINED_LONGER and corpus == "lengths 10 to 256"
        if longer or corpus in TRAINED:
            step = training_step(model, patched, encoder, batches[0])
            rows[f"{family}, {corpus}, training step"] = step
    return rows


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
        inputs = padded(chunk)
        del inputs["token_type_ids"]
        batches.append(Batch(inputs, inputs["attention_mask"].bool(), pack_sequences(chunk)))
    return batches


def states(model, batch: Batch) -> torch.Tensor:
    """A transformers model's states of the real tokens."""
    return model(**batch.inputs).last_hidden_state[batch.real]


def near(result: torch.Tensor, truth: torch.Tensor) -> str | None:
    error = ((result - truth).norm() / truth.norm()).item()
    return None if error < 1e-4 else f"relative error {error:.2g}"


@torch.inference_mode()
def inference(model, patched, encoder, products, batches: list[Batch]) -> dict[str, dict]:
    theirs = lambda model: torch.cat([states(model, batch) for batch in batches])
    providers = {
        "Hugging Face": lambda: theirs(model),
        "Hugging Face, patched by fastenc": lambda: theirs(patched),
        "fastenc": lambda: torch.cat([encoder(b.packed).last_hidden_state for b in batches]),
        FLOOR: lambda: [products(batch.packed.total_tokens) for batch in batches],
    }
    truth = theirs(model)
    check = lambda name, result: None if name == FLOOR else near(result, truth)
    rows = compare(providers, baseline="Hugging Face", check=check, seconds=20, min_rounds=3)
    return with_speed(rows, batches)


def training_step(model, patched, encoder, batch: Batch) -> dict[str, dict]:
    """Forward, and backward to all weights."""
    dy = torch.randn(batch.packed.total_tokens, encoder.config.hidden_size)

    def step(owner, embeddings, forward) -> torch.Tensor:
        owner.zero_grad()
        forward().backward(dy)
        return embeddings.weight.grad

    theirs = lambda model: step(model, model.get_input_embeddings(), lambda: states(model, batch))
    own = lambda: encoder(batch.packed).last_hidden_state
    providers = {
        "Hugging Face": lambda: theirs(model),
        "Hugging Face, patched by fastenc": lambda: theirs(patched),
        "fastenc": lambda: step(encoder, encoder.embeddings.word, own),
    }
    truth = theirs(model).clone()
    check = lambda name, result: near(result, truth)
    rows = compare(providers, baseline="Hugging Face", check=check, seconds=10, min_rounds=3)
    return with_speed(rows, [batch])


def with_speed(rows: dict[str, dict], batches: list[Batch]) -> dict[str, dict]:
    tokens = sum(batch.packed.total_tokens for batch in batches)
    for row in rows.values():
        if "median_ms" in row:
            row["tokens_per_s"] = tokens / row["median_ms"] * 1e3
    return rows


def main() -> None:
    if ON_GPU:
        print("a benchmark of CPUs: models measures whole models on a GPU")
        return
    run_groups("families", {family: partial(measure, family) for family in BASE})


if __name__ == "__main__":
    main()
