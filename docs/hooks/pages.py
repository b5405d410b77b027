"""Fills the pages between their markers: python docs/hooks/pages.py [--check]

``<!-- NAME -->`` … ``<!-- /NAME -->`` holds what the package itself says: the members of a module, the options of the
commands, the kernels of the ops, the warnings, the defaults. With --check a page that is not current is an error.
"""

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from docstrings import members
from messages import other_warnings, reasons
from remedies import OTHERS, REASONS

DOCS = Path(__file__).parents[1]
MARKED = re.compile(r"(<!-- ([a-z]+(?: of [\w.]+)?) -->\n).*?(<!-- /\2 -->)", re.DOTALL)


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(cell, row))} |" for row in lines)


def kernels() -> str:
    """What ``impl="auto"`` takes, from the ops' declarations."""
    from fastenc.ops import __all__ as ops
    from fastenc.ops.dispatch import DECLARED

    rows = []
    for op in ops:
        names = DECLARED[op].implementations
        gpu = next((name for name in ("cuda", "triton") if name in names), "reference")
        if (switch := DECLARED[op].switch) is not None:
            gpu = f"reference; {gpu} with {switch}=1"
        rows.append((f"`{op}`", "cpp" if "cpp" in names else "reference", gpu))
    return table(("op", "CPU", "GPU"), rows)


def commands() -> str:
    """A section for each command, from the dataclasses that make its --help."""
    from fastenc.cli.commands import COMMANDS

    return "\n\n".join(command(name) for name in COMMANDS if name != "bench")


def command(name: str) -> str:
    from fastenc.cli.commands import command_named
    from fastenc.cli.options import help_texts, options_of

    kind = command_named(name)
    description, examples = help_texts(kind)
    parts = [f"## fastenc {name}", description]
    if examples:
        code = "\n".join(line.strip() for line in examples.splitlines()[1:])
        parts.append(f"```sh\n{code}\n```")
    rows = []
    for option in options_of(kind):
        shown = option.name.upper() if option.positional else f"--{option.key}"
        names = ", ".join(f"`{each}`" for each in (shown, *option.flags))
        rows.append((names, option.full_help))
    return "\n\n".join([*parts, table(("option", ""), rows)])


def warnings_of(what: str) -> str:
    given, remedies = {"patch": (reasons, REASONS), "package": (other_warnings, OTHERS)}[what]
    texts = given()
    unknown, stale = set(texts) - remedies.keys(), remedies.keys() - set(texts)
    if unknown or stale:
        raise SystemExit(
            f"docs/hooks/remedies.py must have every warning of the package and no other: add {sorted(unknown)}, "
            f"remove {sorted(stale)}"
        )
    return table(("warning", "cause", "remedy"), [(f"`{text}`", *remedies[text]) for text in texts])


# (what, ours in TrainConfig, the Trainer's in TrainingArguments, why ours)
DEFAULTS = (
    ("passes over the data", "epochs", "num_train_epochs", "The same."),
    (
        "texts in a micro-batch",
        "batch_size",
        "per_device_train_batch_size",
        "Devlin et al. 2018 (arXiv:1810.04805) fine-tune with 16 or 32. Without padding a larger batch costs no more "
        "for each token.",
    ),
    ("micro-batches in a step", "accumulation", "gradient_accumulation_steps", "The same."),
    (
        "peak learning rate",
        "learning_rate",
        "learning_rate",
        "None: 5e-5 · 768 / width, less in runs of more than 1,000 steps (`fine_tuning_lr`). 5e-5 fits BERT-base's "
        "width alone.",
    ),
    (
        "warm-up",
        "warmup",
        "warmup_steps",
        "A share of the steps. Without a warm-up Adam's first steps are the largest, when its moments are least known.",
    ),
    (
        "weight decay",
        "weight_decay",
        "weight_decay",
        "Devlin et al. 2018. Biases and norms have none in both.",
    ),
    ("largest norm of the gradient", "max_grad_norm", "max_grad_norm", "The same."),
    ("AdamW's β", "betas", "adam_beta1 adam_beta2", "The same."),
    ("AdamW's ε", "adam_eps", "adam_epsilon", "The same."),
    ("seed", "seed", "seed", "A number is as good as another; not the same runs."),
    (
        "steps between evaluations",
        "eval_every",
        "eval_strategy",
        "None: once an epoch, four times in epochs of 500 steps or more, where a `--dev` set is given. The Trainer "
        "evaluates when it is told to.",
    ),
    (
        "model that is kept at the end",
        None,
        "load_best_model_at_end",
        "fastenc keeps the best on the dev set, the Trainer the last.",
    ),
    (
        "checkpoints that are kept",
        "keep_checkpoints",
        "save_total_limit",
        "The Trainer's `None` keeps every checkpoint, which fills disks.",
    ),
    ("steps between lines of the log", "log_every", "logging_steps", "Short runs get a curve."),
    ("bfloat16", "precision", "bf16", "The same: float32 unless asked."),
)


def defaults() -> str:
    from transformers import TrainingArguments

    from fastenc.train import TrainConfig

    shown = lambda value: "–" if value is MISSING else f"`{value}`"
    ours = {each.name: each.default for each in fields(TrainConfig)}
    theirs = {each.name: each.default for each in fields(TrainingArguments)}
    rows = []
    for what, name, names, why in DEFAULTS:
        own = "the best" if name is None else f"`{name}` = {shown(ours[name])}"
        other = ", ".join(f"`{each}` = {shown(theirs[each])}" for each in names.split())
        rows.append((what, own, other, why))
    return table(("", "fastenc", "transformers' Trainer", "why"), rows)


PARTS: dict[str, Callable[..., str]] = {
    "members": members,
    "kernels": kernels,
    "commands": commands,
    "warnings": warnings_of,
    "defaults": defaults,
}


def filled(text: str) -> str:
    def replaced(match: re.Match) -> str:
        kind, _, what = match[2].partition(" of ")
        return match[1] + "\n" + PARTS[kind](*([what] if what else [])) + "\n\n" + match[3]

    return MARKED.sub(replaced, text)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            stale.append(str(path.relative_to(DOCS.parent)))
            if not check:
                path.write_text(new, encoding="utf-8")
    if check and stale:
        print(f"not what the package says: {', '.join(stale)}: run make pages")
    return int(check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
