"""Whole encoders of the families on a CPU: batches of 32 texts of real lengths, float32, random weights of base size.

Random weights do, because speed does not depend on their values. Hugging Face runs with its "sdpa" attention, or with
"eager" where the family has no other, such as MPNet and DeBERTa. Batches come in the corpus's order. Before anything
is timed, results are compared with Hugging Face's at every real token. Families that are trained here too run forward
and backward with their dropout; without it, the gradients of the embeddings are compared before.
"""

import tempfile
from functools import partial

import torch

from benchmarks._harness import ON_GPU, compare, run_groups
from benchmarks._peers import padded
from benchmarks._products import FLOOR, Products, all_products
from benchmarks.lengths import lengths
from fastenc import patch
from fastenc.models import Encoder
from fastenc.packing import PackedBatch, pack_sequences

BATCH = 32
TEXTS = 2 * BATCH
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
    # EuroBERT-210m and EmbeddingGemma-300m, with fewer tokens in the vocabulary.
    "eurobert": (
        "EuroBertModel",
        "EuroBertConfig",
        dict(vocab_size=32000, pad_token_id=0, bos_token_id=1, eos_token_id=2, mask_token_id=3),
    ),
    "gemma3": (
        "Gemma3TextModel",
        "Gemma3TextConfig",
        dict(
            vocab_size=32000,
            hidden_size=768,
            num_hidden_layers=24,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=256,
            intermediate_size=1152,
            sliding_window=512,
            use_bidirectional_attention=True,
        ),
    ),
}
LONG = ("modernbert",)  # families that read 2,048 tokens
TRAINED = ("deberta-v3",)


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


def models_of(family: str) -> tuple[torch.nn.Module, torch.nn.Module, Encoder]:
    """Hugging Face's model, the same patched, and ours."""
    model, patched = transformers_model(family), patch(transformers_model(family))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return model, patched, Encoder.from_pretrained(folder).eval()


def measure(family: str) -> dict[str, dict]:
    model, patched, encoder = models_of(family)
    products = Products(encoder)
    return {
        f"{family}, {corpus}": measure_corpus(model, patched, encoder, products, sizes)
        for corpus, sizes in corpora(family).items()
    }


def batches_of(sizes: list[int]) -> tuple[list[dict[str, torch.Tensor]], list[PackedBatch]]:
    """Batches of texts of these lengths, padded and packed."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(1000, 30000, (n,), generator=generator).tolist()
    sequences = [draw(size) for size in sizes]
    chunks = [sequences[i : i + BATCH] for i in range(0, len(sequences), BATCH)]
    inputs = [padded(chunk) for chunk in chunks]
    for each in inputs:
        del each["token_type_ids"]
    return inputs, [pack_sequences(chunk) for chunk in chunks]


def measure_corpus(model, patched, encoder, products, sizes: list[int]) -> dict[str, dict]:
    inputs, packed = batches_of(sizes)
    real = [each["attention_mask"].bool() for each in inputs]

    def run_padded(model):
        outputs = (model(**each).last_hidden_state for each in inputs)
        return torch.cat([y[mask] for y, mask in zip(outputs, real, strict=True)])

    providers = {
        "Hugging Face": lambda: run_padded(model),
        "Hugging Face, patched by fastenc": lambda: run_padded(patched),
        "fastenc": lambda: torch.cat([encoder(each).last_hidden_state for each in packed]),
        FLOOR: lambda: [products(each.total_tokens) for each in packed],
    }
    with torch.inference_mode():
        truth = run_padded(model)

        def check(name, result):
            if name == FLOOR:
                return None
            error = ((result - truth).norm() / truth.norm()).item()
            return None if error < 1e-4 else f"relative error {error:.2g}"

        rows = compare(providers, baseline="Hugging Face", check=check, seconds=20, min_rounds=3)
    return with_rates(rows, sizes)


def with_rates(rows: dict[str, dict], sizes: list[int]) -> dict[str, dict]:
    for row in rows.values():
        if "median_ms" in row:
            row["tokens_per_s"] = sum(sizes) / row["median_ms"] * 1e3
    return rows


def measure_training(family: str) -> dict[str, dict]:
    models = dict(zip(TRAINED_PROVIDERS, models_of(family), strict=True))
    return {
        f"{family}, {corpus}, forward and backward": measure_steps(models, sizes)
        for corpus, sizes in corpora(family).items()
    }


TRAINED_PROVIDERS = ("Hugging Face", "Hugging Face, patched by fastenc", "fastenc")


def measure_steps(models: dict[str, torch.nn.Module], sizes: list[int]) -> dict[str, dict]:
    """The first batch of the corpus, with random gradients of the last states."""
    inputs, packed = (each[0] for each in batches_of(sizes))
    real, encoder = inputs["attention_mask"].bool(), models["fastenc"]
    dy = torch.randn(packed.total_tokens, encoder.config.hidden_size)

    def states_of(model: torch.nn.Module) -> torch.Tensor:
        if model is encoder:
            return model(packed).last_hidden_state
        return model(**inputs).last_hidden_state[real]

    def step(model: torch.nn.Module) -> torch.Tensor:
        model.zero_grad()
        states_of(model).backward(dy)
        return next(p.grad for name, p in model.named_parameters() if "embeddings.word" in name)

    for model in models.values():
        model.eval()
    truth = step(models["Hugging Face"])
    for name, model in models.items():
        error = ((step(model) - truth).norm() / truth.norm()).item()
        if not error < 1e-4:
            raise RuntimeError(f"{name}: relative error of the embeddings' gradient {error:.2g}")
        model.train()
    providers = {name: partial(step, model) for name, model in models.items()}
    providers[FLOOR] = partial(all_products, encoder, packed.total_tokens)
    rows = compare(providers, baseline="Hugging Face", seconds=20, min_rounds=3)
    return with_rates(rows, sizes[:BATCH])


def main() -> None:
    if ON_GPU:
        print("a benchmark of CPUs: models measures whole models on a GPU")
        return
    groups = {family: partial(measure, family) for family in BASE}
    for family in TRAINED:
        groups[f"{family}, forward and backward"] = partial(measure_training, family)
    run_groups("families", groups)


if __name__ == "__main__":
    main()
