"""Our products and torch's against float64, whichever this processor would choose."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fastenc.models import Encoder, EncoderConfig
from fastenc.ops import library
from fastenc.ops.gemm import cpp_product_is_faster, gemm, gemm_packed, linear, pack_weight
from fastenc.packing import pack_sequences

pytestmark = pytest.mark.usefixtures("ours", "instruction_set")
DTYPES = [torch.float32, torch.bfloat16]


def within(actual, expected, inner):
    """Relative to the largest sum, with the probable bound of a sum's rounding: sqrt(inner) instead of inner."""
    bound = 4 * inner**0.5 * torch.finfo(actual.dtype).eps
    return (actual.double() - expected).abs().max() <= bound * expected.abs().max()


def by_packed(x, weight, bias):
    """Packed weights of bfloat16 are float32 where the instruction set has no products of pairs."""
    packed = pack_weight(weight)
    return gemm_packed(x.to(packed.dtype), packed, bias, weight.shape[0])


class Products(TorchDispatchMode):
    """Collects the names of the products that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in {"mm", "addmm", "gemm"}:
            self.names.add(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 384, 17), (130, 64, 257), (195, 150, 17)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("extra", ["nothing", "bias", "added"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products(shape, transposed, extra, dtype):
    rows, inner, columns = shape
    draw = lambda *size: torch.randn(*size).to(dtype)
    a = draw(inner, rows).t() if transposed else draw(rows, inner)
    b = draw(columns, inner).t() if transposed else draw(inner, columns)
    given = {
        "nothing": {},
        "bias": {"bias": draw(columns)},
        "added": {"added": draw(rows, columns)},
    }[extra]
    expected = a.double() @ b.double() + sum(value.double() for value in given.values())
    y = gemm(a, b, **given)
    assert y.dtype == dtype and within(y, expected, inner)
    assert (y is given.get("added")) == (extra == "added")


@pytest.mark.skipif(not library.HAS_CPP, reason="the extension is not built")
@pytest.mark.parametrize("inner", [16, 33, 150, 384])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_rows_has_the_bits_of_packed_weights(dtype, inner, biased):
    """A tile of each width, and outputs that fill no tile."""
    columns, weight = 23, torch.randn(23, inner).to(dtype)
    bias = torch.randn(columns) if biased else None
    x = torch.randn(100, inner).to(dtype)
    packed = by_packed(x, weight, bias)
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    assert within(packed, expected, inner)
    for rows in (*range(1, 26), 31, 41, 48, 49, 100):
        y = torch.ops.fastenc.gemm(x[:rows], weight.t(), bias)
        assert torch.equal(y, packed[:rows].to(dtype)), rows


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1),
        (5, 31, 4),
        (7, 33, 7),
        (20, 384, 100),
        (97, 64, 33),
        (128, 100, 9),
        (128, 1536, 48),
    ],
)
def test_few_rows_in_bfloat16(shape, biased):
    rows, inner, columns = shape
    x, weight = torch.randn(rows, inner).bfloat16(), torch.randn(columns, inner).bfloat16()
    bias = torch.randn(columns).bfloat16() if biased else None
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    y = linear(x, weight, bias)
    assert y.dtype == torch.bfloat16
    # Only the result is rounded to bfloat16.
    assert (y.double() - expected).abs().max() <= 2**-8 * expected.abs().max()


@pytest.mark.skipif(not library.HAS_CPP, reason="the extension is not built")
@pytest.mark.parametrize("rows", [0, 1, 130, 400])
@pytest.mark.parametrize(("inner", "columns"), [(1, 1), (384, 17), (150, 64), (128, 257)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_packed_weights(dtype, rows, inner, columns, biased):
    a, weight = (torch.randn(size, inner).to(dtype) for size in (rows, columns))
    bias = torch.randn(columns) if biased else None
    y = by_packed(a, weight, bias)
    expected = a.double() @ weight.double().t() + (0 if bias is None else bias.double())
    assert y.shape == expected.shape
    assert not rows or within(y, expected, inner)


@pytest.mark.skipif(not library.HAS_CPP, reason="the extension is not built")
@pytest.mark.parametrize("rows", [130, 161, 400, 600])
@pytest.mark.parametrize("columns", [40, 384, 1152])
def test_the_number_of_threads_changes_no_bit(rows, columns):
    """It changes how rows and columns are divided."""
    a, weight, before = torch.randn(rows, 200), torch.randn(columns, 200), torch.get_num_threads()
    products = []
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            products.append(
                (by_packed(a, weight, None), torch.ops.fastenc.gemm(a, weight.t(), None))
            )
    finally:
        torch.set_num_threads(before)
    assert within(products[0][0], a.double() @ weight.double().t(), 200)
    assert all(torch.equal(y, products[0][0]) for pair in products for y in pair)


@pytest.mark.skipif(not library.HAS_CPP, reason="the extension is not built")
@pytest.mark.parametrize(
    ("inner", "columns", "bias"), [(40, 64, None), (32, 65, None), (32, 64, torch.zeros(3))]
)
def test_packed_weights_of_another_size_are_refused(inner, columns, bias):
    with pytest.raises(RuntimeError, match=r"packed|bias"):
        gemm_packed(torch.randn(5, inner), pack_weight(torch.randn(64, 32)), bias, columns)


@pytest.mark.parametrize("rows", [0, 1, 70])
@pytest.mark.parametrize("wanted", [("x",), ("weight", "bias"), ("x", "weight", "bias")])
def test_gradients(rows, wanted):
    wide = {
        name: torch.randn(shape, dtype=torch.float64)
        for name, shape in {"x": (rows, 48), "weight": (33, 48), "bias": (33,)}.items()
    }
    results = []
    for function, dtype in ((linear, torch.float32), (F.linear, torch.float64)):
        given = {
            name: value.to(dtype).requires_grad_(name in wanted) for name, value in wide.items()
        }
        y = function(*given.values())
        # The gradient of sum() is one number, expanded.
        results.append((y, *torch.autograd.grad(y.sum(), [given[name] for name in wanted])))
    for actual, expected in zip(*results, strict=True):
        assert actual.shape == expected.shape
        if rows:
            assert within(actual, expected, 70)


def test_strided_rows():
    x = torch.randn(40, 96)[::2, 16:64].requires_grad_()
    weight = torch.randn(24, 96)[:, ::2]
    y = linear(x, weight)
    (dx,) = torch.autograd.grad(y, x, dy := torch.randn(20, 24))
    assert within(y, x.double() @ weight.double().t(), 48)
    assert within(dx, dy.double() @ weight.double(), 24)


@pytest.mark.parametrize("emulated", [False, True])
def test_autocast(emulated, monkeypatch):
    """The product is ours where PyTorch would emulate it."""
    monkeypatch.setattr("fastenc.ops.gemm.emulates_bfloat16", lambda: emulated)
    x, weight, bias, dy = (torch.randn(*size) for size in ((5, 16), (8, 16), (8,), (5, 8)))
    given = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = linear(*given), F.linear(*given)
    assert y.dtype == expected.dtype == torch.bfloat16
    ours = "_Linear" in y.grad_fn.name()
    assert ours == (emulated and library.HAS_CPP)
    results = [(each, *torch.autograd.grad(each, given, dy.bfloat16())) for each in (y, expected)]
    for actual, right in zip(*results, strict=True):
        assert actual.dtype == right.dtype and within(actual.bfloat16(), right.double(), 16)


def test_other_dtypes_are_torchs():
    x, weight = torch.randn(5, 16), torch.randn(8, 16)
    assert torch.equal(linear(x.double(), weight.double()), F.linear(x.double(), weight.double()))
    assert torch.equal(linear(x[None], weight), F.linear(x[None], weight))


def test_torch_can_compile():
    x, weight = torch.randn(5, 16, requires_grad=True), torch.randn(8, 16)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight), F.linear(x, weight))


def products_of_a_training_step(autocast):
    torch.manual_seed(0)
    config = EncoderConfig(
        vocab_size=50,
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        intermediate_size=64,
        pooler=False,
    )
    model = Encoder(config)
    batch = pack_sequences([[1, 2, 3], [4, 5, 6, 7]])
    with Products() as seen:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(batch).last_hidden_state.square().sum()
        loss.backward()
    return seen.names


@pytest.mark.skipif(not library.HAS_CPP, reason="without the extension the layers are references")
def test_all_products_of_a_training_step_are_ours_or_all_are_torchs(ours):
    names = products_of_a_training_step(autocast=False)
    assert ("gemm" in names) == ours
    assert bool(names & {"mm", "addmm"}) != ours


@pytest.mark.skipif(not library.HAS_CPP, reason="without the extension the layers are references")
def test_torch_multiplies_no_bfloat16_that_it_would_emulate(monkeypatch):
    """Its product with a sum took 90 % of a step's time on a processor without AVX-512."""
    monkeypatch.setattr("fastenc.ops.gemm.emulates_bfloat16", lambda: True)
    assert products_of_a_training_step(autocast=True) == {"gemm"}


@pytest.mark.skipif(not library.HAS_CPP, reason="the extension tells the processor")
@pytest.mark.parametrize(
    ("intel", "instructions", "expected"),
    [
        (False, "avx512", True),
        (True, "avx512", False),
        (False, "avx2", False),
    ],
)
def test_which_processors_take_our_products(intel, instructions, expected, monkeypatch):
    monkeypatch.undo()
    if not torch.backends.mkl.is_available():
        pytest.skip("this torch comes without MKL")
    built = {"intel_processor": intel, "instruction_set": instructions}
    monkeypatch.setattr(library._C, "build_info", lambda: built)
    assert cpp_product_is_faster.__wrapped__() is expected
