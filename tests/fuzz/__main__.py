"""Fuzz by hand.

python -m tests.fuzz --hours 2                      every subject in turn
python -m tests.fuzz valid/attention --trials 1000
python -m tests.fuzz batches --seed 5 --trial 17    repeats one trial
"""

import argparse
import faulthandler
import json
import random
import sys

import torch

from tests.fuzz.subjects import SUBJECTS
from tests.fuzz.trials import run_trial, run_trials


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("subjects", nargs="*", help="names, or their beginnings; all without")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--trial", type=int, help="this one alone")
    parser.add_argument("--trials", type=int, default=0, help="of each subject")
    parser.add_argument("--hours", type=float, default=0.0)
    options = parser.parse_args()
    faulthandler.enable()  # shows where a segmentation fault happened
    torch.set_num_threads(2)
    starts = tuple(options.subjects or [""])
    subjects = {name: subject for name, subject in SUBJECTS.items() if name.startswith(starts)}
    if not subjects:
        parser.error(f"no subject begins with {' or '.join(starts)}: {', '.join(SUBJECTS)}")
    print(f"seed {options.seed}", file=sys.stderr)
    if options.trial is not None:
        for name, subject in subjects.items():
            run_trial(name, subject, options.seed, options.trial)
        return 0
    seconds = 3600 * options.hours
    done, broken = run_trials(subjects, options.seed, trials=options.trials, seconds=seconds)
    print(json.dumps({"trials": sum(done.values()), "broken": broken}, indent=1))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
