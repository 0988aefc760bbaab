"""Numbers per sample spread over ranks: look-ups and writes against a plain array, re-sharding, refusals."""

import pytest
import torch

from neuclip_lib import tables
from neuclip_lib.tables import Table, check_index, require_index

pytestmark = pytest.mark.quick
F64 = torch.float64
WORLDS = [1, 2, 3, 4]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def table(ranks, n=11, columns=2, fill=-torch.inf, dtype=F64):
    return Table(n, columns, fill, ranks, dtype=dtype)


def whole(parts):
    """What rank 0 gives, after a look that the others give nothing."""
    assert all(part.shape[1] == 0 for part in parts[1:])
    return parts[0]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("n", [1, 2, 3, 11, 12])
def test_writes_and_look_ups_equal_a_plain_array(on_ranks, world, n):
    generator = torch.Generator().manual_seed(n)
    indices = [torch.randint(n, (7,), generator=generator) for _ in range(20)]
    numbers = [random(2, n, seed=step)[:, index] for step, index in enumerate(indices)]  # equal where repeated

    def run(ranks):
        kept, found = table(ranks, n), []
        for index, values in zip(indices, numbers, strict=True):
            found.append(kept.look_up(index))
            kept.write(index, values)
        return torch.stack(found), kept.look_up(torch.arange(n)), kept.whole(), kept.values

    results = on_ranks(world, run)
    plain, expected = [[-torch.inf] * n for _ in range(2)], []
    for index, values in zip(indices, numbers, strict=True):
        expected.append([[column[i] for i in index.tolist()] for column in plain])
        for side in (0, 1):
            for place, i in enumerate(index.tolist()):
                plain[side][i] = values[side, place].item()
    for rank, (found, after, _, share) in enumerate(results):
        assert found.tolist() == expected
        assert after.tolist() == plain
        assert share.tolist() == [column[rank::world] for column in plain]
    assert whole([result[2] for result in results]).tolist() == plain


@pytest.mark.parametrize("world", [2, 3, 4])
def test_foreign_writes_leave_the_share_alone(on_ranks, world):
    """Each rank writes to samples of the others alone, the last one of its share stands beside the spare place."""

    def run(ranks):
        kept = table(ranks, n=13)
        kept.write(torch.arange(13), random(2, 13))
        before = kept.values.clone()
        foreign = [i for i in range(13) if i % world != ranks.rank]
        kept.write(torch.tensor(foreign), torch.full((2, len(foreign)), torch.nan, dtype=F64))
        return before, kept.values, kept.look_up(torch.arange(13))

    for before, after, found in on_ranks(world, run):
        assert torch.equal(before, after)
        assert torch.equal(found, random(2, 13))  # what the spare place holds, not a number here, is seen nowhere


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_every_integer_type_names_the_same_samples(dtype):
    kept = table(tables.ONE)
    kept.write(torch.arange(11), random(2, 11))
    index = torch.tensor([1, 0, 1, 10, 2, 0, 1, 1, 0, 1, 1], dtype=dtype)  # of the table's length, as a mask would be
    assert torch.equal(kept.look_up(index), random(2, 11)[:, index.long()])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("wrong", [-23, -12, -11, -2, -1, 11, 12, 13, 14, 44, 2**40])
def test_a_wrong_index_is_named_on_every_rank_and_nothing_is_read_or_written(on_ranks, world, wrong):
    def run(ranks):
        kept = table(ranks, fill=0.0)
        index = torch.tensor([3, wrong, 4])
        with pytest.raises(ValueError, match=f"sample index {wrong} is out of range.* 11 samples, 0 to 10"):
            kept.look_up(index)
        with pytest.raises(ValueError, match=f"sample index {wrong} is out of range"):
            kept.write(index[1:2], torch.ones(2, 1, dtype=F64))
        return kept.values

    for share in on_ranks(world, run):
        assert not share.any()


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (None, "needs the stable index"),
        (torch.zeros(3), "an integer, got torch.float32"),
        (torch.zeros(3, dtype=torch.complex64), "an integer, got torch.complex64"),
        (torch.zeros(3, dtype=torch.bool), "an integer, got torch.bool"),
    ],
)
def test_an_index_of_the_wrong_kind_is_refused(index, words):
    kept = table(tables.ONE)
    for use in (kept.look_up, lambda i: kept.write(i, random(2, 3)), require_index, lambda i: check_index(i, 11)):
        with pytest.raises(ValueError, match=words):
            use(index)


def test_check_index_names_the_first_wrong_one():
    check_index(torch.arange(11), 11)
    check_index(torch.tensor([5, 200], dtype=torch.uint8), 1000)
    with pytest.raises(ValueError, match="sample index 11 is out of range: the table was made for 11 samples, 0 to 10"):
        check_index(torch.tensor([0, 11, -1]), 11)
    with pytest.raises(ValueError, match="sample index -1 is out of range"):
        check_index(torch.tensor([0, -1, 11]), 11)


@pytest.mark.parametrize("n", [2, 11])
def test_a_saved_table_loads_at_every_world_size(on_ranks, n):
    saved = random(2, n)
    for world in (4, 1, 3, 2):
        start = saved

        def run(ranks, start=start):
            kept = table(ranks, n)
            kept.load(start)
            return kept.whole(), kept.values

        results = on_ranks(world, run)
        saved = whole([result[0] for result in results])
        assert torch.equal(saved, random(2, n)) and saved.device.type == "cpu"
        assert sum(result[1].shape[1] for result in results) == n


def test_a_saved_table_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"saved table is \[2, 10\], this run's is \[2, 11\]"):
        table(tables.ONE).load(random(2, 10))


def test_the_table_never_becomes_part_of_a_graph():
    kept = table(tables.ONE)
    kept.write(torch.tensor([1, 2]), random(2, 2).requires_grad_())
    assert not kept.look_up(torch.tensor([1])).requires_grad


def test_no_samples_are_refused():
    with pytest.raises(ValueError, match="at least 1 sample, got n=0"):
        table(tables.ONE, n=0)


def test_a_table_that_does_not_fit_is_refused_before_it_is_allocated(monkeypatch):
    """10^12 samples: 8e12 bytes are 7450.6 GiB."""
    monkeypatch.setattr(torch, "full", None)
    with pytest.raises(RuntimeError, match=r"1,000,000,000,000 samples takes 7,450\.6 GiB on each process"):
        table(tables.ONE, n=10**12, dtype=torch.float32)


@pytest.mark.parametrize(("world", "largest_n"), [(1, 32), (2, 64), (3, 96)])
def test_all_ranks_refuse_at_half_the_free_memory_or_none_does(on_ranks, monkeypatch, world, largest_n):
    """Half of 1024 bytes hold 32 samples of two float64 on each rank; one more is rank 0's, and all must refuse it."""
    monkeypatch.setattr(tables, "free_memory", lambda device: 1024)
    assert len(on_ranks(world, lambda ranks: table(ranks, n=largest_n))) == world

    def run(ranks):
        with pytest.raises(RuntimeError, match="more than half"):
            table(ranks, n=largest_n + 1)
        return True

    assert on_ranks(world, run) == [True] * world


def test_unknown_free_memory_refuses_nothing(monkeypatch):
    monkeypatch.setattr(tables, "free_memory", lambda device: None)
    assert table(tables.ONE).values.shape == (2, 11)
