"""fastenc predict."""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastenc._base.options import REQUIRED, argument, option, options_listed_by
from fastenc.cli.encoders import with_finite_weights
from fastenc.cli.options import Command
from fastenc.cli.outputs import DEVICE, DTYPE, check_suffix, checked_dtype, device_named
from fastenc.cli.task_options import prediction_options
from fastenc.packing import check_batch_size
from fastenc.tasks import predict_file, task_of_model
from fastenc.tasks.registry import columns_for


@dataclass(frozen=True, kw_only=True)
class Predict(Command):
    """Predict with a fine-tuned model.

    The output depends on the task. sequence-classification: on each line the label and the probability of every label,
    or the predicted number (.tsv), also with the text (.jsonl). token-classification: a word and its tag on each line
    (.tsv), or each sentence with its tags, entities, offsets and confidences (.jsonl). span-ner: each sentence with its
    entities, their offsets and probabilities (.jsonl). question-answering: the answer to each question (.json), also
    with offsets and candidates (.jsonl). sentence-embedding: the cosine similarity of each pair of texts;
    sparse-embedding: their dot product; `fastenc embed` writes the vectors or weights. rerank: the score of each
    document for its query. word-sense: the sense of each word and its score (.tsv, .jsonl). seq2seq: the generated text
    (.tsv), also with the source (.jsonl).

    Files may be of any size: 256 items at a time are read, encoded and predicted. What is finished is kept beside the
    output every few seconds, so that --resume continues after it. Files of questions and of word senses are read as a
    whole.

    Examples:
    fastenc predict runs/sst2 new.tsv -o labels.tsv
    fastenc predict runs/ner texts.txt -o entities.jsonl
    echo "a fine film" | fastenc predict runs/sst2 - -o -
    """

    model: str = argument("Folder of a fine-tuned model, which contains its task.")
    inputs: str = argument(
        "Inputs in the format of the training data, without labels, or .txt with a text on each line (also .gz); - "
        "reads texts from stdin, one on each line."
    )
    output: Path = option(
        REQUIRED,
        "File to write: .tsv or .jsonl (question-answering: .json or .jsonl); - writes .jsonl to stdout.",
        "-o",
    )
    batch_size: int = option(32, "Number of sequences in a batch.")
    device: str | None = option(None, DEVICE)
    dtype: str = option("float32", DTYPE)
    resume: bool = option(False, "Continue an unfinished run after what it has kept.")
    task_options: dict[str, Any] = options_listed_by(prediction_options)

    def run(self) -> None:
        check_batch_size(self.batch_size)
        dtype, device = checked_dtype(self.dtype), device_named(self.device, self.dtype)
        task = task_of_model(self.model, self.task_options)
        to_stdout, from_stdin = str(self.output) == "-", self.inputs == "-"
        if self.resume and (to_stdout or from_stdin):
            raise ValueError(
                "--resume needs an input file and an output file, got stdin or stdout: leave it out"
            )
        if not to_stdout:
            check_suffix(self.output, task.outputs)
        model = with_finite_weights(task.load(self.model, dtype=dtype).to(device), self.model)
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
                with columns_for(self.model):
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
