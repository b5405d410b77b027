"""Seeds for several random generators of a run, derived from the run's seed."""

import hashlib


def derive_seed(seed: int, *keys: int | str, size: int = 4) -> int:
    """A hash of the seed and the keys, as an unsigned integer of ``size`` bytes (torch's CPU generator uses 4).

    It is not a sum such as seed + step, because then a run with the next seed would draw the same numbers a step later.
    """
    text = " ".join(map(str, (seed, *keys)))
    digest = hashlib.blake2b(text.encode(), digest_size=size).digest()
    return int.from_bytes(digest, "little")
