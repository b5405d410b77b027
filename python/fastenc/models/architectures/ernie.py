"""ERNIE 1.0 to 3.0: BERT, with a table of task types.

Sources: Sun et al. 2019, arXiv:1904.09223 and arXiv:1907.12412; Sun et al. 2021, arXiv:2107.02137.

Every token has task 0, as in transformers where a call names no tasks.
"""

from fastenc.models.architectures.bert import Bert
from fastenc.models.architectures.names import Names
from fastenc.models.architectures.values import COUNT, SWITCH


class Ernie(Bert):
    name = "ernie"
    class_prefix = "Ernie"
    prefix = "ernie"
    rules = {"use_task_id": SWITCH, "task_type_vocab_size": COUNT}

    def task_types(self, config) -> int:
        return config.extra.get("task_type_vocab_size", 3) if config.extra.get("use_task_id") else 0

    def names(self, config) -> Names:
        names = super().names(config)
        if self.task_types(config):
            names["embeddings.task_type"] = "embeddings.task_type_embeddings"
        return names
