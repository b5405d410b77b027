"""The section of pretraining objectives: held-out losses of each, beside a peer's."""

from benchmarks.tables.cells import NOTHING
from benchmarks.tables.markdown import plain_section, row, table
from benchmarks.tables.results import machine_line

COLUMNS = ("", "constant guess", "first", "last", "step")
OF_PEER = ("peer", "peer's step", "fastenc there", "largest difference")
GUESS = "constant guess"

Curve = list[list[float]]  # pairs of a step and the loss there


def train_objectives(data: dict) -> str:
    """A row for each term of each objective's loss."""
    lines = []
    for case, rows in data["cases"].items():
        guess = rows[GUESS]["curves"]
        peer = next((rows[name] for name in rows if name not in ("fastenc", GUESS)), None)
        for term, curve in rows["fastenc"]["curves"].items():
            (_, first), (step, last) = curve[0], curve[-1]
            losses = (f"{loss:.3f}" for loss in (guess[term][-1][1], first, last))
            of_peer = beside(curve, peer["curves"][term]) if peer else [NOTHING] * len(OF_PEER)
            lines.append(row([f"{case}: {term}", *losses, f"{step:,}", *of_peer]))
    picture = f"![Held-out losses](results/{data['folder']}/train_objectives.png)"
    return plain_section(
        "Pretraining: every objective on wikipedia_en",
        "FASTENC_DATA=... python -m benchmarks.studies.train_objectives",
        "Mean loss of each term on held-out articles, in nats. The constant guess is the best guess that does not "
        "read the text: the frequencies of tokens in training, the share of wrong pairs or of replaced tokens, the "
        "mean of the teacher's distributions or states. The peer starts with the same weights and takes the same "
        "batches, for fewer steps of the same schedule. It is transformers' BertForMaskedLM, BertForPreTraining or "
        "ELECTRA, with SpanBERT's boundary head and DistilBERT's loss in plain PyTorch. mlm and distill train 2 "
        "layers of 128 (the student has 1) with 4,000 word pieces. span and mlm+sop start from the encoder that mlm "
        "trained. The pairs of mlm+sop have 256 tokens. One pair in five holds its article's title, which alone "
        "tells the order and would give 0.55; so these 800 steps do not show that more than titles is learnt. mlm+nsp "
        "and electra start from MiniLM's encoder (6 layers of 384), because 2 layers hardly learnt either in 800 and "
        "2,000 steps. Their heads and ELECTRA's generator start from random weights. In 100 steps the generator does "
        "not learn the frequencies of tokens, so the tokens that it inserts are easy to detect. "
        f"{picture}\n\n{machine_line(data['machine'])}",
        table(row([*COLUMNS, *OF_PEER]), lines),
    )


def beside(curve: Curve, peer: Curve) -> list[str]:
    """The cells of a peer: its last loss and step, our loss at that step, the largest difference at any step."""
    ours = dict(map(tuple, curve))
    step, loss = peer[-1]
    apart = max(abs(ours[at] - value) for at, value in peer if at in ours)
    return [f"{loss:.3f}", f"{step:,}", f"{ours[step]:.3f}", f"{apart:.1e}"]
