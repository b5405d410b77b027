"""Sections of training steps, and of fine-tuning runs with their scores over several seeds."""

import statistics
from collections.abc import Callable, Sequence

from benchmarks.tables.cells import NOTHING, grid, providers_of, time_and_speedup
from benchmarks.tables.markdown import plain_section, row, section, table

# {data set: {provider: the rows of its runs, one a seed}}
Runs = dict[str, dict[str, list[dict]]]


def mlm_step(data: dict) -> str:
    cases = dict(data["cases"])
    memory = cases.pop("head memory, MB")
    shown = ", ".join(f"{name} {value:.0f} MB" for name, value in memory.items())
    return section(
        data,
        "A masked-LM training step: 6 × 384, batch 16 × 128 without padding, vocabulary 30,522",
        "python -m benchmarks.run mlm_step",
        "Forward, backward and AdamW. Memory that the head's forward and backward add, with the gradient of its "
        f"weights: {shown}.",
        grid(cases, {case: "time, speed-up" for case in cases}, "", time_and_speedup),
    )


def sparse_training(data: dict) -> str:
    def cell(row: dict | None) -> str:
        if row is not None and "MiB" in row:
            return f"{row['MiB']:,.0f} MiB"
        return time_and_speedup(row)

    return section(
        data,
        "SPLADE: MiniLM with 30,522 tokens",
        "FASTENC_DATA=... python -m benchmarks.studies.sparse_training",
        "Float32; questions of SQuAD with their paragraphs. A step is forward, SpladeLoss, backward and AdamW. Memory "
        "is what a step or encode takes above the weights and AdamW's moments, gradients included.",
        grid(data["cases"], {case: case for case in data["cases"]}, "", cell),
    )


def runs_of(results: Sequence[dict]) -> Runs:
    """The runs of one or several machines, whose cases are "<data set>, seed <n>".

    Machines differ only by rounding, so a seed that two of them ran counts once.
    """
    runs: dict[str, dict[str, dict[str, dict]]] = {}
    for data in results:
        for case, rows in data["cases"].items():
            name, _, seed = case.rpartition(", seed ")
            for provider, result in rows.items():
                runs.setdefault(name, {}).setdefault(provider, {}).setdefault(seed, result)
    return {
        name: {provider: list(seeds.values()) for provider, seeds in providers.items()}
        for name, providers in runs.items()
    }


def metric_of(seeds: Sequence[dict]) -> str:
    return f"{seeds[0]['metric']} ({'test' if 'test' in seeds[0] else 'dev'})"


def mean_score(seeds: Sequence[dict]) -> str:
    """Score × 100; of several seeds the mean and its standard deviation."""
    scores = [100 * seed.get("test", seed["dev"]) for seed in seeds]
    spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
    return f"{statistics.mean(scores):.1f}{spread}"


def training(title: str, name: str, about: str, baseline: str) -> Callable[[dict], str]:
    """The section of a study's training runs: scores, times and memory over the seeds, a row for each provider."""

    def make(data: dict) -> str:
        return section(
            data,
            title,
            f"FASTENC_DATA=... python -m benchmarks.studies.{name}",
            f"{about} Scores × 100: mean and standard deviation over seeds. Time is training with its evaluations. "
            "CPU time hardly depends on other work on the machine, so the speed-up is the ratio of CPU times. Memory "
            "is the whole process's.",
            _runs_table(runs_of([data]), baseline),
        )

    return make


def _runs_table(runs: Runs, baseline: str) -> str:
    every = [seeds for providers in runs.values() for seeds in providers.values()]
    counted = any("trained" in seed for seeds in every for seed in seeds)
    names = ["", *(["trained parameters"] if counted else []), "score", "time", "CPU time"]
    names += ["speed-up", "peak memory", "seeds"]
    lines = []
    for name, providers in runs.items():
        base = _mean(providers.get(baseline, ()), "cpu_seconds")
        for provider, seeds in providers.items():
            cpu_seconds = _mean(seeds, "cpu_seconds")
            cells = [
                f"{name}: {provider}",
                *([f"{seeds[0]['trained']:,}"] if counted else []),
                f"{metric_of(seeds)} {mean_score(seeds)}",
                f"{_mean(seeds, 'seconds'):,.0f} s",
                f"{cpu_seconds:,.0f} s",
                f"{base / cpu_seconds:.2f}×" if base else "",
                f"{max(seed['peak_memory'] for seed in seeds):,.0f} MiB",
                str(len(seeds)),
            ]
            lines.append(row(cells))
    return table(row(names), lines)


def _mean(seeds: Sequence[dict], key: str) -> float:
    """The mean over the seeds; 0 without any."""
    return statistics.mean(seed[key] for seed in seeds) if seeds else 0.0


def scores_of_every_seed(results: Sequence[dict]) -> str:
    """Fine-tuning scores of all machines together."""
    runs = runs_of(results)
    providers = providers_of(list(runs.values()))
    lines = []
    for name, by_provider in runs.items():
        cells = [_score_and_seeds(by_provider.get(provider, ())) for provider in providers]
        lines.append(row([name, metric_of(next(iter(by_provider.values()))), *cells]))
    return plain_section(
        "Fine-tuning: MiniLM, the defaults, the seeds of all machines together",
        "FASTENC_DATA=... python -m benchmarks.studies.train_tasks --seeds 0 1 2",
        "Scores × 100: mean and standard deviation (number of seeds).",
        table(row(["", "score", *providers]), lines, left=(0, 1)),
    )


def _score_and_seeds(seeds: Sequence[dict]) -> str:
    return f"{mean_score(seeds)} ({len(seeds)})" if seeds else NOTHING


def fine_tune_objectives(data: dict) -> str:
    """A row for each checkpoint, over its seeds."""
    providers = ("fastenc", "transformers Trainer")
    lines = []
    for checkpoint, by_provider in runs_of([data]).items():
        cells = [_score_and_seeds(by_provider.get(provider, ())) for provider in providers]
        lines.append(row([checkpoint, *cells, f"{by_provider['fastenc'][0]['spread']:.2f}"]))
    return section(
        data,
        "What the checkpoints of short pretraining are worth: 8,000 phrases of SST-2",
        "FASTENC_DATA=... python -m benchmarks.studies.fine_tune_objectives NAME=CHECKPOINT ...",
        "Accuracy on dev × 100 after 500 steps: mean and standard deviation (number of seeds). The more frequent "
        "class has 50.9. Checkpoints from random weights and checkpoints from MiniLM were measured on different "
        "devices of this page. ELECTRA's scores depend on whether its discriminator has learnt. A discriminator that "
        "only reached the constant guess's loss scores below random weights at every seed, in transformers' Trainer "
        "too. It gives nearly the same state to every token (spread: mean distance of the last states from their "
        "mean, divided by their mean length). A discriminator that has learnt (held-out loss 0.21, constant guess "
        "0.40) varies by half a point between seeds and stays within 1.5 points of MiniLM, from whose encoder it "
        "started; it is a larger model, too. So neither ELECTRA's head nor the settings make fine-tuning fail. The "
        "masked LM of 2,500 steps from random weights also scores below random weights, with their spread.",
        table(f"| {row(providers)} spread of the states |", lines),
    )
