"""MiniLM fine-tuned on full-length film reviews: cut at 512 tokens, or read whole in chunks.

python -m benchmarks.studies.train_long_documents [VARIANT ...] [--seeds 0 1 2] [--epochs N] [--limit N]
(needs FASTENC_DATA)

movie_reviews (Pang and Lee 2004): 400 of its 1,600 reviews for training, which takes two cores about two hours; the
epoch is chosen on 200, the score is of 200 others. A review has 851 tokens on average and 3,253 at most; the first 512
tokens of each review are 58 % of all tokens. Chunks have 256 tokens and overlap by 64. Learning rate, batch size,
warm-up, weight decay and clipping are the same everywhere. transformers' Trainer keeps the head of a text, with the
batches of fastenc's run in the same order. Each run has a process of its own; its time (training with evaluations) and
peak memory stand beside the score. Runs with stored results are not repeated. With --limit only this number of reviews
of each set is used, and nothing is written.
"""

import tempfile
from dataclasses import replace

from benchmarks.studies._runs import Run, collect, training_options
from benchmarks.studies.task_sets import TaskSet
from benchmarks.studies.train_tasks import ours, theirs
from fastenc.tasks import SequenceClassification
from fastenc.train import TrainConfig, fine_tuning_lr

REVIEWS = TaskSet(
    "movie_reviews, 400 reviews",
    "accuracy",
    SequenceClassification(text=("text",)),
    ("movie_reviews/train.tsv.gz",),
    ("movie_reviews/dev.tsv.gz",),
    ("movie_reviews/test.tsv.gz",),
    most=400,
)
BATCH = 16
CUT = {name: dict(max_length=512, truncation=name) for name in ("head", "tail", "head+tail")}
IN_CHUNKS = {
    f"chunks, {name}": dict(max_length=256, stride=64, chunks=name)
    for name in ("mean", "max", "attention", "transformer")
}
THEIRS = "transformers Trainer, head"
VARIANTS = {f"fastenc, {name}": options for name, options in {**CUT, **IN_CHUNKS}.items()}
VARIANTS[THEIRS] = CUT["head"]


def one_run(variant: str, seed: int, epochs: int, limit: int | None) -> dict:
    """{"dev", "test", "seconds", "cpu_seconds"} of a variant."""
    task = replace(REVIEWS.task, **VARIANTS[variant])
    data = (*REVIEWS.read(limit), REVIEWS.metric)
    rate = fine_tuning_lr(384)
    with tempfile.TemporaryDirectory() as scratch:
        config = TrainConfig(
            scratch, epochs=epochs, batch_size=BATCH, seed=seed, learning_rate=rate
        )
        return (theirs if variant == THEIRS else ours)(task, *data, config)


def main() -> None:
    options = training_options(__doc__, "VARIANT", VARIANTS, list(VARIANTS))
    runs = (
        Run(
            f"{REVIEWS.title}, {options.epochs} epochs, seed {seed}",
            variant,
            REVIEWS.metric,
            one_run,
            (variant, seed, options.epochs, options.limit),
        )
        for seed in options.seeds
        for variant in options.chosen
    )
    collect("train_long_documents", runs, options.limit)


if __name__ == "__main__":
    main()
