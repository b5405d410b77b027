"""fastenc predict."""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastenc._options import REQUIRED, argument, option, options_listed_by
from fastenc.cli.options import Command
from fastenc.cli.outputs import DEVICE, check_suffix, device_named
from fastenc.cli.task_options import prediction_options
from fastenc.tasks import predict_file, task_of_model


@dataclass(frozen=True, kw_only=True)
class Predict(Command):
    """Predict with a fine-tuned model.

    Of texts, the label and the probability of every label, or the number, a line each in their order (.tsv), or with
    the text (.jsonl). Of words, a word and its tag a line (.tsv), or each sentence with tags, entities, their offsets
    and confidences (.jsonl). Of spans, each sentence with its entities, their offsets and probabilities (.jsonl). Of
    pairs of texts, with a sentence-embedding model, their cosine similarity; `fastenc embed` gives the vectors.

    Files of any size: 10,000 items at a time are read, encoded and predicted, and what is finished is kept beside the
    output, so that --resume goes on from there. Questions are read as a whole.

    Examples:
    fastenc predict runs/sst2 new.tsv -o labels.tsv
    fastenc predict runs/ner texts.txt -o entities.jsonl
    echo "a fine film" | fastenc predict runs/sst2 - -o -
    """

    model: str = argument("Folder of a fine-tuned model; it tells the task.")
    inputs: str = argument(
        "What to predict for: as in training, without labels, or .txt with a text a line (.gz); - for the texts of "
        "stdin, a line each."
    )
    output: Path = option(REQUIRED, "File to write: .tsv or .jsonl; - for .jsonl on stdout.", "-o")
    batch_size: int = option(32, "Sequences of a batch.")
    device: str | None = option(None, DEVICE)
    resume: bool = option(False, "Go on with a prediction that was killed.")
    task_options: dict[str, Any] = options_listed_by(prediction_options)

    def run(self) -> None:
        device = device_named(self.device)
        task = task_of_model(self.model, self.task_options)
        to_stdout, from_stdin = str(self.output) == "-", self.inputs == "-"
        if self.resume and (to_stdout or from_stdin):
            raise ValueError(
                "--resume goes on with files, and cannot with stdin or stdout: leave it out"
            )
        if not to_stdout:
            check_suffix(self.output, task.outputs)
        model = task.load(self.model).to(device)
        if "max_length" in self.task_options:
            task.check_max_length(model)
        with tempfile.TemporaryDirectory() as folder:
            inputs, output = self.inputs, self.output
            if from_stdin:
                inputs = str(Path(folder, "stdin.txt"))
                Path(inputs).write_bytes(sys.stdin.buffer.read())
            if to_stdout:
                output = Path(folder, "stdout.jsonl")
            try:
                number = predict_file(
                    task,
                    model,
                    inputs,
                    output,
                    self.batch_size,
                    resume=self.resume,
                    model_name=self.model,
                )
            except ValueError as error:
                raise ValueError(
                    str(error).replace(inputs, "stdin" if from_stdin else inputs)
                ) from error
            if to_stdout:
                sys.stdout.write(output.read_text(encoding="utf-8"))
                return
        print(f"{number} predictions in {self.output}")
