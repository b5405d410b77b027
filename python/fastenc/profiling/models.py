"""Models to profile, of the sizes of real ones with random weights or from a checkpoint, and a step of each."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fastenc.graphs import compile_training
from fastenc.models import Encoder, EncoderConfig, MaskedLM
from fastenc.nn.adamw import adamw
from fastenc.packing import pack_sequences

# Speed does not depend on the weights' values.
SIZES: dict[str, EncoderConfig] = {
    "minilm": EncoderConfig(
        hidden_size=384, num_layers=6, num_heads=12, intermediate_size=1536, pooler=False
    ),
    "bert-base": EncoderConfig(pooler=False),
    "bert-large": EncoderConfig(
        hidden_size=1024, num_layers=24, num_heads=16, intermediate_size=4096, pooler=False
    ),
    "xlm-r-base": EncoderConfig(
        family="xlm-roberta",
        vocab_size=250002,
        type_vocab_size=1,
        pad_token_id=1,
        position_offset=2,
        eps=1e-5,
        pooler=False,
    ),
}
FIRST_ORDINARY_TOKEN, MASKED_SHARE = 1000, 0.15


def load(name: str, *, training: bool) -> Encoder | MaskedLM:
    """A model by name: a key of SIZES (random weights), a checkpoint's folder, or a name on the hub.

    Returns: a MaskedLM for training, else an Encoder.
    Raises: ValueError for a name that is none of these.
    """
    model_class = MaskedLM if training else Encoder
    if name in SIZES:
        torch.manual_seed(0)
        return model_class(SIZES[name])
    if not Path(name).is_dir() and "/" not in name:
        raise ValueError(
            f"MODEL must be one of {', '.join(SIZES)}, a checkpoint's folder or a name on the hub, got {name!r}"
        )
    return model_class.from_pretrained(name)


def random_sequences(config: EncoderConfig, lengths: Sequence[int]) -> list[list[int]]:
    """Token ids of the given lengths, the same at every call."""
    first = min(FIRST_ORDINARY_TOKEN, config.vocab_size // 2)
    generator = torch.Generator().manual_seed(0)
    ids = lambda n: torch.randint(first, config.vocab_size, (n,), generator=generator).tolist()
    return [ids(length) for length in lengths]


def inference_step(
    model: Encoder, lengths: Sequence[int], device: torch.device
) -> Callable[[], object]:
    """A function that runs the encoder on one packed batch of sequences of these lengths, without gradients."""
    model.eval()
    batch = pack_sequences(random_sequences(model.config, lengths)).to(device)

    def step() -> object:
        with torch.inference_mode():
            return model(batch).last_hidden_state

    return step


def training_step(
    model: MaskedLM,
    lengths: Sequence[int],
    device: torch.device,
    autocast: bool,
    graph: bool = False,
) -> Callable[[], object]:
    """A function that runs a masked-LM training step: forward, backward and AdamW.

    Args:
        lengths: number of tokens of each sequence.
        autocast: run in bfloat16 autocast.
        graph: record the step as a CUDA graph (:func:`fastenc.compile_training`).
    """
    model.train()
    batch = pack_sequences(random_sequences(model.config, lengths)).to(device)
    generator = torch.Generator().manual_seed(1)
    chosen = torch.rand(sum(lengths), generator=generator) < MASKED_SHARE
    labels = torch.where(chosen.to(device), batch.input_ids, -100)
    max_labels = int(chosen.sum())
    # A graph would not notice a weight that has been changed.
    casts_to = torch.bfloat16 if autocast and not graph else None
    optimizer = adamw(model.parameters(), device, casts_to, lr=1e-4)
    if graph:
        runner = compile_training(model, optimizer, max_tokens=2 * len(labels))

        def recorded() -> object:
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                return runner({"batch": batch, "labels": labels, "max_labels": max_labels}).loss

        return recorded

    def step() -> object:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = model(batch, labels, max_labels=max_labels).loss
        assert loss is not None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
