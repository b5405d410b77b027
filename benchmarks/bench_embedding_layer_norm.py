"""LayerNorm(word + position + token type), forward and backward, with the word table tied to the decoder or not."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks._compare import compare, compiled
from benchmarks._compare_ops import TOLERANCES, compare_functions
from benchmarks._device import DEVICE, ON_GPU
from benchmarks._results import dtype_name, run_groups
from benchmarks._tuning import TOKENS, Problem, random_inputs
from benchmarks.gpu_quick import problems
from fastenc.ops import embedding_layer_norm, tied_embedding_layer_norm
from fastenc.profiling import Work

TABLES = {"embedding_layer_norm": "Embeddings and LayerNorm, vocabulary 30,522"}
SMALLEST = (9, 8, torch.float32)  # the shape that the tests measure
VOCABULARY = 30522
# model: tokens, width
SHAPES = (
    [("MiniLM", 16384, 384), ("BERT-base", 16384, 768), ("BERT-large", 16384, 1024)]
    if ON_GPU
    else [("MiniLM", 20, 384), ("MiniLM", 4096, 384), ("BERT-base", 4096, 768)]
)


def measure(name: str, tokens: int, width: int, dtype: torch.dtype) -> dict[str, dict]:
    new = lambda *shape: torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_()
    tables = new(VOCABULARY, width), new(512, width), new(2, width), new(width), new(width)
    # Word frequencies fall with the rank, as in a natural language.
    ids = (VOCABULARY ** torch.rand(tokens)).long().clamp(max=VOCABULARY - 1).to(DEVICE)
    positions = torch.arange(tokens, device=DEVICE) % 512
    types = torch.arange(tokens, device=DEVICE) // 64 % 2

    def arguments(word, position, token_type, weight, bias):
        rest = {"position_ids": positions, "position": position}
        return (ids, word, weight, bias), rest | {
            "token_type_ids": types,
            "token_type": token_type,
        }

    def ours(*values):
        given, named = arguments(*values)
        return embedding_layer_norm(*given, **named)

    def eager(word, position, token_type, weight, bias):
        h = F.embedding(ids, word) + F.embedding(types, token_type)
        h = h + F.embedding(positions, position)
        return F.layer_norm(h, (width,), weight, bias, 1e-12)

    dy = torch.randn(tokens, width, device=DEVICE).to(dtype)
    one, table = tokens * width * dtype.itemsize, VOCABULARY * width * dtype.itemsize
    forward = Work(2 * one, dtype=dtype)  # word rows read, y written
    # dy and word rows read, the table's gradient written
    backward = Work(2 * one + table, dtype=dtype)
    cases = compare_functions(
        name,
        {"fastenc": ours, "eager": eager, "torch.compile": compiled(eager)},
        tables,
        dy,
        forward=forward,
        backward=backward,
    )

    def tied(*values):
        given, named = arguments(*values)
        return tied_embedding_layer_norm(*given, **named)

    def twice(*values):
        return eager(*values), values[0]

    def gradients(embed, values, *upstream):
        y, decoder = embed(*values)
        return torch.autograd.grad((y, F.linear(y[:8], decoder)), values, upstream)

    dlogits = torch.randn(8, VOCABULARY, device=DEVICE).to(dtype)
    wide = tuple(table.detach().double().requires_grad_() for table in tables)
    exact = gradients(twice, wide, dy.double(), dlogits.double())

    def check(_, results):
        pairs = zip(results, exact, strict=True)
        worst = max(((value.double() - true).norm() / true.norm()).item() for value, true in pairs)
        return None if worst < TOLERANCES[dtype] else f"gradient: relative error {worst:.2g}"

    embeddings = {"fastenc": tied, "eager": twice, "torch.compile": compiled(twice)}
    calls = {
        provider: embed
        if isinstance(embed, str)
        else partial(gradients, embed, tables, dy, dlogits)
        for provider, embed in embeddings.items()
    }
    # In addition: forward, the table is read and logits are written; backward, the table and dlogits are read. Three
    # products.
    more = Work(2 * table + 2 * dlogits.nbytes, 6 * dlogits.numel() * width, dtype)
    cases[f"{name}, forward + backward, tied decoder of 8 rows"] = compare(
        calls, baseline="eager", check=check, work=forward + backward + more
    )
    return cases


def main() -> None:
    groups = {}
    for model, tokens, width in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{model} {tokens:,} x {width} {dtype_name(dtype)}"
            groups[name] = partial(measure, name, tokens, width, dtype)
    run_groups("embedding_layer_norm", groups)


def tuned(dtype: torch.dtype) -> Iterator[Callable[[], Problem]]:
    for width in (768, 1024, 384):
        for p in (0.1, 0.0):
            yield partial(embedding_problem, TOKENS, width, dtype, p)


def embedding_problem(tokens: int, width: int, dtype: torch.dtype, p: float) -> Problem:
    ids, positions = (torch.randint(n, (tokens,), device=DEVICE) for n in (VOCABULARY, 512))

    def run(word, position, token_type, weight, bias, impl):
        tables = {"position_ids": positions, "position": position, "token_type": token_type}
        return embedding_layer_norm(ids, word, weight, bias, dropout_p=p, impl=impl, **tables)

    shapes = ((VOCABULARY, width), (512, width), (2, width), (width,), (width,))
    return Problem("embedding_layer_norm", run, random_inputs(dtype, *shapes))


def visited(size: problems.Size) -> Iterator[tuple[str, Callable[[], problems.Problem]]]:
    one, table = size.tokens * size.width, size.vocabulary * size.width
    given = "embedding_layer_norm", size.of(size.short())
    least = problems.work(2 * one), problems.work(7 * one + table)
    for p in (0.0, 0.1):
        make = partial(problems.problem, *given, *least, dropout_p=p)
        yield f"embedding_layer_norm, dropout {p}", make


if __name__ == "__main__":
    main()
