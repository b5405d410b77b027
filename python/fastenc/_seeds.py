"""Seeds of random streams, derived from a run's seed."""

import hashlib


def derive_seed(seed: int, *keys: int | str, size: int = 4) -> int:
    """A hash of the seed and the keys, as an unsigned integer of ``size`` bytes; torch's CPU generator uses 4.

    Sums such as seed + step would give runs with neighbouring seeds the same streams, shifted by a step.
    """
    text = " ".join(map(str, (seed, *keys)))
    digest = hashlib.blake2b(text.encode(), digest_size=size).digest()
    return int.from_bytes(digest, "little")
