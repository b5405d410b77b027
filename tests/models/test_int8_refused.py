"""What int8 refuses, and how it says so, whichever way it is asked for."""

import copy
import re

import pytest
import torch

import fastenc
from fastenc.adapt import Lora, add_adaptation
from fastenc.cli.info import layers_in_8_bits
from fastenc.models import Encoder
from fastenc.ops import gemm, int8_products
from tests.helpers.checkpoints import packed, save
from tests.helpers.commands import failure
from tests.helpers.families import model, padded_batch

needs_int8 = pytest.mark.skipif(
    not int8_products.has_int8_products(), reason="this processor does not multiply 8 bits"
)
FORMS = {
    "own": lambda theirs, folder: Encoder.from_pretrained(save(theirs, folder)),
    "patched": lambda theirs, folder: fastenc.patch(copy.deepcopy(theirs)),
}


class OnAGpu(torch.nn.Parameter):
    """A parameter that says that it is on a GPU."""

    device = property(lambda self: torch.device("cuda"))


def say_they_are_on_a_gpu(m):
    for parameter in m.parameters():
        parameter.__class__ = OnAGpu


def in_second_layer(name, value):
    """Sets one number of the parameters whose names end so, in layer 1."""

    @torch.no_grad()
    def change(m):
        for key, parameter in m.named_parameters():
            if re.search(rf"\.1\..*{name}$", key):
                parameter[3] = value

    return change


NOT_FINITE = (
    "has NaN, infinity or a number beyond 1e+35 (is the checkpoint damaged?): leave out dtype"
)
# Of the models: the change, the configuration's other values, and what they say then.
REFUSED = {
    "in training": (
        lambda m: m.train(),
        {},
        "freeze is for inference, got a model in training mode: call eval() first",
    ),
    "without values": (
        lambda m: m.to("meta"),
        {},
        "layer 0 of the model cannot run in int8: it runs on CPUs only, the weights are on meta: leave out dtype",
    ),
    "bfloat16": (
        lambda m: m.to(torch.bfloat16),
        {},
        "layer 0 of the model cannot run in int8: int8 is made from float32 weights, they are torch.bfloat16: leave "
        "out dtype",
    ),
    "inner width": (
        lambda m: None,
        {"intermediate_size": 40},
        "layer 0 of the model cannot run in int8: widths must be multiples of 16, they are 32 (hidden), 40 (inner) "
        "and 16 (a head): leave out dtype",
    ),
    "hidden width": (
        lambda m: None,
        {"hidden_size": 24, "num_attention_heads": 1},
        "layer 0 of the model cannot run in int8: widths must be multiples of 16, they are 24 (hidden), 48 (inner) "
        "and 24 (a head): leave out dtype",
    ),
    "infinity": (
        in_second_layer(r"(up|intermediate\.dense)\.weight", torch.inf),
        {},
        f"layer 1 of the model cannot run in int8: a weight of shape (48, 32) {NOT_FINITE}",
    ),
    "a number that overflows in a sum": (
        in_second_layer(r"(up|intermediate\.dense)\.weight", -1e37),
        {},
        f"layer 1 of the model cannot run in int8: a weight of shape (48, 32) {NOT_FINITE}",
    ),
    "NaN in a norm": (
        in_second_layer(r"(out_norm|output\.LayerNorm)\.bias", torch.nan),
        {},
        f"layer 1 of the model cannot run in int8: a weight of shape (32,) {NOT_FINITE}",
    ),
}


@needs_int8
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", REFUSED)
def test_what_it_refuses(name, form, tmp_path):
    change, other, message = REFUSED[name]
    ours = FORMS[form](model("bert", **other), tmp_path)
    change(ours)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fastenc.freeze(ours, dtype="int8")
    assert frozen_of(ours)._copies is None


@needs_int8
def test_a_gpu(tmp_path):
    """A parameter of another class says it, with which a patched model is refused already."""
    encoder = Encoder.from_pretrained(save(model("bert"), tmp_path))
    say_they_are_on_a_gpu(encoder)
    message = "layer 0 of the model cannot run in int8: it runs on CPUs only, the weights are on cuda: leave out dtype"
    with pytest.raises(ValueError, match=f"^{message}$"):
        fastenc.freeze(encoder, dtype="int8")
    assert encoder.frozen._copies is None


def frozen_of(m):
    return m.frozen if isinstance(m, Encoder) else m.fastenc_frozen


@needs_int8
@pytest.mark.parametrize("form", FORMS)
def test_wide_heads_of_layers_with_global_tokens(form, tmp_path):
    ours = FORMS[form](model("longformer", hidden_size=160, num_attention_heads=1), tmp_path)
    message = "layer 0 of the model cannot run in int8: head_dim must be at most 128, it is 160: leave out dtype"
    with pytest.raises(ValueError, match=f"^{message}$"):
        fastenc.freeze(ours, dtype="int8")


@needs_int8
def test_lora_must_be_merged(tmp_path):
    encoder = Encoder.from_pretrained(save(model("bert"), tmp_path))
    add_adaptation(encoder, Lora(rank=2))
    message = (
        "layer 0 of the model cannot run in int8: it has LoRA or another adaptation, which must be merged into its "
        "weights first: leave out dtype"
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        fastenc.freeze(encoder.eval(), dtype="int8")


@needs_int8
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["int4", torch.int8, torch.float16])
def test_other_dtypes(dtype, form, tmp_path):
    ours = FORMS[form](model("bert"), tmp_path)
    message = f'the dtype of frozen weights must be "int8" or None, got {dtype!r}: give one of them'
    with pytest.raises(ValueError, match=f"^{message}$"):
        fastenc.freeze(ours, dtype=dtype)


@pytest.mark.parametrize("dtype", ["int4", torch.int8])
def test_other_dtypes_of_a_checkpoint(dtype, tmp_path):
    message = (
        "dtype must be one of 'float32', 'bfloat16', 'float16', 'float64' or 'int8', or a torch.dtype of these, got "
        f"{dtype!r}: give one of them"
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        Encoder.from_pretrained(save(model("bert"), tmp_path), dtype=dtype)


@needs_int8
def test_a_checkpoint_is_refused_as_its_model_is(tmp_path):
    with pytest.raises(ValueError, match=r"layer 0 .* they are 32 \(hidden\), 40 \(inner\)"):
        Encoder.from_pretrained(
            save(model("bert", intermediate_size=40), tmp_path / "narrow"), dtype="int8"
        )
    theirs = model("bert")
    in_second_layer(r"output\.dense\.weight", torch.nan)(theirs)
    with pytest.raises(ValueError, match=re.escape(NOT_FINITE)):
        Encoder.from_pretrained(save(theirs, tmp_path / "nan"), dtype="int8")


NONE_OF_THEM = (
    "int8 needs AVX2, and on a processor with AVX-512 also AVX512-VNNI, which this one lacks"
)


def test_a_processor_without_the_instructions(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(int8_products, "has_int8_products", lambda: False)
    theirs = model("bert")
    folder = save(theirs, tmp_path / "bert")
    encoder = Encoder.from_pretrained(folder)
    for asked in (
        lambda: fastenc.freeze(encoder, dtype="int8"),
        lambda: fastenc.freeze(fastenc.patch(theirs), dtype="int8"),
        lambda: Encoder.from_pretrained(folder, dtype="int8"),
    ):
        with pytest.raises(ValueError, match=f"{NONE_OF_THEM}: leave out dtype"):
            asked()
    assert encoder.frozen._copies is None
    (tmp_path / "texts.txt").write_text("A dull film.")
    out = tmp_path / "vectors.npy"
    printed = failure(capsys, "embed", folder, tmp_path / "texts.txt", "-o", out, "--dtype", "int8")
    assert NONE_OF_THEM in printed and not out.exists()
    assert layers_in_8_bits(encoder) == {"0 to 1": f"not: {NONE_OF_THEM}"}


def test_the_instruction_set_in_use_decides(instruction_set, tmp_path, monkeypatch):
    """Also where the processor could do more."""
    monkeypatch.setattr(gemm, "has_vectors", lambda: instruction_set != "baseline")  # it is cached
    encoder = Encoder.from_pretrained(save(model("bert"), tmp_path))
    if int8_products.has_int8_products():
        assert instruction_set in ("avx2", "avx512")
        fastenc.freeze(encoder, dtype="int8")
        with torch.no_grad():
            assert encoder(packed(padded_batch("bert"))).last_hidden_state.isfinite().all()
    else:
        with pytest.raises(ValueError, match=f"{NONE_OF_THEM}: leave out dtype"):
            fastenc.freeze(encoder, dtype="int8")
