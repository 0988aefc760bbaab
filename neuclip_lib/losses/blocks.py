"""What the losses over whole similarity matrices share: blocks of rows, and the refusal of wrong shapes."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from neuclip_lib import contrast
from neuclip_lib.contrast import GlobalBatch

Block = tuple[slice, Tensor, Tensor]
"""Places among the anchors, their similarities ``[rows, B]``, and the view ``[rows]`` of each anchor's own column."""


def row_blocks(anchors: Tensor, others: Tensor, first: int) -> Iterator[Block]:
    """Similarities of some anchors with everything, ``contrast.BLOCK_ELEMENTS`` at a time.

    Args:
        anchors: unit rows ``[b, d]``, the rows ``first .. first + b - 1`` of the global batch.
        others: unit rows ``[B, d]`` of the global batch, of the same or of the other side.
        first: place of the first anchor in the global batch.

    Yields:
        Blocks that may be written to: each is made afresh.
    """
    height = max(1, contrast.BLOCK_ELEMENTS // len(others))
    for low in range(0, len(anchors), height):
        rows = slice(low, min(low + height, len(anchors)))
        s = anchors[rows] @ others.T
        # The diagonal of a rectangle: every block after the first starts further to the right.
        yield rows, s, s.diagonal(first + low)


def refuse_wrong_shapes(e1: Tensor, e2: Tensor, batch: GlobalBatch, **scalars: Tensor) -> None:
    """Compare the embeddings with the batch they belong to; looks at shapes alone, so the host does not wait.

    Raises:
        ValueError: when ``e1`` or ``e2`` is not ``[b, d]``, or one of ``scalars`` has a dimension.
    """
    expected = (batch.own_size, batch.e1.shape[1])
    for name, e in (("e1", e1), ("e2", e2)):
        if e.shape != expected:
            raise ValueError(
                f"{name} must be {list(expected)}, this rank's rows of the batch of {batch.size}; got {tuple(e.shape)}"
            )
    for name, x in scalars.items():
        if x.ndim != 0:
            raise ValueError(f"{name} must be one scalar tensor for the whole batch; got the shape {tuple(x.shape)}")
