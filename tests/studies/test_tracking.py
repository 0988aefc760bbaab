"""The tracking study: its generator, its numbers, and that a second call measures nothing again."""

import dataclasses
import json
import math

import pytest
import torch

from neuclip_lib.contrast import GlobalBatch
from neuclip_lib.methods import get_method
from neuclip_lib.studies import tracking
from neuclip_lib.studies.keep import Kept
from neuclip_lib.studies.latent_pairs import LatentPairs
from neuclip_lib.studies.two_towers import TwoTowers, learn

QUICK = tracking.QUICK


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished quick study of two seeds."""
    path = tmp_path_factory.mktemp("tracking") / "tracking"
    tracking.run(path, [0, 1], quick=True)
    return path


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_larger_set_begins_with_the_smaller_one_and_views_are_what_they_say():
    pairs = LatentPairs(latent=4, width=32, noise=0.0)
    small, large = pairs.draw(50, seed=3), pairs.draw(200, seed=3)
    for few, many in zip(small, large, strict=True):
        torch.testing.assert_close(few, many[:50], rtol=0, atol=0)
    # Without noise both views are tanh of linear maps of one latent: their arctanh has rank 4 together.
    together = torch.cat([view.double().clamp(-1 + 1e-12, 1 - 1e-12).atanh() for view in large], dim=1)
    values = torch.linalg.svdvals(together)
    assert values[3] > 1 and values[4] < 0.1 * values[3]
    noisy = dataclasses.replace(pairs, noise=0.5).draw(5000, seed=3)
    assert (noisy[0] - pairs.draw(5000, seed=3)[0]).std().item() == pytest.approx(0.5, abs=0.01)
    assert not torch.equal(pairs.draw(50, seed=4)[0], small[0])


def test_towers_follow_their_seed_and_leave_the_global_one():
    before = torch.get_rng_state()
    first, same, other = (TwoTowers((8, 6), 5, 4, seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first.image[0].weight, same.image[0].weight)
    assert not torch.equal(first.image[0].weight, other.image[0].weight)
    e1, e2 = first(torch.randn(7, 8), torch.randn(7, 6))
    assert e1.shape == e2.shape == (7, 4)
    torch.testing.assert_close(e1.norm(dim=1), torch.ones(7))


def test_a_step_moves_by_the_methods_gradient_and_shadows_steer_nothing():
    x, index, tau = LatentPairs(width=8).draw(64, 0), torch.arange(16), torch.tensor(0.1)
    settings = QUICK.settings_of(tracking.Setting(64, 16), 0)
    settings = dataclasses.replace(settings, dim=4)

    def after(shadows):
        towers = TwoTowers((8, 8), None, 4, 0)
        start = towers.image.weight.detach().clone()
        learn(
            towers,
            x,
            index,
            get_method("gcl-batch").build(settings),
            shadows,
            tau,
            torch.optim.SGD(towers.parameters(), lr=0.5),
        )
        return start, towers

    shadow = get_method("neuclip").build(settings).normalizer
    start, towers = after([shadow])
    assert shadow.step == 1
    assert torch.equal(towers.image.weight, after([])[1].image.weight)
    plain = TwoTowers((8, 8), None, 4, 0)
    e1, e2 = plain(x[0][index], x[1][index])
    logits = (e1 @ e2.T - (e1 * e2).sum(1, keepdim=True)) / tau
    back = (e2 @ e1.T - (e1 * e2).sum(1, keepdim=True)) / tau
    apart = torch.eye(16).bool()
    loss = sum(side.masked_fill(apart, -torch.inf).logsumexp(1).mean() / 2 for side in (logits, back))
    (gradient,) = torch.autograd.grad(loss, [plain.image.weight])
    torch.testing.assert_close(towers.image.weight.detach(), start - 0.5 * gradient)


def test_a_run_that_diverges_is_refused_before_it_changes_the_weights():
    x = LatentPairs(width=8).draw(64, 0)
    settings = dataclasses.replace(QUICK.settings_of(tracking.Setting(64, 16), 0), dim=4)
    towers = TwoTowers((8, 8), None, 4, 0)
    optimizer = torch.optim.SGD(towers.parameters(), lr=0.5)
    with torch.no_grad():
        towers.text.weight[0] = torch.nan
    before = towers.image.weight.detach().clone()
    parts = get_method("gcl-batch").build(settings)
    with pytest.raises(RuntimeError, match="diverged"):
        learn(towers, x, torch.arange(16), parts, [], torch.tensor(0.1), optimizer)
    assert torch.equal(before, towers.image.weight)


def test_the_batch_estimate_has_the_error_that_a_loop_finds(folder):
    """The last measurement of one part against towers trained anew and exact sums written out."""
    setting, seed = QUICK.settings[0], 0
    part = Kept(folder).read(setting.part(seed))
    assert [row["step"] for row in part["curve"]] == [20, 40]
    found = part["curve"][-1]["errors"]
    assert list(found) == ["gcl-batch", "openclip", "sogclr", "neuclip", "recent pairs"]
    x, settings = QUICK.pairs.draw(setting.n, seed), QUICK.settings_of(setting, seed)
    towers, parts = TwoTowers((64, 64), QUICK.hidden, QUICK.dim, seed), get_method("gcl-batch").build(settings)
    average = get_method("sogclr").build(settings).normalizer
    passed: list[tuple[torch.Tensor, torch.Tensor]] = []
    optimizer = torch.optim.AdamW(towers.parameters(), lr=QUICK.lr, weight_decay=0.0, fused=True)
    for step in range(QUICK.steps):
        index = tracking.batch_indices(setting.n, setting.batch_size, seed, step)
        with torch.no_grad():
            passed.append(towers(x[0][index], x[1][index]))
        learn(towers, x, index, parts, [average], torch.tensor(QUICK.tau), optimizer)
    with torch.no_grad():
        e1, e2 = (e.double() for e in towers(*x))
    s, apart = e1 @ e2.T, torch.eye(setting.n).bool()
    d1, d2 = ((s_ - s.diagonal()[:, None]) / QUICK.tau for s_ in (s, s.T))
    exact = torch.stack([d.masked_fill(apart, -torch.inf).logsumexp(1) for d in (d1, d2)])
    exact = exact - torch.log(torch.tensor(setting.n - 1.0))
    anchors = torch.randperm(setting.n, generator=torch.Generator().manual_seed(seed))[: QUICK.anchors]
    # The moving average does not depend on the draws of other pairs: every sample was visited.
    error = average.table.whole()[:, anchors] - exact[:, anchors]
    assert found["sogclr"]["mse"] == pytest.approx(error.square().mean().item(), rel=1e-4)
    assert found["sogclr"]["bias"] == pytest.approx(error.mean().item(), rel=1e-4)
    assert GlobalBatch(e1, e2).size == setting.n
    # The last m pairs as they were embedded when they came, as prototypes.
    last = [torch.cat([pair[side] for pair in passed])[-QUICK.prototypes.m :].double() for side in (1, 0)]
    recent = torch.stack(
        [
            ((e @ w.T - s.diagonal()[:, None]) / QUICK.tau).logsumexp(1) - math.log(QUICK.prototypes.m)
            for e, w in ((e1, last[0]), (e2, last[1]))
        ]
    )
    error = torch.logaddexp(recent, torch.tensor(math.log(QUICK.prototypes.eps)))[:, anchors] - exact[:, anchors]
    assert found["recent pairs"]["mse"] == pytest.approx(error.square().mean().item(), rel=1e-4)


def test_a_second_call_measures_nothing_and_changes_no_byte(folder, monkeypatch):
    before = files(folder)
    monkeypatch.setattr(tracking, "learn", lambda *_: pytest.fail("a finished part was measured again"))
    tracking.run(folder, [0, 1], quick=True)
    assert files(folder) == before


def test_a_lost_part_comes_back_the_same(folder):
    before = files(folder)
    Kept(folder).forget(QUICK.settings[1].part(1))
    assert files(folder) != before
    tracking.run(folder, [0, 1], quick=True)
    assert files(folder) == before


def test_the_tables_hold_the_means_of_the_parts(folder):
    text = tracking.table(Kept(folder))
    setting = QUICK.settings[0]
    parts = [json.loads((folder / f"{setting.part(seed)}.json").read_text()) for seed in (0, 1)]
    mse = [part["curve"][-1]["errors"]["neuclip"]["mse"] for part in parts]
    assert f"{sum(mse) / 2:.3f}" in text
    assert f"({min(mse):.3f} to {max(mse):.3f})" in text
    bias = [part["curve"][-1]["errors"]["neuclip"]["bias"] for part in parts]
    assert f"| {sum(bias) / 2:+.2f} / " in text
    assert "| n 256 to 512, B 32 | B 32 to 16, n 512 |" in text
    assert "| n 256, B 32 (5.0 passes) |" in text
    assert text.count("prototype network (neuclip)") == 3
    assert (folder / "tracking.png").read_bytes().startswith(b"\x89PNG")
    assert sum(len(content) for content in files(folder).values()) < 200 * 1024


def test_nothing_measured_is_said(tmp_path):
    with pytest.raises(RuntimeError, match="nothing is measured"):
        tracking.table(Kept(tmp_path))


def test_the_study_itself_measures_what_it_claims_to():
    study = tracking.STUDY
    assert {(setting.n, setting.batch_size) for setting in study.settings} >= {
        (500, 128),
        (4_000, 128),
        (20_000, 128),
        (100_000, 128),
        (20_000, 32),
    }
    assert study.steps % study.measure_every == 0
    assert (study.prototypes.m, study.prototypes.updates, study.gamma, study.tau) == (256, 10, 0.6, 0.07)
