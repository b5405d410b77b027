"""Rotary angles for longer texts than in pretraining, against transformers' and the hub's remote code."""

import copy
import json
import warnings

import pytest
import torch
import transformers

import fastenc
from fastenc.models import Encoder
from fastenc.models.architectures.rotary import read_rotary
from fastenc.nn.rotary import LinearScaling
from fastenc.packing import pack_sequences
from tests.helpers.checkpoints import close, packed, save
from tests.helpers.extension import needs_cpp
from tests.helpers.families import config, model, padded_batch

THETA = 1000.0
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "yarn": YARN,
    "yarn, given amplitude": YARN | {"attention_factor": 0.7, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn, two scales": YARN | {"mscale": 0.5, "mscale_all_dim": 1.5},
    "yarn, no length": {"rope_type": "yarn", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}
EVERY_SCALING = pytest.mark.parametrize("given", SCALINGS.values(), ids=SCALINGS)
ROTARY = pytest.mark.parametrize("family", ["nomic_bert", "gte", "modernbert"])


def scaled(family, given):
    """A transformers model with these angles in every layer."""
    given = {"rope_theta": THETA, **given}
    if family == "modernbert":
        given = {"full_attention": given, "sliding_attention": copy.deepcopy(given)}
    return model(family, rope_parameters=given)


@EVERY_SCALING
def test_frequencies_are_transformers(given):
    theirs = model("nomic_bert", rope_parameters={"rope_theta": THETA, **given}).rotary_emb
    spec = read_rotary(given, 16, THETA, 40)
    plain = LinearScaling(1.0)
    assert torch.equal((spec.scaling or plain).frequencies(16, THETA), theirs.inv_freq)
    assert (spec.scaling or plain).amplitude == theirs.attention_scaling


def test_a_ramp_without_width_and_one_between_pairs():
    for change in ({"beta_fast": 1.0, "beta_slow": 1.0}, {"truncate": False}):
        given = YARN | change
        theirs = model("nomic_bert", rope_parameters={"rope_theta": THETA, **given}).rotary_emb
        assert torch.equal(
            read_rotary(given, 16, THETA, 40).scaling.frequencies(16, THETA), theirs.inv_freq
        )


@needs_cpp
def test_modernberts_ramp_is_rounded_as_transformers_rounds_it(tmp_path):
    """transformers does not read ``truncate`` from the rope parameters of a layer type."""
    settings = config("modernbert")
    longer = {"rope_theta": THETA, "original_max_position_embeddings": 16, "truncate": False}
    inside = YARN | longer
    plain = {"rope_type": "default", "rope_theta": THETA}
    settings.rope_parameters = {"full_attention": inside, "sliding_attention": plain}
    torch.manual_seed(0)
    theirs, batch = transformers.ModernBertModel(settings).eval(), padded_batch("modernbert")
    mask = batch["attention_mask"].bool()
    with torch.no_grad():
        expected = theirs(**batch).last_hidden_state[mask]
        close(
            Encoder.from_pretrained(save(theirs, tmp_path))(packed(batch)).last_hidden_state,
            expected,
        )
        close(fastenc.patch(theirs)(**batch).last_hidden_state[mask], expected)


@ROTARY
@EVERY_SCALING
def test_values_agree_with_transformers(family, given, tmp_path):
    theirs, batch = scaled(family, given), padded_batch(family)
    ours = Encoder.from_pretrained(save(theirs, tmp_path))
    mask = batch["attention_mask"].bool()
    with torch.no_grad():
        hidden, plain = ours(packed(batch)).last_hidden_state, theirs(**batch).last_hidden_state
        wanted = copy.deepcopy(theirs).double()(**batch).last_hidden_state[mask]
    assert (hidden - wanted).abs().max() <= 4 * (plain[mask] - wanted).abs().max() + 1e-6


@ROTARY
@needs_cpp
def test_gradients_agree_with_transformers(family):
    """With YaRN, whose rotation also scales."""
    theirs = scaled(family, SCALINGS["yarn, given amplitude"])
    ours, batch = fastenc.patch(copy.deepcopy(theirs)), padded_batch(family)
    weight = torch.linspace(-1, 1, 32) * batch["attention_mask"][..., None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for m in (ours, theirs):
            (m(**batch).last_hidden_state * weight).sum().backward()
    floor = 1e-3 * max(p.grad.norm() for p in theirs.parameters())
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (a.grad - b.grad).norm() / torch.maximum(b.grad.norm(), floor) < 1e-4, name


@ROTARY
@needs_cpp
def test_angles_that_depend_on_the_batch(family, tmp_path):
    """Dynamic NTK: transformers scales by the longest text of this call and of earlier calls. Texts within the model's
    positions have unscaled angles."""
    theirs = scaled(family, SCALINGS["dynamic"])
    ours = Encoder.from_pretrained(save(theirs, tmp_path))
    with pytest.raises(
        ValueError, match=r"at most 40 tokens, the model's positions, got 41: cut it"
    ):
        ours(pack_sequences([[5] * 41]))
    patched = fastenc.patch(copy.deepcopy(theirs))
    long, short = padded_batch(family, (41, 3)), padded_batch(family)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="angles of more than 40 tokens depend on the batch"):
            hidden = patched(**long).last_hidden_state
        assert torch.equal(hidden, theirs(**long).last_hidden_state)
        mask = short["attention_mask"].bool()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*of rotary_emb was changed")
            hidden = patched(**short).last_hidden_state
        close(hidden[mask], theirs(**short).last_hidden_state[mask])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = patched(**short).last_hidden_state
        close(again[mask], hidden[mask])
        assert not again[~mask].any()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
            "got 'longrope', whose angles change with the longest text of a batch",
        ),
        (
            {"rope_type": "su"},
            "rope_type must be 'default', 'linear', 'dynamic' or 'yarn', got 'su'",
        ),
        ({"rope_type": "linear"}, "factor must be a number above 0, got None"),
        ({"rope_type": "yarn", "factor": -1}, "factor must be a number above 0, got -1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0, got 0.5"),
    ],
)
@ROTARY
def test_unsupported_settings_are_refused(family, given, message, tmp_path):
    folder = save(model(family), tmp_path)
    if family == "modernbert":
        given = {"full_attention": given}
    values = json.loads((folder / "config.json").read_text()) | {"rope_parameters": given}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message):
        Encoder.from_pretrained(folder)


@ROTARY
def test_an_older_files_scaling(family, tmp_path):
    """``rope_scaling``, which transformers reads but no longer writes."""
    folder = save(model(family), tmp_path)
    values = json.loads((folder / "config.json").read_text())
    del values["rope_parameters"]
    values["rope_scaling"] = {"rope_type": "linear", "factor": 4.0}
    (folder / "config.json").write_text(json.dumps(values))
    theirs = type(model(family)).from_pretrained(folder).eval()
    batch = padded_batch(family)
    with torch.no_grad():
        hidden = Encoder.from_pretrained(folder)(packed(batch)).last_hidden_state
        close(hidden, theirs(**batch).last_hidden_state[batch["attention_mask"].bool()])
