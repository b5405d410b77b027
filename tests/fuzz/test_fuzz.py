"""Random trials. FASTENC_FUZZ_SEED=N changes them; `python -m tests.fuzz --hours 1` runs more."""

import json
import os

import pytest

from tests.fuzz.op_calls import CASES
from tests.helpers.extension import needs_cpp
from tests.helpers.processes import python


@needs_cpp
# Several in a process, because its imports take as long as the trials of one.
@pytest.mark.parametrize(
    "subjects, trials, seed",
    [
        (("valid", "broken"), 6, 11),
        (("batches", "checkpoints", "configs"), 6, 5),
        (("families",), 2, 5),
        (("encoder-decoders",), 2, 6),
        (("layouts", "rope", "surgery", "weights"), 5, 3),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_random_trials_keep_the_promises(subjects, trials, seed):
    """In a process of its own, which a segmentation fault would end."""
    seed = os.environ.get("FASTENC_FUZZ_SEED", str(seed))
    options = ["--trials", str(trials), "--seed", seed]
    done = python("-W", "ignore", "-m", "tests.fuzz", *subjects, *options, timeout=600)
    assert done.returncode in (0, 1), done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["trials"] >= trials * len(subjects)
    assert not report["broken"], "\n\n".join(report["broken"][:5])


def test_every_public_op_is_fuzzed():
    from fastenc import ops

    assert set(CASES) == set(ops.__all__)
