"""R7: prototypes spread over two ranks by column, against every rank holding all of them and a part of the anchors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from neuclip_lib.bench.timing import Ratio, paired_ratios, rows_of
from neuclip_lib.contrast import GlobalBatch
from neuclip_lib.normalizers import PrototypeNormalizer, PrototypeOptions
from neuclip_lib.normalizers.prototype_math import Room, Updates
from neuclip_lib.ranks import Ranks
from neuclip_lib.training.distributed import own_rows, process_group

SIZE, DIM, M, UPDATES = 512, 512, 4096, 10
TAU = torch.tensor(0.05)


class CountingRanks(Ranks):
    """Another's exchanges, with the floats that are given to reductions counted."""

    def __init__(self, inner: Ranks) -> None:
        self.inner, self.rank, self.size, self.floats = inner, inner.rank, inner.size, 0

    def gather(self, part: Tensor) -> Tensor:
        return self.inner.gather(part)

    def sum(self, x: Tensor) -> Tensor:
        self.floats += x.numel()
        return self.inner.sum(x)

    def max(self, x: Tensor) -> Tensor:
        self.floats += x.numel()
        return self.inner.max(x)

    def sum_own_rows(self, x: Tensor) -> Tensor:
        self.floats += x.numel()
        return self.inner.sum_own_rows(x)

    def collect(self, part: Tensor) -> list[Tensor]:
        return self.inner.collect(part)


def floats_of_a_step(size: int, dim: int, updates: int, attached: bool) -> int:
    """``4 B (T_u + 1)``, and ``2 B d`` when alpha is attached: what a step gives to reductions."""
    return 4 * size * (updates + 1) + (2 * size * dim if attached else 0)


def embeddings() -> tuple[Tensor, Tensor]:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(0)
    e1, e2 = (normalize(torch.randn(SIZE, DIM, generator=generator), dim=1) for _ in range(2))
    return e1, e2


def by_column(ranks: Ranks) -> Callable[[], object]:
    """The library's way: two exchanges of 2B floats an update."""
    e1, e2 = embeddings()
    batch = GlobalBatch(e1, e2, ranks=ranks, rows=own_rows(SIZE, ranks))
    npn = PrototypeNormalizer(DIM, SIZE, PrototypeOptions(m=M, updates=0, restart_every=0), ranks=ranks)
    log_g = torch.zeros(batch.own_size), torch.zeros(batch.own_size)
    for k in range(M // SIZE):
        generator = torch.Generator().manual_seed(k + 1)
        e = normalize(torch.randn(2, SIZE, DIM, generator=generator), dim=2)
        other = GlobalBatch(e[0], e[1])
        npn.update(other, (torch.zeros(SIZE), torch.zeros(SIZE)), TAU)
    npn.options = PrototypeOptions(m=M, updates=UPDATES, restart_every=0)
    return lambda: npn.update(batch, log_g, TAU)


def by_row(ranks: Ranks) -> Callable[[], object]:
    """Each rank holds all prototypes and its own anchors: one exchange of 2 m d floats an update."""
    rows = own_rows(SIZE, ranks)
    e = torch.stack(embeddings())[:, rows].contiguous()
    positive, log_x = (e[0] * e[1]).sum(1), torch.zeros(2, e.shape[1])
    w = normalize(torch.randn(2, M, DIM, generator=torch.Generator().manual_seed(9)), dim=2)
    adagrad = torch.optim.Adagrad([w], lr=1e-2, fused=True)
    room = Room.like(e, M)

    def call() -> None:
        updates = Updates(e, positive, log_x, TAU, 1e-6, M, room)
        for _ in range(UPDATES):
            w.grad = ranks.mean(updates.gradient(w))
            adagrad.step()

    return call


def two_rank_rows(rounds: int) -> list[dict[str, Any]]:
    """R7: two gloo ranks on this machine, wall time; T_u = 10."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "ratios.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += ["-m", "neuclip_lib.bench.two_ranks", str(out), str(rounds)]
        stale = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        variables = {key: value for key, value in os.environ.items() if key not in stale}
        done = subprocess.run(
            command, env={**variables, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the two ranks of R7 failed: {done.stderr.strip()[-500:]}")
        return json.loads(out.read_text(encoding="utf-8"))


def measure(ranks: Ranks, rounds: int) -> list[dict[str, Any]]:
    """The rows, on every rank; the inner repeats are one, so that the ranks stay in step."""
    counting = CountingRanks(ranks)
    column, row = by_column(ranks), by_row(ranks)
    variants = {"by row": row, "by row again (A/A)": row, "by column": column}
    found: dict[str, Ratio] = paired_ratios(variants, "by row", rounds, clock=time.perf_counter, repeats=1)
    case = f"B={SIZE} d={DIM} m={M}"
    rows = rows_of(case, found, "by row", {"by column": 0.85})
    counted = by_column(counting)
    counting.floats = 0
    counted()
    sent = counting.floats / (4 * SIZE * UPDATES)
    return [*rows, {"case": case, "variant": "floats sent / 4 B T_u", "ratio": sent, "target": 1, "iqr": None}]


def main(out: Path, rounds: int) -> None:
    """One rank's share of the measurement; rank 0 writes."""
    torch.set_num_threads(1)
    with process_group(torch.device("cpu")) as ranks:
        rows = measure(ranks, rounds)
        if ranks.rank == 0:
            out.write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
