"""Are dropout's masks random? Tests of the hash behind them along columns, rows, heads, seeds and offsets.

    python -m benchmarks.studies.dropout_battery [--words 22] [--dieharder] [--practrand]

Each walk reads 16-bit words, which a mask compares with its threshold; one coordinate runs fastest. The tests are some
of NIST SP 800-22 (frequency, runs, serial patterns, spectrum, matrix rank) and tests of masks (sums of rows and
columns, agreement of neighbouring rows, correlation at lags along both sides). Weak hashes must fail: a battery that
passes everything shows nothing. --dieharder and --practrand send the walks to these programs, if they are installed.
"""

import argparse
import shutil
import subprocess
from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import Tensor

from fastenc.reference.dropout import hash_columns, row_keys

Hash = Callable[[tuple[Tensor, Tensor], Tensor], Tensor]
MASK = 0xFFFFFFFF
SEED = 0x1234_5678_9ABC_DEF1
WIDTH = 768


def state(seed: int = SEED, offset: int = 0) -> Tensor:
    return torch.tensor([seed, offset])


def words(hashed: Hash, keys: tuple[Tensor, Tensor], width: int) -> Tensor:
    """Words in [0, 65536), (rows, width)."""
    return hashed(keys, torch.arange(width)) >> 16


# Walks: endless blocks (n, m) of words; the second coordinate runs fastest.


def along_columns(hashed: Hash, width: int = WIDTH, keys=row_keys) -> Iterator[Tensor]:
    """The rows of a mask, one after another."""
    rows = max(1, 2**19 // width)
    for start in range(0, 2**32, rows):
        yield words(hashed, keys(state(), 0, torch.arange(start, start + rows)), width)


def along_rows(hashed: Hash, keys=row_keys) -> Iterator[Tensor]:
    """The columns of a mask, each 4,096 rows long."""
    for start in range(0, 2**32, 4096):
        yield words(hashed, keys(state(), 0, torch.arange(start, start + 4096)), 128).t()


def along_heads(hashed: Hash, keys=row_keys) -> Iterator[Tensor]:
    """The same element of 16 heads, then the next rows and columns."""
    heads = torch.arange(16)[:, None]
    for start in range(0, 2**32, 64):
        hashes = words(hashed, keys(state(), heads, torch.arange(start, start + 64)), 512)
        yield hashes.permute(1, 2, 0).reshape(-1, 16)


def along_seeds(hashed: Hash, keys=row_keys) -> Iterator[Tensor]:
    """The same row of the masks of consecutive seeds."""
    for start in range(0, 2**32, 64):
        rows = [
            words(hashed, keys(state(start + i), 0, torch.arange(8)), 512).flatten()
            for i in range(64)
        ]
        yield torch.stack(rows, 1)


def along_offsets(hashed: Hash, keys=row_keys) -> Iterator[Tensor]:
    """The same row of the masks of consecutive offsets."""
    for start in range(0, 2**32, 64):
        rows = [
            words(hashed, keys(state(offset=start + i), 0, torch.arange(8)), 512).flatten()
            for i in range(64)
        ]
        yield torch.stack(rows, 1)


WALKS = {
    "columns of 768": along_columns,
    "columns of 128": lambda hashed: along_columns(hashed, 128),
    "columns of 8,192": lambda hashed: along_columns(hashed, 8192),
    "columns of 65,536": lambda hashed: along_columns(hashed, 65536),
    "rows": along_rows,
    "heads": along_heads,
    "seeds": along_seeds,
    "offsets": along_offsets,
}


def collect(walk: Iterator[Tensor], size: int) -> Tensor:
    """(rows, m) of about 2^size words."""
    first = next(walk)
    more = max(0, 2**size // first.numel() - 1)
    return torch.cat([first, *islice(walk, more)])


# p-values


def from_chi2(statistic: Tensor | float, freedom: float) -> float:
    half = torch.tensor([freedom / 2, float(statistic) / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def from_normal(z: Tensor | float) -> float:
    return float(torch.special.erfc(torch.tensor(abs(float(z)) / 2**0.5, dtype=torch.float64)))


def from_uniform_counts(counts: Tensor, expected: Tensor) -> float:
    return from_chi2(((counts - expected) ** 2 / expected).sum(), len(counts) - 1)


def word_tests(x: Tensor) -> Iterator[tuple[str, float]]:
    """Tests of 16-bit words in the order of the walk."""
    flat = x.flatten()
    n = len(flat)
    counts = torch.bincount(flat, minlength=65536).double()
    yield "words", from_uniform_counts(counts, torch.full_like(counts, n / 65536))
    for bit in range(16):
        yield f"bit {bit}", from_normal((((flat >> bit) & 1) * 2 - 1).sum().double() / n**0.5)
    for high in (12, 8):  # pairs of the upper four bits, then of lower bits
        nibble = (flat >> high) & 15
        pairs = torch.bincount(nibble[:-1:2] * 16 + nibble[1::2], minlength=256).double()
        yield (
            f"pairs of bits {high}-{high + 3}",
            from_uniform_counts(pairs, torch.full_like(pairs, len(nibble) // 2 / 256)),
        )
    usable = n // 2048 * 2048
    wave = (flat[:usable].reshape(-1, 2048).double() - 32767.5) / (65536**2 / 12) ** 0.5
    power = torch.fft.rfft(wave).abs()[:, 1:-1] ** 2 / 2048  # exponential, mean 1
    yield (
        "spectrum, each frequency",
        from_chi2(((power.mean(0) - 1) ** 2 * len(power)).sum(), power.shape[1]),
    )
    for bit in (15, 8, 0):
        yield f"rank of bit {bit}", rank_test(((flat >> bit) & 1)[: n // 4096 * 4096])


def rank_test(bits: Tensor, side: int = 32) -> float:
    """Ranks of random 32 x 32 matrices of bits (NIST SP 800-22, 2.5)."""
    matrices = bits[: len(bits) // side**2 * side**2].reshape(-1, side, side)[:4000]
    rows = (matrices << torch.arange(side)).sum(2)  # a row is a number
    rank = torch.zeros(len(rows), dtype=torch.long)
    for bit in range(side):
        has = ((rows >> bit) & 1).bool()
        pivot = has.long().argmax(1)
        has_pivot = has.any(1)
        value = rows.gather(1, pivot[:, None]) * has_pivot[:, None]
        rows = torch.where(has & has_pivot[:, None], rows ^ value, rows)
        rank += has_pivot
    likely = torch.tensor([0.2887880952, 0.5775761902, 0.1336357146], dtype=torch.float64)
    counts = torch.tensor([(rank == side).sum(), (rank == side - 1).sum(), (rank < side - 1).sum()])
    return from_uniform_counts(counts.double(), likely * len(rank))


def mask_tests(x: Tensor, p: float) -> Iterator[tuple[str, float]]:
    """Tests of the mask (rows, m) that the words give for dropout with probability p."""
    threshold = int(p * 65536 + 0.5)
    p = threshold / 65536
    z = ((x < threshold).double() - p) / (p * (1 - p)) ** 0.5  # mean 0, variance 1
    rows, width = z.shape
    name = f"p={p:.2f} "
    yield name + "rate", from_normal(z.sum() / z.numel() ** 0.5)
    if width >= 64:
        yield name + "sums of rows", dispersion(z.sum(1) / width**0.5)
    if rows >= 64:
        yield name + "sums of columns", dispersion(z.sum(0) / rows**0.5)
    flat = z.flatten()
    for lag in (*range(1, 17), 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 4096):
        if lag < len(flat) // 2:
            product = (flat[:-lag] * flat[lag:]).sum() / (len(flat) - lag) ** 0.5
            yield name + f"lag {lag}", from_normal(product)
    if width >= 64:
        for step in (1, 2, 3, 4, 8, 16, 64):
            if rows > 2 * step:
                pair = (z[:-step] * z[step:]).sum(1) / width**0.5
                yield name + f"rows {step} apart, each", dispersion(pair)
                yield name + f"rows {step} apart", from_normal(pair.sum() / len(pair) ** 0.5)
        diagonal = (z[:-1, :-1] * z[1:, 1:]).sum() / ((rows - 1) * (width - 1)) ** 0.5
        yield name + "diagonal", from_normal(diagonal)
    dropped = (flat > 0).long()
    usable = len(dropped) // 8 * 8
    pattern = (dropped[:usable].reshape(-1, 8) << torch.arange(8)).sum(1)
    ones = torch.tensor([bin(i).count("1") for i in range(256)]).double()
    expected = p**ones * (1 - p) ** (8 - ones) * len(pattern)
    counts = torch.bincount(pattern, minlength=256).double()
    common = expected >= 5
    counts = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    yield name + "patterns of 8", from_uniform_counts(counts[expected > 0], expected[expected > 0])
    changes = (dropped[1:] != dropped[:-1]).sum().double()
    # Changes of a Bernoulli chain: neighbours share an element, so their products correlate.
    n, q = len(dropped) - 1, p * (1 - p)
    variance = n * (2 * q * (1 - 2 * q)) + 2 * (n - 1) * (q - 4 * q * q)
    yield name + "runs", from_normal((changes - 2 * q * n) / variance**0.5)


def dispersion(z: Tensor) -> float:
    """p-value of a variance of 1, for values that should be standard normal: two-sided, by the sum's fourth moments."""
    excess = ((z * z) - 1).sum()
    return from_normal(excess / ((z * z).var() * len(z)) ** 0.5)


def battery(walk: Iterator[Tensor], size: int) -> dict[str, float]:
    """{test: p-value} over about 2^size words."""
    x = collect(walk, size)
    results = dict(word_tests(x))
    for p in (0.1, 0.5, 0.02):
        results |= mask_tests(x, p)
    return results


def verdict(p_values: dict[str, float]) -> tuple[str, float]:
    """The worst test and its p-value times the number of tests (Bonferroni)."""
    worst = min(p_values, key=p_values.get)
    return worst, min(1.0, p_values[worst] * len(p_values))


# Hashes that are too weak: the battery must reject them.


def one_multiply(keys, columns):
    """The hash without its shift and its second multiplication."""
    return ((keys[0].unsqueeze(-1) ^ (columns * 0x9E3779B1 & MASK)) * 0x85EBCA6B) & MASK


def weyl(keys, columns):
    """A hash whose rows are arithmetic progressions."""
    return (keys[0].unsqueeze(-1) + columns * 0x9E3779B1) & MASK


def numbered_keys(rng_state, stream, rows):
    """Rows that are numbered instead of mixed by Philox."""
    number = rows + 65536 * stream + rng_state[0] + rng_state[1]
    return number & MASK, torch.zeros_like(number)


WEAK = {
    "one multiplication": lambda: along_columns(one_multiply),
    "arithmetic progression": lambda: along_columns(weyl),
    "numbered rows, along rows": lambda: along_rows(hash_columns, numbered_keys),
    "numbered rows, along columns": lambda: along_columns(hash_columns, keys=numbered_keys),
}


def external(command: list[str], walk: Iterator[Tensor]) -> None:
    """Send a walk's words to a program until it stops reading."""
    with subprocess.Popen(command, stdin=subprocess.PIPE) as program:
        try:
            for block in walk:
                program.stdin.write(block.to(torch.uint16).contiguous().numpy().tobytes())
        except BrokenPipeError:
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--words", type=int, default=22, help="2^N words a walk")
    parser.add_argument("--walk", choices=WALKS, action="append", help="only this one")
    parser.add_argument(
        "--dieharder", nargs="*", help="run dieharder with these options (default -a)"
    )
    parser.add_argument("--practrand", action="store_true", help="run PractRand's RNG_test")
    options = parser.parse_args()
    walks = {name: WALKS[name] for name in options.walk or WALKS}
    if options.dieharder is not None or options.practrand:
        program = "RNG_test" if options.practrand else "dieharder"
        if not shutil.which(program):
            parser.error(f"{program} is not on the PATH: install it or leave the option out")
        arguments = (
            ["stdin16"] if options.practrand else [*(options.dieharder or ["-a"]), "-g", "200"]
        )
        for name, walk in walks.items():
            print(f"{name}:", flush=True)
            external([program, *arguments], walk(hash_columns))
        return
    failed = False
    for name, walk in walks.items():
        p_values = battery(walk(hash_columns), options.words)
        worst, p = verdict(p_values)
        failed |= p < 1e-3
        print(f"{name}: {len(p_values)} tests, the worst is '{worst}', p = {p:.2g} of all of them")
    for name, walk in WEAK.items():
        worst, p = verdict(battery(walk(), options.words))
        failed |= p >= 1e-3
        print(f"weak hash, {name}: '{worst}', p = {p:.2g}")
    raise SystemExit("FAILED" if failed else None)


if __name__ == "__main__":
    main()
