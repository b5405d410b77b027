"""LayerNorm(word + position + token type), forward and forward + backward, the word table tied or not."""

import torch
import torch.nn.functional as F

from benchmarks._harness import compare, forward_and_backward, write
from fastenc.ops import embedding_layer_norm, tied_embedding_layer_norm

VOCABULARY = 30522
SHAPES = {
    "MiniLM 20 x 384": (20, 384),
    "MiniLM 4,096 x 384": (4096, 384),
    "BERT-base 4,096 x 768": (4096, 768),
}


def bytes_moved(tokens: int, width: int, element: int) -> int:
    """Forward: word rows read, y written."""
    return 2 * tokens * width * element


def main() -> None:
    cases = {}
    for shape, (tokens, width) in SHAPES.items():
        for dtype in (torch.float32, torch.bfloat16):
            make = lambda *size: torch.randn(*size).to(dtype).requires_grad_()
            word, position, kind = make(VOCABULARY, width), make(512, width), make(2, width)
            weight, bias = make(width), make(width)
            # Word frequencies fall with the rank, as a language's do.
            ids = (VOCABULARY ** torch.rand(tokens)).long().clamp(max=VOCABULARY - 1)
            positions, types = torch.arange(tokens) % 512, torch.arange(tokens) // 64 % 2
            ours = {
                "position_ids": positions,
                "position": position,
                "token_type_ids": types,
                "token_type": kind,
            }

            def eager(word, position, kind, weight, bias):
                h = F.embedding(ids, word) + F.embedding(types, kind)
                h = h + F.embedding(positions, position)
                return F.layer_norm(h, (width,), weight, bias, 1e-12)

            tables = (word, position, kind, weight, bias)
            name = f"{shape} {str(dtype).removeprefix('torch.')}"
            dy = torch.randn(tokens, width).to(dtype)
            cases |= forward_and_backward(
                name,
                {
                    "fastenc": lambda: embedding_layer_norm(ids, word, weight, bias, **ours),
                    "eager": lambda: eager(*tables),
                },
                tables,
                dy,
                truth=eager,
                tolerance=1e-4 if dtype == torch.float32 else 0.1,
                bytes_moved=bytes_moved(tokens, width, word.element_size()),
            )

            def tied():
                y, table = tied_embedding_layer_norm(ids, word, weight, bias, **ours)
                return torch.autograd.grad((y, F.linear(y[:8], table)), tables, (dy, dlogits))

            def twice():
                y = eager(*tables)
                return torch.autograd.grad((y, F.linear(y[:8], word)), tables, (dy, dlogits))

            dlogits = torch.randn(8, VOCABULARY).to(dtype)
            cases[f"{name}, forward + backward, tied decoder of 8 rows"] = compare(
                {"fastenc": tied, "eager": twice}, baseline="eager"
            )
    write("embedding_layer_norm", cases)


if __name__ == "__main__":
    main()
