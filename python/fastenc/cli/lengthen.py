"""fastenc lengthen."""

from dataclasses import dataclass
from pathlib import Path

from fastenc._base.options import REQUIRED, argument, option
from fastenc.cli.options import Command
from fastenc.models import convert_to_longformer


@dataclass(frozen=True, kw_only=True)
class Lengthen(Command):
    """Convert a RoBERTa to a Longformer, which reads longer texts.

    The table of positions is copied again and again until it is long enough. The weights of global tokens are copies of
    those of all tokens. Texts of at most half a window give the states that RoBERTa gives. For longer ones pretrain the
    result on long documents, or fine-tune it.

    Examples:
    fastenc lengthen FacebookAI/roberta-base -o runs/long
    fastenc pretrain wiki.txt.gz --from runs/long -o runs/longer --block-size 4096
    """

    model: str = argument("Checkpoint folder of a RoBERTa, or name on the hub.")
    output: Path = option(REQUIRED, "Folder for the Longformer.", "-o")
    max_positions: int = option(4096, "The largest number of tokens of a text.")
    attention_window: tuple[int, ...] = option(
        (512,),
        "Number of tokens that a token sees, half of them on each side; repeat it for one number for each layer.",
    )

    def run(self) -> None:
        windows = self.attention_window
        convert_to_longformer(
            self.model,
            self.output,
            max_positions=self.max_positions,
            attention_window=windows[0] if len(windows) == 1 else windows,
        )
        print(f"a Longformer of {self.max_positions} positions in {self.output}")
