"""The prototypes' gradient with the anchors taken block by block, as a CPU does where the matrix leaves its cache."""

import pytest
import torch
from torch.nn.functional import normalize

from neuclip_lib.normalizers import prototype_math
from neuclip_lib.normalizers.prototype_math import prototype_gradient

pytestmark = pytest.mark.quick
F64 = torch.float64


def unit(*shape, seed=0):
    return normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64), dim=-1)


@pytest.mark.parametrize("tau", [torch.tensor(0.05, dtype=F64), torch.linspace(0.03, 0.1, 400, dtype=F64).view(2, 200)])
def test_rows_taken_block_by_block_give_the_same_gradient(monkeypatch, tau):
    e, positive, w = unit(2, 200, 6, seed=1), unit(1, 200, seed=2)[0], unit(2, 32, 6, seed=3) * 2
    log_x = unit(2, 200, seed=4)
    whole = prototype_gradient(e, positive, w, log_x, tau, 1e-6)
    monkeypatch.setattr(prototype_math, "CACHE", 70 * 32 * 8)  # blocks of 70, 70 and 60 rows
    updates = prototype_math.Updates(e, positive, log_x, tau, 1e-6, 32, prototype_math.Room.like(e, 32))
    assert [block.rows.stop - block.rows.start for block in updates.blocks] == [70, 70, 60] * 2
    gap = updates.gradient(w) - whole
    assert torch.linalg.vector_norm(gap) < 1e-13 * torch.linalg.vector_norm(whole)


def test_a_block_has_at_least_half_as_many_rows_as_the_embedding_has_numbers():
    e, positive = unit(2, 200, 300, seed=1), unit(1, 200, seed=2)[0]
    room = prototype_math.Room.like(e, 4096)
    updates = prototype_math.Updates(e, positive, unit(2, 200), torch.tensor(0.05, dtype=F64), 1e-6, 4096, room)
    assert [block.rows.stop - block.rows.start for block in updates.blocks] == [150, 50] * 2
