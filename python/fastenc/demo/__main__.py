"""Encode, pretrain and fine-tune on docstrings of the installed Python packages, and write a report into a folder."""

import argparse
import shutil
import time
from pathlib import Path

from fastenc.demo import classification, corpus, encoding, pretraining
from fastenc.demo.report import write_report


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fastenc.demo", description=__doc__)
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path("demo-report"),
        help="Folder for the report and the models. Default: demo-report.",
    )
    folder = parser.parse_args().folder
    try:
        run(folder)
    except KeyboardInterrupt:  # training's own message names an option that the demo does not have
        print("\nThe demo was stopped. When it is run again, it starts from the beginning.")
        raise SystemExit(130) from None


def run(folder: Path) -> None:
    """Run all parts, and write the report and the models into the folder."""
    begin = time.perf_counter()
    # Runs of an earlier demo, which training would refuse to overwrite.
    for name in ("pretrained", "finetuned"):
        shutil.rmtree(folder / name, ignore_errors=True)

    print("Reading the docstrings of this Python installation …", flush=True)
    texts = corpus.standard_library()
    training, held_out = corpus.which_package()

    print("\n1. Encoding: one checkpoint (MiniLM) run in three ways", flush=True)
    encoded = encoding.run(texts[: encoding.TEXTS])
    base = encoded["sentences_per_s"]["Hugging Face"]
    for name, speed in encoded["sentences_per_s"].items():
        difference = encoded["differences"][name]
        print(
            f"   {name:16} {speed:8.1f} sentences/s  {speed / base:4.1f}x   differs by {difference:.1e}"
        )

    print("\n2. Pretraining a small BERT on the standard library's docstrings", flush=True)
    pretrained = pretraining.run(texts, folder / "pretrained")
    for line in pretrained["log"][9::10]:
        if "loss" in line:
            print(
                f"   step {line['step']:4}  loss {line['loss']:.3f}  {line['tokens_per_s']:,.0f} tokens/s"
            )
    before, after = pretrained["before"]["loss"], pretrained["after"]["loss"]
    print(
        f"   held-out loss {before:.2f} -> {after:.2f}; loss of a model that knows only token frequencies: "
        f"{pretrained['frequencies']:.2f}"
    )

    print("\n3. Fine-tuning MiniLM: which package does this docstring come from?", flush=True)
    classified = classification.run(training, held_out, folder / "finetuned")
    for name, accuracy in classified["accuracies"].items():
        print(f"   {name:18} {accuracy:6.1%}")

    report = folder / "report.html"
    write_report(report, encoded, pretrained, classified, time.perf_counter() - begin)
    print(f"\nReport: {report}   ({(time.perf_counter() - begin) / 60:.1f} minutes)")


if __name__ == "__main__":
    main()
