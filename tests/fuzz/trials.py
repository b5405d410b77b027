"""Random trials that can be repeated: trial N of a subject depends on the seed, the subject's name and N alone."""

import random
import time
from collections.abc import Callable

import torch

Subject = Callable[[random.Random], None]  # one trial; raises AssertionError if a promise is broken


class BrokenPromise(AssertionError):
    pass


def run_trial(name: str, subject: Subject, seed: int, number: int) -> None:
    rng = random.Random(f"{seed} {name} {number}")
    torch.manual_seed(rng.getrandbits(62))
    try:
        subject(rng)
    except Exception as error:
        raise BrokenPromise(
            f"{type(error).__name__}: {error}\n"
            f"again: python -m tests.fuzz {name} --seed {seed} --trial {number}"
        ) from error


def run_trials(
    subjects: dict[str, Subject], seed: int, *, trials: int = 0, seconds: float = 0.0
) -> tuple[dict[str, int], list[str]]:
    """Run this number of trials of each subject, or trials of all subjects in turn for this time.

    Returns: the number of trials of each, and the messages of the trials that broke a promise.
    """
    done = dict.fromkeys(subjects, 0)
    broken: list[str] = []
    end = time.monotonic() + seconds
    number = 0
    while number < trials or time.monotonic() < end:
        for name, subject in subjects.items():
            try:
                run_trial(name, subject, seed, number)
            except BrokenPromise as error:
                broken.append(f"{name}: {error}")
            done[name] += 1
        number += 1
    return done, broken
