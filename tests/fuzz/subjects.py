"""The subjects of fuzzing, by name."""

from functools import partial
from random import Random

from tests.fuzz import (
    batches,
    broken_calls,
    checkpoints,
    configs,
    encoder_decoders,
    families,
    layouts,
    rope,
    surgery,
    valid_calls,
    weights,
)
from tests.fuzz.op_calls import CASES, random_call
from tests.fuzz.trials import Subject


def _valid(op: str, rng: Random) -> None:
    valid_calls.check(random_call(op, rng), rng)


def _broken(op: str, rng: Random) -> None:
    broken_calls.check_refused(random_call(op, rng), rng)


VALID: dict[str, Subject] = {f"valid/{op}": partial(_valid, op) for op in CASES}
BROKEN: dict[str, Subject] = {f"broken/{op}": partial(_broken, op) for op in CASES}
FAMILIES: dict[str, Subject] = {
    f"families/{family}": partial(families.check, family) for family in families.SWITCHES
}
OTHERS: dict[str, Subject] = {
    "batches": batches.check,
    "checkpoints": checkpoints.check,
    "configs": configs.check,
    "encoder-decoders/configs": encoder_decoders.check_config_of_whole,
    "encoder-decoders/edits": encoder_decoders.check_edits,
    "layouts": layouts.check,
    "rope": rope.check,
    "surgery": surgery.check,
    "weights": weights.check,
}
SUBJECTS = {**VALID, **BROKEN, **FAMILIES, **OTHERS}
