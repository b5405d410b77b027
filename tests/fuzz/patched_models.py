"""The same edits on a patched model and on the same model without the patch give the same results."""

import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import fastenc
from fastenc.nn.frozen_weights import FrozenWeights
from tests.helpers.families import ENCODERS, FAMILIES, WHOLE, model, padded_batch, whole
from tests.helpers.patching import labels_for

# Changes a model in place, or returns another one.
Edit = Callable[[nn.Module, Random], nn.Module | None]
HEADS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
# Relative to the largest value, or to 1. With a larger difference, ours may be no further from float64 than theirs.
TOLERANCE = 1e-4
# Errors of transformers' own forward after edits that the fused one computes.
STRICTER = ("Inference tensors", "dtype", "scalar type")
# Recording outputs leaves a hook that cannot be pickled; the fused forward does not need it.
MAY_SUCCEED = ("pickled",)
# With one thread, 240 rows are enough for packed weights, and 9 are too few for blocks.
LENGTHS = ((30,) * 8, (5, 4), (1, 30, 7), (12, 12))
MODES: dict[str, Callable[[], AbstractContextManager]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "gradients": nullcontext,
}


@cache
def _models(family: str, task: str) -> tuple[nn.Module, nn.Module]:
    with torch.random.fork_rng():
        theirs = whole(family) if task == WHOLE else model(family, task)
    return theirs, fastenc.patch(copy.deepcopy(theirs))


def pair(family: str, task: str, rng: Random) -> tuple[nn.Module, nn.Module]:
    """The model, and the same model patched: a copy of a patched one, or newly patched."""
    theirs, ours = map(copy.deepcopy, _models(family, task))
    return theirs, ours if rng.random() < 0.97 else fastenc.patch(copy.deepcopy(theirs))


def modules_of(model: nn.Module, module_type: Any = nn.Module) -> list[nn.Module]:
    """All modules except the root, in the same order with and without the patch."""
    return [m for m in model.modules() if isinstance(m, module_type) and not _is_patch(m)][
        isinstance(model, module_type) :
    ]


def _is_patch(module: nn.Module) -> bool:
    return isinstance(module, FrozenWeights)


def check_edits(edits: dict[str, Edit], rng: Random) -> None:
    """Edits of an encoder, or of a model with a head."""
    family = rng.choice(ENCODERS)
    task = rng.choice(("Model", "Model", *HEADS)) if family in FAMILIES else "Model"
    check_edits_of(family, task, edits, rng)


def check_edits_of(family: str, task: str, edits: dict[str, Edit], rng: Random) -> None:
    """Up to four random edits, with a comparison after each."""
    theirs, ours = pair(family, task, rng)
    done: list[str] = []
    if rng.random() < 0.5:
        _compare(theirs, ours, family, task, rng)
    for _ in range(rng.randint(1, 4)):
        name = rng.choice(list(edits))
        done.append(name)
        seed = rng.getrandbits(60)
        theirs, their_error = _edited(theirs, edits[name], seed)
        ours, our_error = _edited(ours, edits[name], seed)
        try:
            if their_error is not None:  # the edit may be half done
                assert our_error is not None or name in MAY_SUCCEED, (
                    f"no error, not {their_error!r}"
                )
                return
            assert our_error is None, f"{our_error!r}"
            for _ in range(2):
                _compare(theirs, ours, family, task, rng)
        except AssertionError as error:
            raise AssertionError(f"{family}{task} after {done} ({seed}): {error}") from error


def _edited(model: nn.Module, edit: Edit, seed: int) -> tuple[nn.Module, Exception | None]:
    # torch.manual_seed also formats a stack trace, for a GPU.
    torch.default_generator.manual_seed(seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return edit(model, Random(seed)) or model, None
    except Exception as error:
        return model, error


def _compare(theirs: nn.Module, ours: nn.Module, family: str, task: str, rng: Random) -> None:
    batch: dict[str, Any] = padded_batch(family, rng.choice(LENGTHS), rng.getrandbits(30))
    mask, mode = batch["attention_mask"], rng.choice(list(MODES))
    if task == WHOLE:
        batch |= _target(batch, rng)
    elif task != "Model" and rng.random() < 0.5:
        batch |= labels_for(task.replace("ForMaskedLM", "MaskedLM"), batch)
    if rng.random() < 0.3:
        batch["output_hidden_states"] = True
    seed = rng.getrandbits(60)
    expected = _results(theirs, batch, mask, mode, seed)
    results = _results(ours, batch, mask, mode, seed)
    if isinstance(expected, Exception):
        allowed = any(word in str(expected) for word in STRICTER)
        assert allowed or isinstance(results, Exception), f"{mode}: no error, not {expected!r}"
        return
    if isinstance(results, Exception):
        if "Inference tensors" in str(results):  # a saved tensor; transformers' forward saves fewer
            return
        raise AssertionError(f"{mode}: {results!r}") from results
    assert [t.shape for t in results] == [t.shape for t in expected], f"{mode}: other shapes"
    for number, (one, two) in enumerate(zip(results, expected, strict=True)):
        # Some of transformers' classes round the loss to the logits' dtype; ours is always float32.
        unrounded = not one.dim() and one.dtype == torch.float32
        assert one.dtype == two.dtype or unrounded, f"{mode}: other dtypes"
        allowed = _allowed(two)
        error = _distance(one, two)
        if error <= allowed:
            continue
        exact = _results(_in_float64(theirs), batch, mask, mode, seed)
        assert not isinstance(exact, Exception), f"{mode}: result {number} differs by {error:.2g}"
        own = _distance(two, exact[number])
        error = _distance(one, exact[number])
        assert error <= 4 * own + allowed, (
            f"{mode}: result {number} differs from float64 by {error:.2g}, the model's own by {own:.2g}"
        )


def _target(batch: dict[str, Any], rng: Random) -> dict[str, Any]:
    """The source is also the target: its tokens as labels, or without labels as the decoder's input."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    if rng.random() < 0.5:
        return {"labels": ids.masked_fill(mask == 0, -100), "use_cache": False}
    return {"decoder_input_ids": ids, "decoder_attention_mask": mask, "use_cache": False}


def _in_float64(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model).double()
    for module in twin.modules():  # weights that are not parameters
        for name, value in vars(module).items():
            if torch.is_tensor(value) and value.is_floating_point():
                setattr(module, name, value.double())
    return twin


def _results(
    model: nn.Module, batch: dict[str, Any], mask: Tensor, mode: str, seed: int
) -> list[Tensor] | Exception:
    """The outputs of real tokens and sequences, and the gradient of a random sum of them for every parameter."""
    torch.default_generator.manual_seed(seed)
    try:
        with warnings.catch_warnings(), MODES[mode]():
            warnings.simplefilter("ignore")
            output = model(**batch)
            results = [_real(t, mask) for t in _tensors(output)]
            if mode == "gradients":
                results += _gradients(model, results)
            return [result.detach().clone() for result in results]
    except Exception as error:
        return error


def _gradients(model: nn.Module, results: list[Tensor]) -> list[Tensor]:
    torch.default_generator.manual_seed(5)
    loss = sum((torch.randn(t.shape) * t.float()).sum() for t in results if t.is_floating_point())
    if not (torch.is_tensor(loss) and loss.requires_grad):
        return []
    model.zero_grad()
    loss.backward()
    # An embedding's may be sparse.
    return [p.grad.to_dense() for p in model.parameters() if p.grad is not None]


def _tensors(output: Any) -> list[Tensor]:
    if torch.is_tensor(output):
        return [output]
    values = output.values() if isinstance(output, dict) else output
    return [t for value in values if value is not None for t in _tensors(value)]


def _real(t: Tensor, mask: Tensor) -> Tensor:
    return t[mask.bool()] if t.shape[:2] == mask.shape else t


def _allowed(exact: Tensor) -> float:
    finite = exact[exact.isfinite()]
    step = {torch.bfloat16: 0.05, torch.float16: 0.02}.get(exact.dtype, TOLERANCE)
    return step * max(1.0, float(finite.abs().max()) if finite.numel() else 0.0)


def _distance(one: Tensor, two: Tensor) -> float:
    """The largest difference; infinite if only one of them is a number."""
    one, two = one.double(), two.double()
    same = (one == two) | (one.isnan() & two.isnan())
    difference = torch.where(same, 0.0, (one - two).abs()).nan_to_num(nan=torch.inf)
    return float(difference.max()) if difference.numel() else 0.0
