"""Initial weights of ModernBERT: transformers' truncated normal distributions, weight by weight."""

import pytest
import torch

from fastenc.models import (
    EncoderConfig,
    MaskedLM,
    QuestionAnswerer,
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
SIZES = MODERNBERT_SIZES | dict(hidden_size=256, intermediate_size=192, num_hidden_layers=3)


@pytest.mark.parametrize("task", HEADS)
@pytest.mark.parametrize("changes", [{}, {"initializer_cutoff_factor": 1.0, "decoder_bias": False}])
def test_first_weights_of_modernbert(task, changes, tmp_path):
    """The same distributions, by a Kolmogorov-Smirnov test with p = 1e-4."""
    transformers, stats = pytest.importorskip("transformers"), pytest.importorskip("scipy.stats")
    torch.manual_seed(0)
    theirs = getattr(transformers, f"ModernBert{task}")(config("modernbert", **SIZES, **changes))
    ours = HEADS[task](EncoderConfig.from_hf(theirs.config.to_dict()))
    wanted = dict(theirs.named_parameters(remove_duplicate=False))
    parameters = dict(ours.named_parameters())
    for name, (path, *_) in ours.family_names(with_prefix=True).items():
        a, b = parameters[name].detach(), wanted[path].detach()
        if a.std() == 0 or a.numel() == 1:  # norms and biases
            assert torch.equal(a, b), name
            continue
        assert stats.ks_2samp(a.flatten(), b.flatten()).pvalue > 1e-4, name
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
