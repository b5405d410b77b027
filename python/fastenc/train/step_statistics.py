"""What the training loop measures of its steps."""

import time

import torch


class StepStatistics:
    """Losses, gradient norms and tokens of the steps since the last line of the log."""

    def __init__(self) -> None:
        self.unread: list[tuple[int, list[str], torch.Tensor]] = []
        self.steps, self.all_seconds, self.stop_votes = 0, 0.0, 0.0
        self._clear()
        self.restart_clock()

    def _clear(self) -> None:
        self.losses: list[dict[str, float]] = []
        self.norm, self.tokens, self.seconds = 0.0, 0.0, 0.0

    def seconds_per_step(self) -> float:
        """The mean over all steps that have been read."""
        return self.all_seconds / max(self.steps, 1)

    def restart_clock(self) -> None:
        """Exclude the time since the last reading, which an evaluation or a checkpoint took."""
        self.since = time.perf_counter()

    def add(self, step: int, names: list[str], results: torch.Tensor) -> None:
        """Add a step without waiting for the device.

        ``results``: float64 (4 + terms,): loss, gradient norm, tokens, votes to stop, mean of each term in ``names``.
        """
        self.unread.append((step, names, results))

    def read(self) -> list[tuple[int, float, float]]:
        """(step, loss, gradient norm) of the steps that have not been read yet. Waits for the device."""
        unread, self.unread = self.unread, []
        values = torch.stack([results for _, _, results in unread]).tolist() if unread else []
        read = []
        for (step, names, _), (loss, norm, tokens, votes, *terms) in zip(
            unread, values, strict=True
        ):
            self.steps, self.stop_votes = self.steps + 1, self.stop_votes + votes
            self.losses.append(dict(zip(names, terms, strict=True)) | {"loss": loss})
            self.norm = norm
            self.tokens += tokens
            read.append((step, loss, norm))
        now = time.perf_counter()
        self.seconds += now - self.since
        self.all_seconds += now - self.since
        self.since = now
        return read

    def close(self) -> dict[str, float]:
        """The line of the log for the steps that have been read."""
        line = {
            "grad_norm": self.norm,
            **{n: sum(step[n] for step in self.losses) / len(self.losses) for n in self.losses[0]},
            "tokens_per_s": self.tokens / max(self.seconds, 1e-9),
            "steps_per_day": len(self.losses) * 86400 / max(self.seconds, 1e-9),
        }
        self._clear()
        return line
