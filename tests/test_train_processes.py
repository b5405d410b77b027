import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from training_run import maker_of, weights


# Within the first epoch, whose last batch only the single process trains on.
@pytest.mark.parametrize(
    "kind,steps", [({}, 6), ({"objective": "mlm+nsp"}, 4), ({"chunks": "transformer"}, 4)]
)
def test_two_processes_are_one_with_twice_the_micro_batches(kind, steps, tmp_path):
    """Without dropout, two processes of batch 4 end with the weights of one with two micro-batches of 4."""
    settings = dict(max_steps=steps, eval_every=2, dropout=0.0, **kind)
    make = maker_of(settings)
    make(tmp_path / "one", accumulation=2, **settings).train()
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = str(Path(__file__).with_name("training_run.py"))
    arguments = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    done = subprocess.run(
        [sys.executable, *launch, script, str(tmp_path / "two"), "accumulation=1", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-8000:]
    printed = re.findall(r"\{[^}]*\}", done.stdout)
    assert len(printed) == 2 and printed[0] == printed[1], "both have the main process's results"
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-5, msg=name)
