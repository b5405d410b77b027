"""Encoders inside classes of other configurations, and a user's class with a name of transformers'."""

import copy
import warnings

import pytest
import torch
import transformers

import fastenc
from tests.helpers.checkpoints import close
from tests.helpers.extension import needs_cpp
from tests.helpers.families import config, model, padded_batch

SIZES = config("bert").to_dict()


class OwnConfig(transformers.BertConfig):
    model_type = "own"


class Own(transformers.PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, settings):
        super().__init__(settings)
        self.encoder = transformers.BertModel(settings)
        self.post_init()

    def forward(self, **batch):
        return self.encoder(**batch)


def same(theirs, read):
    """The patched model runs fused and gives the same."""
    ours, batch = fastenc.patch(copy.deepcopy(theirs)), padded_batch("bert")
    mask = batch["attention_mask"].bool()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        close(read(ours(**batch), mask), read(theirs(**batch), mask))
    return ours


@needs_cpp
@pytest.mark.parametrize(
    ("name", "projection", "read"),
    [
        ("DPRContextEncoder", 24, lambda output, mask: output.pooler_output),
        ("DPRQuestionEncoder", 0, lambda output, mask: output.pooler_output),
        ("DPRReader", 0, lambda output, mask: output.start_logits[mask]),
    ],
)
def test_the_encoders_of_dpr(name, projection, read):
    torch.manual_seed(0)
    described = transformers.DPRConfig(**SIZES, projection_dim=projection)
    same(getattr(transformers, name)(described).eval(), read)


@needs_cpp
def test_a_model_type_of_ones_own():
    torch.manual_seed(0)
    theirs = Own(OwnConfig(**SIZES)).eval()
    ours = same(theirs, lambda output, mask: output.last_hidden_state[mask])
    assert fastenc.encoder_of(ours).config.family == "bert"


@needs_cpp
def test_a_masked_lm_of_the_same_name_and_another_constructor():
    class BertForMaskedLM(transformers.BertForMaskedLM):
        def __init__(self, settings, needed):
            super().__init__(settings)

    theirs = BertForMaskedLM(config("bert"), 1).eval()
    theirs.load_state_dict(model("bert", "ForMaskedLM").state_dict())
    same(theirs, lambda output, mask: output.logits[mask])
