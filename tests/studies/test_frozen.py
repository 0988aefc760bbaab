"""The frozen-features study: the exact gradient, its bias and variance, states left alone, and resuming."""

import copy
import dataclasses
import io

import pytest
import torch

from neuclip_lib import data
from neuclip_lib.contrast import GlobalBatch
from neuclip_lib.studies import frozen
from neuclip_lib.studies.frozen_features import features_of
from neuclip_lib.studies.gradient_error import (
    EXACT,
    Moments,
    batch_gradient,
    flat,
    full_gradient,
    gradient_errors,
)
from neuclip_lib.studies.keep import Kept
from neuclip_lib.studies.latent_pairs import LatentPairs
from neuclip_lib.studies.two_towers import TwoTowers, learn

N, B = 48, 12
TAU = torch.tensor(0.1)
QUICK = frozen.QUICK


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished quick study of one seed."""
    path = tmp_path_factory.mktemp("frozen") / "frozen"
    frozen.run(path, [0], quick=True)
    return path


def heads():
    return TwoTowers((10, 10), None, 6, 0), LatentPairs(latent=4, width=10).draw(N, 0)


def members(batch_size=B, dtype=torch.float32, **options):
    study = dataclasses.replace(QUICK, dim=6)
    setting = dataclasses.replace(QUICK.settings[0], batch_size=batch_size)
    settings = dataclasses.replace(study.settings_of(setting, N, 0), dtype=dtype, **options)
    return {name: study.parts(name, settings) for name in study.methods}


def trained(steps=9):
    """Heads and members that have seen some batches."""
    towers, x = heads()
    everyone = members()
    optimizer = torch.optim.SGD(towers.parameters(), lr=0.1)
    for step in range(steps):
        index = torch.randperm(N, generator=torch.Generator().manual_seed(step))[:B]
        shadows = [parts.normalizer for name, parts in everyone.items() if name != "gcl-batch"]
        learn(towers, x, index, everyone["gcl-batch"], shadows, TAU, optimizer)
    return towers, x, everyone


def naive_gradient(towers, x, tau):
    """Autograd of the loss as it is written, in float64, with the positives taken out of the sums one by one."""
    towers = copy.deepcopy(towers).double()
    e1, e2 = towers(x[0].double(), x[1].double())
    total = e1.new_zeros(())
    for i in range(len(e1)):
        others = [j for j in range(len(e1)) if j != i]
        for own, far in ((e1, e2), (e2, e1)):
            total = total + (((far[others] - far[i]) @ own[i]) / tau.double()).exp().mean().log()
    loss = total / (2 * len(e1))
    return flat(torch.autograd.grad(loss, list(towers.parameters())))


def bits(state):
    """A state as bytes: equal only when every number is."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def test_the_full_gradient_is_that_of_the_naive_loss():
    towers, x = heads()
    found, log_g = full_gradient(towers, x, TAU)
    torch.testing.assert_close(found, naive_gradient(towers, x, TAU), rtol=1e-10, atol=1e-12)
    assert log_g[0].dtype == torch.float64 and log_g[0].shape == (N,)
    assert all(p.dtype == torch.float32 for p in towers.parameters())


@pytest.mark.parametrize(
    ("name", "limit"), [("gcl-batch", 1e-5), ("sogclr", 1e-5), (EXACT, 1e-5)], ids=["gcl-batch", "sogclr", "exact"]
)
def test_with_all_pairs_in_the_batch_there_is_no_bias_and_no_variance(name, limit):
    towers, x = heads()
    found = gradient_errors(towers, x, members(batch_size=N), TAU, N, 3, 0)[0][name]
    assert found["bias"] < limit
    assert found["variance"] < limit**2
    assert found["scale"] == pytest.approx(1, abs=limit)
    assert found["cosine"] == pytest.approx(1, abs=limit)


def test_the_positive_in_the_denominator_is_a_bias_even_then():
    """OpenCLIP's loss on all pairs is another one: eps = 1/(n-1)."""
    towers, x = heads()
    found = gradient_errors(towers, x, members(batch_size=N), TAU, N, 2, 0)[0]["openclip"]
    assert found["bias"] > 1e-3
    assert found["variance"] < 1e-9


def test_a_methods_gradient_is_that_of_its_loss_without_its_factor():
    towers, x, everyone = trained()
    index = torch.arange(B)
    for parts in everyone.values():
        e = towers(x[0][index], x[1][index])
        found = batch_gradient(towers, e, parts, index, TAU)
        undo = parts.normalizer.remember(GlobalBatch(*e, index))
        direct = parts.loss(*e, GlobalBatch(*e, index), TAU).loss
        undo()
        factor = 0.1 if parts.objective.factor == "tau" else 1.0
        expected = flat(torch.autograd.grad(direct, list(towers.parameters()))) / factor
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_measuring_leaves_every_state_and_the_heads_as_they_were():
    towers, x, everyone = trained()
    before = {name: bits(parts.normalizer.state_dict()) for name, parts in everyone.items()}
    weights = bits(towers.state_dict())
    random = torch.get_rng_state()
    first, _ = gradient_errors(towers, x, everyone, TAU, B, 5, 0)
    assert {name: bits(parts.normalizer.state_dict()) for name, parts in everyone.items()} == before
    assert bits(towers.state_dict()) == weights
    assert torch.equal(torch.get_rng_state(), random)
    assert gradient_errors(towers, x, everyone, TAU, B, 5, 0)[0] == first


def test_the_exact_normalizer_has_no_bias_beyond_its_noise_and_openclip_has():
    towers, x, everyone = trained()
    found, log_g = gradient_errors(towers, x, {"openclip": everyone["openclip"]}, TAU, B, 2000, 0)
    assert found[EXACT]["bias"] < 2 * found[EXACT]["noise"] < 0.2
    assert found["openclip"]["bias"] > 3 * found["openclip"]["noise"]
    torch.testing.assert_close(log_g, full_gradient(towers, x, TAU)[1])


def test_moments_are_those_of_known_vectors():
    """Noise of variance p around a mean at 60 degrees to the target and twice its length."""
    generator = torch.Generator().manual_seed(0)
    p, count = 50, 4000
    target = torch.zeros(p, dtype=torch.float64)
    target[0] = 3
    mean = torch.zeros_like(target)
    mean[0], mean[1] = 3, 3 * 3**0.5  # length 6, cosine 1/2
    moments, kept = Moments(), []
    for _ in range(count):
        kept.append(mean + torch.randn(p, generator=generator, dtype=torch.float64))
        moments.add(kept[-1])
    found = moments.against(target)
    assert found["variance"] == pytest.approx(torch.stack(kept).var(0).sum().item() / 9, rel=1e-9)
    assert found["variance"] == pytest.approx(p / 9, rel=0.03)
    assert found["noise"] == pytest.approx((p / 9 / count) ** 0.5, rel=0.03)
    assert found["bias"] == pytest.approx(3**0.5, rel=0.01)
    assert found["cosine"] == pytest.approx(0.5, abs=0.01)
    assert found["direction"] == pytest.approx(0.75**0.5, abs=0.01)
    assert found["scale"] == pytest.approx(1, abs=0.01)


def test_moments_of_pure_noise_say_that_they_tell_nothing():
    moments = Moments()
    with pytest.raises(RuntimeError, match="at least 2"):
        moments.against(torch.ones(2))
    # A mean of a and a noise of 1: what is left of a^2 is negative, then below the noise, then above it.
    for a, told in ((0.1, False), (1.2, False), (2.0, True)):
        moments = Moments()
        for sign in (1.0, -1.0):
            moments.add(torch.tensor([a, sign], dtype=torch.float64))
        for side in (1.0, -1.0):
            found = moments.against(torch.tensor([side, 0.0], dtype=torch.float64))
            assert found["noise"] == pytest.approx(1)
            # 2/sqrt(3) before it is cut to what a cosine can be
            assert found["cosine"] == (side if told else None)
            assert found["direction"] == ((0.0 if side > 0 else 1.0) if told else None)


def test_a_method_without_a_normalizer_is_refused():
    settings = QUICK.settings_of(QUICK.settings[0], N, 0)
    with pytest.raises(ValueError, match="siglip has no normalizer"):
        QUICK.parts("siglip", settings)


def test_features_come_from_the_training_part_alone():
    train = data.load("captions", "train", n=200)
    held = {split: data.load("captions", split, n=200) for split in ("validation", "test")}
    found = features_of(train, held, words=20, width=8)
    assert found.widths == (8, 20)
    x1, x2 = found.train
    torch.testing.assert_close(x1.double().T.cov(), torch.eye(8, dtype=torch.float64), rtol=0, atol=1e-3)
    torch.testing.assert_close(x1.mean(0), torch.zeros(8), rtol=0, atol=1e-4)
    again = features_of(train, {"test": held["test"]}, words=20, width=8)
    assert torch.equal(again.train[0], x1) and torch.equal(again.held_out["test"][0], found.held_out["test"][0])
    # A bag of words, written out for one caption.
    caption = train.captions_at()[0].casefold().split()
    values = sorted(set(x2[0].tolist()))
    assert values[0] == 0.0 and values[-1] <= len(caption) ** 0.5
    counts = (x2[0] * len(caption) ** 0.5).round(decimals=4)
    assert torch.equal(counts, counts.round()) and 0 < counts.sum() <= len(caption)


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_second_call_measures_nothing_and_a_lost_part_comes_back_the_same(folder, monkeypatch):
    before = files(folder)
    setting = QUICK.settings[0]
    with monkeypatch.context() as patch:
        patch.setattr(frozen, "learn", lambda *_: pytest.fail("a finished part was measured again"))
        frozen.run(folder, [0], quick=True)
    assert files(folder) == before
    kept = Kept(folder)
    kept.forget(setting.common(0))
    kept.forget(setting.own("sogclr", 0))
    frozen.run(folder, [0], quick=True)
    assert files(folder) == before


def test_parts_tables_and_picture(folder):
    kept, setting = Kept(folder), QUICK.settings[0]
    part = kept.read(setting.common(0))
    assert [row["passes"] for row in part["measured"]] == [1, 3]
    gradients = part["measured"][-1]["gradients"]
    assert set(gradients) == {*QUICK.methods, EXACT}
    text = frozen.table(kept)
    one = gradients["neuclip-mixed"]
    assert f"| neuclip-mixed | 3 | {one['bias']:.3f} |" in text
    recall = kept.read(setting.own("openclip", 0))["recall"]
    assert f"| openclip | {recall['validation']['r@1']:.1f} | {recall['test']['r@1']:.1f} |" in text
    assert (folder / "frozen.png").read_bytes().startswith(b"\x89PNG")
    assert sum(len(content) for content in files(folder).values()) < 200 * 1024


def test_the_study_reaches_many_passes_and_many_samples_a_batch_and_measures_between_restarts():
    many, large = frozen.STUDY.settings
    assert many.passes == 200 and 200 in many.measured_after
    n = len(data.load(large.data, "train", **large.data_options))
    assert 900 < n / large.batch_size < 1200
    every = frozen.STUDY.prototypes.restart_every
    for setting, pairs in ((many, many.pairs), (large, n)):
        for passes in setting.measured_after:
            assert passes * (pairs // setting.batch_size) % every > 10
