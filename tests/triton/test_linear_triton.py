"""kernels/linear.py and what else ``encode(batch_invariant=True)`` runs: on a GPU, or interpreted."""

import random

import pytest
import torch
import torch.nn.functional as F
from fastenc.kernels import batch_invariance, launch

pytest.importorskip("triton")

from fastenc.kernels.attention_config import config

from fastenc.data import train_tokenizer
from fastenc.models import Encoder, EncoderConfig
from fastenc.models.embedding import encode
from fastenc.nn import ways
from fastenc.nn.pooling import normalize_rows
from fastenc.ops import attention
from fastenc.ops.attention_blocks import attention_blocks
from fastenc.ops.gemm import linear
from fastenc.testing import assert_within_budget
from tests.helpers.attention_cases import offsets_of
from tests.helpers.layers import KINDS, Layer

WORDS = ["a", "small", "dog", "runs", "two", "men", "play", "chess", "in", "rain"]


@pytest.fixture
def products_of_rows(triton_kernels, monkeypatch):
    """The interpreter's products are NumPy's, which round a row as its place decides. A matrix instruction does not."""
    if triton_kernels.device.type == "cuda":
        return
    from triton.runtime import interpreter

    def create_dot(builder, a, b, d, *options):
        sums, (rows, columns) = 0, (x.data.astype(d.data.dtype) for x in (a, b))
        for k in range(rows.shape[1]):
            sums += rows[:, k, None] * columns[k]
        return interpreter.TensorHandle(sums + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture
def asked(triton_target, monkeypatch):
    """Inside, calls are batch-invariant; the interpreter's tensors stand for a GPU's."""
    monkeypatch.setattr(batch_invariance, "DEVICES", {triton_target.device.type})
    with batch_invariance.batch_invariance():
        yield triton_target


@pytest.mark.parametrize("rows,inner,width", [((0,), 8, 4), ((1,), 1, 1), ((3, 50), 40, 130)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_values_keep_the_budget(asked, rows, inner, width, has_bias):
    new = lambda *shape: torch.randn(*shape, device=asked.device)
    for dtype in asked.dtypes:
        given = [x.to(dtype) for x in (new(*rows, inner), new(width, inner), new(width))]
        given = given if has_bias else given[:2]
        y = linear(*given)
        assert y.shape == (*rows, width) and y.dtype == dtype
        assert_within_budget(y, F.linear(*given), F.linear(*(x.double() for x in given)), "y")


def test_a_row_has_the_same_bits_alone_in_any_batch_and_at_any_place(asked, products_of_rows):
    for dtype in asked.dtypes:
        x = torch.randn(150, 200, device=asked.device).to(dtype)
        weight = torch.randn(70, 200, device=asked.device).to(dtype)
        whole = linear(x, weight)
        for chosen in ([7], [149], range(100, 150), range(1, 130), [*range(150)][::-1]):
            assert torch.equal(linear(x[[*chosen]], weight), whole[[*chosen]])


def attend(qkv, lengths, numbers):
    """(result, log-sum-exps) of these sequences of qkv, packed in this order."""
    parts, sizes = qkv.split(lengths), [lengths[number] for number in numbers]
    offsets = offsets_of(sizes).to(qkv.device)
    given = torch.cat([parts[number] for number in numbers]), offsets, max(sizes)
    out, lse = attention(*given, blocks=attention_blocks(*given), return_lse=True)
    return [*zip(out.split(sizes), lse.split(sizes, 1), strict=True)]


def test_attention_and_its_sums_do_not_depend_on_the_place(asked, products_of_rows):
    lengths, order = [9, 30, 4, 150, 17, 1, 64], [5, 2, 1, 0, 4]
    for dtype in asked.dtypes:
        qkv = torch.randn(sum(lengths), 3, 2, 16, device=asked.device).to(dtype)
        whole, some = attend(qkv, lengths, range(7)), attend(qkv, lengths, order)
        for number, (out, lse) in zip(order, some, strict=True):
            (alone,) = attend(qkv, lengths, [number])
            for expected in (whole[number], alone):
                assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_launches_that_know_the_lengths_are_the_rules(asked, monkeypatch):
    """Those of an architecture's table may differ from one length to the next."""
    every_entry = type("", (), {"get": lambda self, key: {"BLOCK_M": 1}})()
    monkeypatch.setattr(launch, "architecture", lambda device: "a table for a test")
    monkeypatch.setattr(launch, "table", lambda name: every_entry)
    x = torch.empty(1, dtype=torch.float16, device=asked.device)
    key = ("forward", 64, "half", False, False, False)  # the last: dropout
    found = lambda: config(*key, like=x, max_seqlen=50)
    assert found() == config.rule(*key)
    with batch_invariance.batch_invariance(False):
        assert found() == {"BLOCK_M": 1}


def test_a_nan_stays_in_its_row_and_autocast_casts(asked):
    x = torch.randn(70, 40, device=asked.device)
    weight = torch.randn(9, 40, device=asked.device)
    x[3, 5] = torch.nan
    nan = linear(x, weight).isnan()
    assert nan[3].all() and not nan[:3].any() and not nan[4:].any()
    with torch.autocast(asked.device.type, asked.dtypes[-1]):
        assert linear(x, weight, weight[:, 0]).dtype == asked.dtypes[-1]


def test_normalised_rows_are_those_of_pytorch(asked):
    for dtype in asked.dtypes:
        x = torch.randn(5, 48, device=asked.device).to(dtype)
        exact = F.normalize(x.double(), dim=1)
        assert_within_budget(normalize_rows(x), F.normalize(x, dim=1), exact, "normalised")
        assert not normalize_rows(torch.zeros_like(x)).any()


@pytest.fixture
def gpu_ways(monkeypatch):
    without = lambda layer_call: "a GPU has no such way"
    monkeypatch.setattr(ways.cpu_inference, "unsupported_reason", without)


@pytest.fixture
def encoder(asked, gpu_ways, monkeypatch):
    """With products of our kernel alone: PyTorch's are an error."""

    def refuse(*arguments):
        raise AssertionError("a product of PyTorch")

    monkeypatch.setattr(torch.nn.functional, "linear", refuse)
    config = EncoderConfig(97, 32, 2, 2, 48, 200, pooler=False)
    made = Encoder(config).eval().to(asked.device, asked.dtypes[-1])
    made.tokenizer = train_tokenizer(WORDS, vocab_size=90)
    # encode() computes nothing else in its place: the fixture has entered the context.
    monkeypatch.setattr(
        encode, "batch_invariance", lambda requested: batch_invariance.batch_invariance()
    )
    return made


def test_vectors_do_not_depend_on_the_batch(encoder, products_of_rows):
    """Texts shorter and longer than a tile for short sequences, at different places of it."""
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=count)) for count in (1, 9, 30, 4, 150, 17)]
    whole = encoder.encode(texts)
    assert whole.isfinite().all() and len(whole.unique(dim=0)) == len(texts)
    order = [3, 0, 5, 1, 4, 2]
    assert torch.equal(encoder.encode([texts[i] for i in order], batch_size=4), whole[order])
    for i in (1, 4):
        assert torch.equal(encoder.encode(texts[i]), whole[i])


def test_what_depends_on_the_batch_is_refused(asked, gpu_ways):
    if asked.device.type == "cuda":
        pytest.skip("the layers' helper makes CPU tensors")
    message = "with batch_invariant a GPU does not compute .*position_terms"
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        Layer(KINDS["deberta"], (5,), torch.float32).run(ways.run_layer)
