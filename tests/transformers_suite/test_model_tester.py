"""transformers' own model tests on patched models of every family: ``make transformers-suite``."""

import os
import unittest
import warnings

import pytest
import torch

from tests.transformers_suite import mixin
from tests.transformers_suite.subjects import SUBJECTS, ModelTester, case_of, patched

FOLDER = os.environ.get("FASTENC_TRANSFORMERS_SDIST")
if not FOLDER:
    pytest.skip("`make transformers-suite` fetches and runs them", allow_module_level=True)

Mixin = mixin.load(FOLDER)
NAMES = [name for name in dir(Mixin) if name.startswith("test_") and callable(getattr(Mixin, name))]
if not torch.cuda.is_available():  # float16 has kernels only on a GPU
    NAMES = [name for name in NAMES if "fp16" not in name]
# Tests of what a patched model does otherwise, and why.
OTHERWISE = {
    "test_encoder_decoder_loss_no_double_shift": "the loss reads packed logits, of which output.logits is a copy"
}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("subject", SUBJECTS)
def test_the_fused_forward_is_what_is_tested(subject):
    case, tester = case_of(subject, Mixin), ModelTester(subject)
    assert case.all_model_classes
    config, inputs = tester.prepare_config_and_inputs_for_common()
    for model_class in case.all_model_classes:
        with patched(case.all_model_classes):
            model = model_class(config).eval()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*takes its own forward")
            # RoFormer's head for multiple choice reads the row's last token, which is padding in this batch.
            warnings.filterwarnings("ignore", ".*because the head reads padding")
            model(**case("test_training")._prepare_for_class(inputs, model_class))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_patched(subject, name):
    if name in OTHERWISE:
        pytest.skip(OTHERWISE[name])
    case = case_of(subject, Mixin)
    try:
        with patched(case.all_model_classes):
            run(case, name)
    except unittest.SkipTest:
        raise
    except Exception:
        try:
            run(case, name)
        except Exception as error:
            pytest.skip(f"fails without the patch, too: {error}")
        raise


def run(case, name):
    torch.manual_seed(0)
    getattr(case(name), name)()
