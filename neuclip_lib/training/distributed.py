"""Several processes under torchrun: who we are, what we exchange, and how a rank's failure becomes everybody's.

``torchrun --nproc-per-node W -m neuclip_lib train ...`` starts W of us and says so in the environment. Embeddings
travel once, detached; everything else is floats per anchor. DistributedDataParallel averages the encoders' gradients.
"""

from __future__ import annotations

import datetime
import gc
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

# Imported here, before any group: its functions keep the group of that moment as a default value. The wrapper would
# import it later; the group would then be held for ever, and its threads could abort the process as Python ends.
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from neuclip_lib.contrast import GlobalBatch
from neuclip_lib.ranks import ONE, Ranks

VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
MEETING_SECONDS = 120
"""How long the ranks wait for each other at the start; variables that an earlier launch left behind fail after it."""
WAITING_SECONDS = 1800
"""How long a rank waits in an exchange: others may be writing a checkpoint."""


class ProcessRanks(Ranks):
    """The processes of the default group of ``torch.distributed``."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def gather(self, part: Tensor) -> Tensor:
        part = part.detach().contiguous()
        whole = part.new_empty((self.size * part.shape[0], *part.shape[1:]))
        dist.all_gather_into_tensor(whole, part)
        return whole

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, dist.ReduceOp.SUM)
        return x

    def max(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return x

    def sum_own_rows(self, x: Tensor) -> Tensor:
        rows = x.shape[0] // self.size
        if x.device.type == "cuda":
            own = x.new_empty((rows, *x.shape[1:]))
            dist.reduce_scatter_tensor(own, x.contiguous(), dist.ReduceOp.SUM)
            return own
        return self.sum(x)[self.rank * rows : (self.rank + 1) * rows]

    def collect(self, part: Tensor) -> list[Tensor]:
        # The sizes travel first: parts may differ by one.
        size = torch.tensor([part.shape[0]], device=part.device)
        sizes = self.gather(size).tolist()
        padded = part.new_zeros((max(sizes), *part.shape[1:]))
        padded[: part.shape[0]] = part
        parts = [torch.empty_like(padded) for _ in sizes] if self.rank == 0 else None
        dist.gather(padded, parts, dst=0)
        return [] if parts is None else [one[:length] for one, length in zip(parts, sizes, strict=True)]


def wanted_processes() -> int:
    """How many processes the environment speaks of.

    Raises:
        RuntimeError: when it speaks of several and does not say everything they need.
    """
    text = os.environ.get("WORLD_SIZE", "").strip()
    if text in ("", "1"):
        return 1
    found = ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ)
    missing = [name for name in VARIABLES if name not in os.environ]
    numbers = [os.environ.get(name, "0").strip() for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK")]
    if missing or not all(number.isdecimal() for number in numbers) or int(numbers[1]) >= int(numbers[0]):
        lacking = f" and lacks {', '.join(missing)}" if missing else ""
        raise RuntimeError(
            f"the environment asks for several processes ({found}){lacking}. Start them with "
            "torchrun --nproc-per-node=N -m neuclip_lib train ...; for one process, or if an earlier launch left these "
            f"variables behind, run: unset {' '.join(VARIABLES)}"
        )
    return int(text)


@contextmanager
def process_group(device: torch.device) -> Iterator[Ranks]:
    """The ranks of this run; inside the block they can talk. One process needs no group.

    A group that the caller has made already is used and left as it is.

    Args:
        device: of this rank; NCCL on CUDA, gloo elsewhere.

    Raises:
        RuntimeError: when the other ranks do not come.
    """
    if wanted_processes() == 1:
        yield ONE
        return
    if dist.is_initialized():
        yield ProcessRanks()
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        meeting = datetime.timedelta(seconds=MEETING_SECONDS)
        store, rank, size = next(iter(dist.rendezvous("env://", timeout=meeting)))
        # torchrun keeps its store when it restarts the workers: without this they would meet the addresses of the dead.
        store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        waiting = datetime.timedelta(seconds=WAITING_SECONDS)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=waiting)
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise RuntimeError(
            f"the other processes did not come within {MEETING_SECONDS} s: {str(error).splitlines()[0]}. If this "
            f"should be one process, variables of an earlier launch are left; run: unset {' '.join(VARIABLES)}"
        ) from error
    try:
        yield ProcessRanks()
    finally:
        gc.collect()  # the wrapped model is in cycles, and holds the group
        dist.destroy_process_group()


def own_device(name: str, device: torch.device) -> torch.device:
    """The device of this rank: on CUDA without a number, the one of its place on the machine."""
    if device.type == "cuda" and ":" not in name and wanted_processes() > 1:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    return device


def is_first() -> bool:
    """Whether this process writes the folder and speaks: rank 0, or the only one."""
    return wanted_processes() == 1 or os.environ["RANK"].strip() == "0"


def from_first(value: int, ranks: Ranks, device: torch.device) -> int:
    """Rank 0's integer on every rank.

    Raises:
        RuntimeError: when rank 0 has stopped.
    """
    mine = torch.tensor([value if ranks.rank == 0 else 0], dtype=torch.int64, device=device)
    try:
        return int(ranks.sum(mine))
    except RuntimeError as error:
        if ranks.rank == 0:
            raise
        raise RuntimeError("rank 0 stopped before training began; its own message says why") from error


def any_rank(flag: bool, ranks: Ranks) -> bool:
    """Whether the flag is up on any rank. On CUDA it travels between the hosts; no device waits."""
    return flag if ranks.size == 1 else bool(ranks.max(torch.tensor([int(flag)])))


def wrap(model: nn.Module, ranks: Ranks) -> nn.Module:
    """The model with its gradients averaged over ranks in ``backward``; itself for one process."""
    if ranks.size == 1:
        return model
    device = next(model.parameters()).device
    return DistributedDataParallel(
        model, device_ids=[device] if device.type == "cuda" else None, gradient_as_bucket_view=True
    )


def average_gradients(scalars: Iterable[nn.Parameter], ranks: Ranks) -> None:
    """Mean over ranks of the gradients of a few scalars that no wrapper looks after."""
    for parameter in scalars:
        if parameter.grad is not None:
            parameter.grad = ranks.mean(parameter.grad)


def check_divisible(size: int, processes: int) -> None:
    """Refuse a global batch that the processes cannot share equally.

    Raises:
        ValueError: with the nearest sizes that fit.
    """
    if size % processes:
        below, above = size // processes * processes, (size // processes + 1) * processes
        raise ValueError(
            f"batch_size is that of all processes together and must be divisible by their number: {size} is not by "
            f"{processes}; take {f'{below} or ' if below else ''}{above}"
        )


def own_rows(size: int, ranks: Ranks) -> slice:
    """This rank's share of a global batch of ``size``, which :func:`check_divisible` has let through."""
    share = size // ranks.size
    return slice(ranks.rank * share, (ranks.rank + 1) * share)


def gather(e1: Tensor, e2: Tensor, index: Tensor | None = None, ranks: Ranks = ONE) -> GlobalBatch:
    """All ranks' embeddings, detached, in the same order on every rank.

    Args:
        e1: this rank's image embeddings ``[b, d]``, unit rows.
        e2: its text embeddings ``[b, d]``, unit rows.
        index: stable sample index of each pair ``[b]``.
        ranks: the processes; all have the same b.
    """
    if ranks.size == 1:
        return GlobalBatch(e1, e2, index)
    both = ranks.gather(torch.stack((e1, e2), 1))  # [B, 2, d] in one exchange
    everyone = None if index is None else ranks.gather(index)
    rows = slice(ranks.rank * len(e1), (ranks.rank + 1) * len(e1))
    return GlobalBatch(both[:, 0].contiguous(), both[:, 1].contiguous(), everyone, ranks=ranks, rows=rows)
