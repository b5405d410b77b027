"""Cross-entropy module over the fused op."""

from torch import Tensor, nn

from fastenc.ops import masked_cross_entropy


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """``torch.nn.CrossEntropyLoss`` for logits (rows, classes) and targets that are class indices, plus ``z_loss``.

    Rows with ``ignore_index`` are never read. The loss is float32 for every dtype of the logits. A batch without any
    labelled row has loss 0, where torch returns nan.
    Raises: ValueError for class weights, and for logits of another shape.
    """

    def __init__(self, weight: Tensor | None = None, *args, z_loss: float = 0.0, **kwargs):
        super().__init__(weight, *args, **kwargs)
        if weight is not None:
            raise ValueError("class weights are not supported: use torch.nn.CrossEntropyLoss")
        self.z_loss = z_loss

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return masked_cross_entropy(
            input,
            target,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            reduction=self.reduction,
        )
