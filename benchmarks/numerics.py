"""The report of `fastenc info --numerics` as a result of this device: python -m benchmarks.numerics

Each op's largest error against float64, and plain PyTorch's in the same dtype, relative to the largest value. Exits
with an error if a budget is exceeded.
"""

from benchmarks._results import dtype_name, exit_if_broken, write
from fastenc.testing import numerics_report


def main() -> None:
    cases: dict[str, dict] = {}
    broken = []
    for row in numerics_report():
        case = f"{row.op} {row.detail}".strip() + f", {dtype_name(row.dtype)}"
        cases.setdefault(case, {})[row.quantity] = {
            "implementation": row.implementation,
            "error": row.error,
            "plain_error": row.plain_error,
            "allowed": row.allowed,
            "holds": row.holds,
        }
        broken += [] if row.holds else [f"{case}: {row.quantity}"]
    write("numerics", cases)
    exit_if_broken(broken)


if __name__ == "__main__":
    main()
