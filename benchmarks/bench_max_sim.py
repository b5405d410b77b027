"""MaxSim of a query's 32 vectors with documents of real lengths: padded and packed in torch, and by a C++ op.

"einsum, padded" is the form of sentence-transformers and ColBERT. "fastenc" is ``fastenc.models.max_sim``: one product
of the packed documents, and torch's ``segment_reduce``. ``linear_segment_max`` takes the maxima of each tile of the
product while the tile is in the cache, as a kernel of MaxSim would. "product alone" takes no maxima.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import lengths
from benchmarks._compare import compare
from benchmarks._device import DEVICE
from benchmarks._results import run_groups
from fastenc.models import max_sim
from fastenc.ops import linear_segment_max

TABLES = {"max_sim": "MaxSim: a query of 32 vectors, documents of real lengths"}
QUERY, TOKENS = 32, 40_000
BASELINE, FLOOR = "einsum, padded", "product alone"


def measure(name: str, data_set: str, width: int) -> dict[str, dict]:
    torch.manual_seed(0)
    sizes = lengths.lengths(data_set, TOKENS)
    draw = lambda rows: F.normalize(torch.randn(rows, width, device=DEVICE), dim=1)
    query, packed = draw(QUERY), draw(sum(sizes))
    counts = torch.tensor(sizes, device=DEVICE)
    padded = torch.nn.utils.rnn.pad_sequence(packed.split(sizes), batch_first=True)
    real = torch.arange(padded.shape[1], device=DEVICE) < counts[:, None]
    ends = torch.tensor([0, *sizes]).cumsum(0, dtype=torch.int32).to(DEVICE)

    def einsum() -> Tensor:
        scores = torch.einsum("qw,dtw->dqt", query, padded)
        return scores.masked_fill(~real[:, None], float("-inf")).amax(2).sum(1)

    expected = einsum()

    def check(provider: str, scores: Tensor) -> str | None:
        apart = 0.0 if provider == FLOOR else (scores - expected).abs().max().item()
        return None if apart < 1e-4 else f"differs by {apart:.2g}"

    providers = {
        BASELINE: einsum,
        "fastenc": lambda: max_sim(query, packed, counts),
        "linear_segment_max": lambda: linear_segment_max(packed, query, None, ends)[0].sum(1),
        FLOOR: lambda: packed @ query.T,
    }
    with torch.inference_mode():
        return {name: compare(providers, baseline=BASELINE, check=check)}


def main() -> None:
    cases = [(name, 128) for name in ("SST-2", "SNLI", "Wikipedia")] + [("Wikipedia", 1024)]
    groups = {}
    for data_set, width in cases:
        name = f"lengths of {data_set}, width {width}"
        groups[name] = partial(measure, name, data_set, width)
    run_groups("max_sim", groups)


if __name__ == "__main__":
    main()
