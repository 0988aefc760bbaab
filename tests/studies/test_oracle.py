"""The oracle: its alpha is the exact one, and its loop is the trainer's."""

import pytest
import torch
from torch.nn.functional import normalize

from neuclip_lib import data, presets
from neuclip_lib.contrast import GlobalBatch
from neuclip_lib.evaluation.normalizer_error import exact_log_normalizers
from neuclip_lib.models import build_model
from neuclip_lib.studies import oracle
from neuclip_lib.studies.oracle import Oracle, OracleNormalizer, embed_as_trained, oracle_figures
from neuclip_lib.training import train

F64 = torch.float64


def unit(*shape, seed):
    return normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64), dim=-1)


def asked(attached, rows, e1, e2, tau, index=None):
    index = torch.arange(len(e1)) if index is None else index
    normalizer = OracleNormalizer(lambda: (e1, e2), index, 1e-300, Oracle(every=1, attached=attached))
    a1, a2 = e1[rows].clone().requires_grad_(), e2[rows].clone().requires_grad_()
    batch = GlobalBatch(a1, a2, index[rows])
    normalizer.update(batch, (torch.zeros(len(rows)),) * 2, tau)
    return normalizer(a1, a2, (torch.zeros(len(rows)),) * 2, batch, tau), (a1, a2)


def test_alpha_is_the_exact_one_whatever_the_indices():
    e1, e2, tau = unit(60, 6, seed=1), unit(60, 6, seed=2), torch.tensor(0.05, dtype=F64)
    rows = torch.tensor([3, 59, 17, 0])
    index = torch.randperm(200, generator=torch.Generator().manual_seed(0))[:60]
    alpha, _ = asked(False, rows, e1, e2, tau, index)
    for ours, exact in zip(alpha, exact_log_normalizers(e1, e2, rows, tau), strict=True):
        assert torch.allclose(ours, exact, rtol=0, atol=1e-12)
        assert not ours.requires_grad


def test_attached_alpha_has_the_gradient_of_the_exact_one():
    e1, e2, tau = unit(30, 5, seed=3), unit(30, 5, seed=4), torch.tensor(0.1, dtype=F64)
    rows = torch.tensor([4, 9])
    (alpha1, _), (a1, a2) = asked(True, rows, e1, e2, tau)
    ours = torch.autograd.grad(alpha1.sum(), (a1, a2))
    b1, b2 = e1[rows].clone().requires_grad_(), e2[rows].clone().requires_grad_()
    total = torch.zeros((), dtype=F64)
    for k, row in enumerate(rows.tolist()):
        terms = [torch.exp((b1[k] @ e2[j] - b1[k] @ b2[k]) / tau) for j in range(30) if j != row]
        total = total + torch.log(torch.stack(terms).mean())
    for got, wanted in zip(ours, torch.autograd.grad(total, (b1, b2)), strict=True):
        assert torch.allclose(got, wanted, rtol=1e-10, atol=1e-12)


def test_the_bank_is_made_when_due_and_not_between():
    calls = []

    def embed():
        calls.append(1)
        return unit(8, 4, seed=len(calls)), unit(8, 4, seed=9)

    normalizer = OracleNormalizer(embed, torch.arange(8), 1e-6, Oracle(every=3))
    batch = GlobalBatch(unit(4, 4, seed=5), unit(4, 4, seed=6), torch.arange(4))
    counts = []
    for _ in range(7):
        normalizer.update(batch, (torch.zeros(4),) * 2, torch.tensor(0.1))
        counts.append(len(calls))
    assert counts == [1, 1, 1, 2, 2, 2, 3]


def test_pairs_are_embedded_in_order_and_moved_as_anchors_are():
    pairs = data.load("captions", "train", n=128)
    model = build_model("small", pairs.vocabulary_texts(), pairs.image_size, 0)
    still, _ = embed_as_trained(model, pairs, 0, torch.Generator().manual_seed(0))
    assert still.shape == (len(pairs), model.dim)
    generator = torch.Generator().manual_seed(0)
    first, texts = embed_as_trained(model, pairs, 2, generator)
    second, same = embed_as_trained(model, pairs, 2, generator)
    assert torch.equal(texts, same)  # texts are not moved
    assert not torch.allclose(first, still)
    assert not torch.allclose(first, second)  # another draw


def test_its_loop_is_the_trainers(monkeypatch, tmp_path):
    config = presets.tiny("neuclip", probe_every=5)
    run = train(config, tmp_path / "run", quiet=True)
    kept = []
    build = oracle.build_trainee

    def remembering(*arguments):
        trainee = build(*arguments)
        kept.append(trainee.parts.normalizer)
        return trainee

    monkeypatch.setattr(oracle, "build_trainee", remembering)
    monkeypatch.setattr(oracle, "OracleNormalizer", lambda *_: kept[0])
    figures = oracle_figures(config, Oracle())
    theirs = [[row["step"], round(row["loss"], 4)] for row in run.metrics("probe") if row["step"] < config.steps]
    assert figures["probe"] == theirs
    assert len(theirs) == 4


def test_an_oracle_gets_better_figures_than_chance_and_the_same_again():
    config = presets.tiny("neuclip")
    first, again = (oracle_figures(config, Oracle(every=5)) for _ in range(2))
    assert {**first, "seconds": 0} == {**again, "seconds": 0}
    assert first["probe"][-1][1] < first["probe"][0][1]
    held = oracle_figures(config, Oracle(every=5, attached=True))
    assert held["probe"] != first["probe"]


def test_a_model_with_running_statistics_is_refused():
    class Normed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(2)

    with pytest.raises(ValueError, match="running statistics"):
        embed_as_trained(Normed(), None, 0, None)
