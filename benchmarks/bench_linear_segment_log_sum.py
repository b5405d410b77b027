"""The sums of log(1 + ReLU) of the masked-LM head's logits over each text (SPLADE): values and gradients."""

import torch

from benchmarks.bench_linear_segment_max import beside_all_logits, run_op
from fastenc.ops import linear_segment_log_sum

TABLES = {"linear_segment_log_sum": "Sums of log(1 + ReLU) of the logits of each text"}
SMALLEST = ([3, 1, 5], 8, 30, torch.float32)  # the shape that the tests measure


def measure(
    name: str, lengths: list[int], width: int, vocabulary: int, dtype: torch.dtype
) -> dict[str, dict]:
    log_sum = lambda logits: logits.relu().log1p().sum(0)
    shape = (lengths, width, vocabulary, dtype)
    return beside_all_logits(name, *shape, linear_segment_log_sum, log_sum, dense=True)


def main() -> None:
    run_op("linear_segment_log_sum", measure)


if __name__ == "__main__":
    main()
