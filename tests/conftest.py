import os
import threading

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

from neuclip_lib.ranks import ONE, Ranks

torch.set_num_threads(1)


class ThreadRanks(Ranks):
    """Ranks as threads of this process: quick to start, for unit tests. What counts is tested with real processes."""

    def __init__(self, rank, size, barrier, board):
        self.rank, self.size, self.barrier, self.board = rank, size, barrier, board

    def _exchange(self, x):
        self.board[self.rank] = x.detach().clone()
        self.barrier.wait()
        parts = list(self.board)
        self.barrier.wait()
        return parts

    def gather(self, part):
        return torch.cat(self._exchange(part))

    def sum(self, x):
        return torch.stack(self._exchange(x)).sum(0)

    def max(self, x):
        return torch.stack(self._exchange(x)).amax(0)

    def sum_own_rows(self, x):
        rows = len(x) // self.size
        return self.sum(x)[self.rank * rows : (self.rank + 1) * rows]

    def collect(self, part):
        parts = self._exchange(part)
        return parts if self.rank == 0 else []


@pytest.fixture
def on_ranks():
    """Run ``function(ranks)`` on that many ranks; gives their results in order, or raises a rank's error."""

    def run(size, function):
        if size == 1:
            return [function(ONE)]
        barrier, board = threading.Barrier(size, timeout=60), [None] * size
        results, errors = [None] * size, []

        def one(rank):
            torch.set_num_threads(1)
            try:
                results[rank] = function(ThreadRanks(rank, size, barrier, board))
            except threading.BrokenBarrierError:
                pass
            except BaseException as error:
                errors.append(error)
                barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    return run


def pytest_terminal_summary(terminalreporter):
    """The time each lesson took, which has a budget."""
    for report in terminalreporter.stats.get("passed", []):
        found = dict(report.user_properties)
        if "cpu_seconds" in found:
            terminalreporter.write_line(f"{found['lesson']}: {found['seconds']} s, processor {found['cpu_seconds']} s")
