"""Cross-entropy module over the fused op."""

from torch import Tensor, nn

from fastenc.ops import masked_cross_entropy


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """``torch.nn.CrossEntropyLoss`` for logits (rows, classes) and targets that are class indices, int64 (rows,).

    ``z_loss`` is the factor of the squared log-normaliser (:func:`fastenc.ops.masked_cross_entropy` has the formula).
    Rows with ``ignore_index`` are never read. The loss is float32, for float64 logits float64. A batch without any
    labelled row has loss 0, where torch returns nan.
    Raises: ValueError for class weights, and for logits or targets of another shape or dtype.
    """

    def __init__(self, weight: Tensor | None = None, *args, z_loss: float = 0.0, **kwargs):
        super().__init__(weight, *args, **kwargs)
        if weight is not None:
            raise ValueError(
                "CrossEntropyLoss: weight must be None, because class weights are not computed, got a tensor: use "
                "torch.nn.CrossEntropyLoss"
            )
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
