"""Initial weights of ModernBERT and of encoder-decoders: transformers' distributions, weight by weight."""

import pytest
import torch

from fastenc.models import (
    EncoderConfig,
    MaskedLM,
    QuestionAnswerer,
    Seq2Seq,
    SequenceClassifier,
    TokenClassifier,
)
from tests.helpers.families import MODERNBERT_SIZES, config

HEADS = {
    "ForMaskedLM": MaskedLM,
    "ForSequenceClassification": SequenceClassifier,
    "ForTokenClassification": TokenClassifier,
    "ForQuestionAnswering": QuestionAnswerer,
}
BART_SIZES = dict(layers=1, attention_heads=2, ffn_dim=96)
SIZES = MODERNBERT_SIZES | dict(hidden_size=256, intermediate_size=192, num_hidden_layers=3)


def assert_same_distributions(ours, theirs):
    """Of every tensor of a checkpoint, by a Kolmogorov-Smirnov test with p = 1e-4."""
    stats = pytest.importorskip("scipy.stats")
    wanted = dict(theirs.state_dict())
    stored = ours.state_dict()
    for name, paths in ours.family_names(with_prefix=True).items():
        for path, a in zip(paths, ours.parts(name, stored[name], len(paths)), strict=True):
            b = wanted[path]
            if a.std() == 0 or a.numel() == 1:  # norms and biases
                assert torch.equal(a, b), path
                continue
            if path.endswith("shared.weight"):
                assert torch.equal(a.any(-1), b.any(-1)), "other rows are 0"
            assert stats.ks_2samp(a.flatten(), b.flatten()).pvalue > 1e-4, path


@pytest.mark.parametrize("task", HEADS)
@pytest.mark.parametrize("changes", [{}, {"initializer_cutoff_factor": 1.0, "decoder_bias": False}])
def test_first_weights_of_modernbert(task, changes, tmp_path):
    transformers, stats = pytest.importorskip("transformers"), pytest.importorskip("scipy.stats")
    torch.manual_seed(0)
    theirs = getattr(transformers, f"ModernBert{task}")(config("modernbert", **SIZES, **changes))
    ours = HEADS[task](EncoderConfig.from_hf(theirs.config.to_dict()))
    assert_same_distributions(ours, theirs)
    parameters = dict(ours.named_parameters())
    embedding = parameters["encoder.embeddings.word.weight"]
    cutoff = changes.get("initializer_cutoff_factor", 2.0)
    assert 0.9 * cutoff * 0.02 < embedding.abs().max() <= cutoff * 0.02
    # A head that a checkpoint lacks is initialised in the same way.
    ours.encoder.save_pretrained(tmp_path)
    loaded = HEADS[task].from_pretrained(tmp_path)
    for name, value in loaded.named_parameters():
        if name.startswith("head") and value.dim() == 2:
            assert (
                stats.ks_2samp(value.detach().flatten(), parameters[name].detach().flatten()).pvalue
                > 1e-4
            )


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("T5", {"initializer_factor": 0.5}),
        ("T5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
        ("MT5", {}),
        ("UMT5", {}),
        ("Bart", {"init_std": 0.05}),
        ("MBart", {}),
    ],
)
def test_first_weights_of_encoder_decoders(family, changes):
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=300, d_model=64)
    if family.endswith("Bart"):
        parts = ("encoder", "decoder")
        sizes |= {f"{part}_{key}": value for part in parts for key, value in BART_SIZES.items()}
    else:
        sizes |= dict(d_kv=24, d_ff=160, num_heads=2, num_layers=2, num_decoder_layers=1)
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes, **changes)
    theirs = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    ours = Seq2Seq(EncoderConfig.from_hf(config.to_dict()))
    assert_same_distributions(ours, theirs)
