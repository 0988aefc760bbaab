"""One step against a written-out form; the guard; the temperature's bounds; the loss reads what is optimised."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch

from neuclip_lib.contrast import GlobalBatch, log_mean_exp_over_negatives
from neuclip_lib.methods import get_method, method_names
from neuclip_lib.models import ImageTextModel, build_model
from neuclip_lib.training import TrainConfig, build, session, step
from neuclip_lib.training.build import Samples
from neuclip_lib.training.distributed import gather, process_group, wanted_processes
from neuclip_lib.training.feed import Batch
from neuclip_lib.training.optim import set_learning_rates
from neuclip_lib.training.precision import LossScale

WORDS = ["a red circle above a blue square", "two small green triangles"]
CPU = torch.device("cpu")


def _batch(size: int = 8, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    words = sorted({word for text in WORDS for word in text.split()})
    texts = [
        " ".join(words[k] for k in torch.randint(len(words), (4,), generator=generator).tolist()) for _ in range(size)
    ]
    model = build_model("small", WORDS, 32, seed=0)
    return Batch(torch.randn(size, 3, 32, 32, generator=generator), model.tokenize(texts), torch.arange(size))


def _trainee(config: TrainConfig) -> step.Trainee:
    trainee = build.build_trainee(
        config, build_model("small", WORDS, 32, seed=0), CPU, Samples(n=64, steps_per_epoch=2)
    )
    set_learning_rates(trainee.optimizer, step=10, steps=20, warmup=0)
    return trainee


def _do(trainee: step.Trainee, batch: Batch, **options: object) -> step.Seen:
    guard = step.Guard(CPU, trainee.optimizer)
    return step.train_step(trainee, batch, guard, 0, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("learned", [False, True])
def test_an_openclip_step_equals_cross_entropy_written_out(small: Callable[..., TrainConfig], learned: bool) -> None:
    config = small("openclip", batch_size=8, learned=learned)
    trainee, batch = _trainee(config), _batch()
    by_hand = _trainee(config)
    seen = _do(trainee, batch)

    e1, e2 = by_hand.model.encode_image(batch.images), by_hand.model.encode_text(batch.tokens)
    tau = by_hand.temperature()
    logits, target = e1 @ e2.T / tau, torch.arange(8)
    cross = torch.nn.functional.cross_entropy
    loss = (cross(logits, target) + cross(logits.T, target)) / 2
    by_hand.optimizer.zero_grad()
    loss.backward()
    assert seen.loss.item() == pytest.approx(loss.item() - math.log(7), abs=2e-5)
    for (name, mine), other in zip(trainee.model.named_parameters(), by_hand.model.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=2e-3, atol=2e-6, msg=name)
    if learned:
        assert trainee.temperature.log_inverse.grad is not None
        torch.testing.assert_close(
            trainee.temperature.log_inverse.grad, by_hand.temperature.log_inverse.grad, rtol=1e-3, atol=1e-5
        )


# SigLIP's and AmorLIP's losses do not see similarities relative to the positive's. On pictures of noise, which all look
# alike to a fresh model, they stay for hundreds of steps where every similarity is the same; on icons they learn.
LEARNS_NOISE = [name for name in method_names() if name not in ("siglip", "amorlip")]
SLOWER = {"dhel": 120, "kcl": 120, "fastclip-v2-published": 150}


@pytest.mark.parametrize("method", LEARNS_NOISE)
def test_64_pairs_are_learned_well_below_chance(small: Callable[..., TrainConfig], method: str) -> None:
    """The exact loss over 64 distinct pairs falls from about 0 (chance, all similarities equal) to below -3."""
    steps = SLOWER.get(method, 40)
    config = small(method, batch_size=64, m=64, steps=steps, **{"optim.lr": 4e-3})
    trainee, batch = _trainee(config), _batch(64)
    for done in range(steps):
        set_learning_rates(trainee.optimizer, done, steps, 4)
        seen = _do(trainee, batch)
    with torch.no_grad():
        e1, e2 = trainee.model(batch.images, batch.tokens)
        log_g = log_mean_exp_over_negatives(e1, e2, GlobalBatch(e1, e2), torch.tensor(0.05))
    assert torch.cat(log_g).mean().item() < -3
    if get_method(method).tau != "per sample":
        assert seen.tau.item() == pytest.approx(0.05)


@pytest.mark.parametrize("raw", [6.0, -1.0])
def test_a_loaded_temperature_is_inside_its_bounds_in_the_first_forward(
    small: Callable[..., TrainConfig], raw: float
) -> None:
    trainee = _trainee(small("openclip", batch_size=8, learned=True))
    state = trainee.state()
    state["temperature"] = {"log_inverse": torch.tensor(raw)}
    trainee.load_state(state)
    taus = [_do(trainee, _batch()).tau.item() for _ in range(2)]
    assert all(0.01 <= tau <= 1.0 for tau in taus)
    assert taus[0] == pytest.approx(0.01 if raw > 0 else 1.0, rel=1e-5)


def test_after_loading_the_loss_reads_the_objects_that_the_optimizer_moves(small: Callable[..., TrainConfig]) -> None:
    trainee = _trainee(small("openclip", batch_size=8, learned=True))
    _do(trainee, _batch())
    fresh = _trainee(small("openclip", batch_size=8, learned=True))
    fresh.model.load_state_dict(trainee.model.state_dict())
    fresh.load_state(copy.deepcopy(trainee.state()))
    in_optimizer = {id(p) for group in fresh.optimizer.param_groups for p in group["params"]}
    assert id(fresh.temperature.log_inverse) in in_optimizer
    assert {id(p) for p in fresh.model.parameters() if p.requires_grad} <= in_optimizer
    first = _do(fresh, _batch())
    assert _do(fresh, _batch()).tau.item() != first.tau.item()


def test_shadows_see_the_batches_and_steer_nothing(small: Callable[..., TrainConfig]) -> None:
    alone = _trainee(small("openclip", batch_size=8))
    watched = _trainee(small("openclip", batch_size=8, shadows=("neuclip", "gcl-batch"), m=12))
    own = _trainee(small("neuclip", batch_size=8, m=12))
    for seed in range(3):
        _do(alone, _batch(seed=seed))
        _do(watched, _batch(seed=seed))
    for mine, other in zip(alone.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert watched.shadows["neuclip"].state_dict()["counters"][3] == 3
    # On the same embeddings a shadow is what the method's own normalizer would be.
    fresh = _trainee(small("openclip", batch_size=8, shadows=("neuclip",), m=12))
    _do(fresh, _batch())
    _do(own, _batch())
    assert torch.equal(fresh.shadows["neuclip"].state_dict()["w"], own.parts.normalizer.state_dict()["w"])


def _snapshot(trainee: step.Trainee) -> dict:
    return copy.deepcopy({"model": trainee.model.state_dict(), **trainee.state()})


def _equal(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(_equal, left, right))
    return left == right


@pytest.mark.parametrize("method", ["openclip", "neuclip"])
def test_a_step_with_a_nan_changes_nothing_and_says_what_it_saw(small: Callable[..., TrainConfig], method: str) -> None:
    trainee = _trainee(small(method, batch_size=8, m=12, shadows=("gcl-batch",)))
    _do(trainee, _batch())
    before = _snapshot(trainee)
    bad = _batch(seed=1)
    bad.images[3, 0, 0, 0] = float("nan")
    with pytest.raises(step.NonFinite) as error:
        _do(trainee, bad)
    assert _equal(before, _snapshot(trainee))
    report = session.describe_failure(error.value.step, error.value.seen)
    assert report["step"] == 1
    assert report["loss"] == "nan"
    assert report["samples"] == list(range(8))
    assert report["tau"] == pytest.approx(0.05)
    assert "nan" in report["embedding_length"]


def test_a_gradient_that_is_not_finite_stops_the_step_even_when_the_loss_is(small: Callable[..., TrainConfig]) -> None:
    trainee = _trainee(small("openclip", batch_size=8))
    before = _snapshot(trainee)
    parameter = next(iter(trainee.model.parameters()))
    hook = parameter.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(step.NonFinite) as error:
        _do(trainee, _batch())
    hook.remove()
    assert math.isfinite(error.value.seen.loss.item())
    assert _equal(before, _snapshot(trainee))


def test_where_reading_a_number_would_wait_the_weights_freeze_at_the_first_bad_step(
    small: Callable[..., TrainConfig],
) -> None:
    """The way of CUDA, with the fused optimizer of the CPU: both skip their update while the flag is up."""
    trainee = _trainee(small("neuclip", batch_size=8, m=12))
    guard = step.Guard(CPU, trainee.optimizer, raises_at_once=False)
    for number in range(2):
        step.train_step(trainee, _batch(seed=number), guard, number)
    guard.check()
    before = _snapshot(trainee)
    bad = _batch(seed=2)
    bad.images[3, 0, 0, 0] = float("nan")
    step.train_step(trainee, bad, guard, 2)
    step.train_step(trainee, _batch(seed=3), guard, 3)
    after = _snapshot(trainee)
    assert _equal(before["model"], after["model"])
    assert _equal(before["optimizer"], after["optimizer"])
    with pytest.raises(step.NonFinite) as error:
        guard.check()
    assert error.value.step == 2


@pytest.mark.parametrize("method", method_names())
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_every_precision_stays_finite_even_on_equal_pairs(
    small: Callable[..., TrainConfig], method: str, precision: str
) -> None:
    trainee = _trainee(small(method, batch_size=8, m=12))
    blank = Batch(torch.zeros(8, 3, 32, 32), _batch().tokens[:1].expand(8, -1), torch.arange(8))
    for batch in (_batch(), blank, _batch(seed=2)):
        seen = _do(trainee, batch, precision=precision)
        assert math.isfinite(seen.loss.item())
        for length in seen.lengths:
            assert (length - 1).abs().max().item() < 1e-5  # the loss sees unit rows in float32
    assert all(torch.isfinite(parameter).all() for parameter in trainee.model.parameters())


def test_bfloat16_is_used_by_the_encoders_and_not_by_what_follows() -> None:
    model, batch = build_model("small", WORDS, 32, seed=0), _batch()
    exact, rounded = step.encode(model, batch, "float32"), step.encode(model, batch, "bfloat16")
    for fine, coarse in zip(exact, rounded, strict=True):
        assert coarse.dtype == fine.dtype == torch.float32
        assert 1e-5 < (fine - coarse).abs().max().item() < 0.05


class TwoLayers(ImageTextModel):
    """A model whose float16 products take no time on a CPU."""

    def __init__(self) -> None:
        super().__init__("two layers", 8, 4)
        with torch.random.fork_rng():
            torch.default_generator.manual_seed(0)
            self.image, self.text = torch.nn.Linear(48, 8), torch.nn.Embedding(32, 8)

    def tokenize(self, texts: list[str]) -> torch.Tensor:
        raise NotImplementedError

    def image_features(self, images: torch.Tensor) -> torch.Tensor:
        return self.image(images.flatten(1))

    def text_features(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.text(tokens).sum(1)

    def description(self) -> dict:
        raise NotImplementedError


def _light(config: TrainConfig) -> tuple[step.Trainee, Callable[[int], Batch]]:
    trainee = build.build_trainee(config, TwoLayers(), CPU, Samples(n=64, steps_per_epoch=2))
    set_learning_rates(trainee.optimizer, step=10, steps=20, warmup=0)

    def batch(seed: int) -> Batch:
        g = torch.Generator().manual_seed(seed)
        images, tokens = torch.randn(8, 3, 4, 4, generator=g), torch.randint(32, (8, 3), generator=g)
        return Batch(images, tokens, torch.randperm(64, generator=g)[:8])

    return trainee, batch


@pytest.mark.parametrize("method", method_names())
@pytest.mark.parametrize("at_once", [True, False])
def test_a_float16_overflow_skips_the_step_and_leaves_every_state_consistent(
    small: Callable[..., TrainConfig], method: str, at_once: bool
) -> None:
    """Step 2 overflows by force: weights, optimizer and temperatures stay to the bit, the scale halves, all goes on."""
    learned = get_method(method).tau == "free"
    config = small(method, batch_size=8, m=12, precision="float16", shadows=(), **{"temperature.learned": learned})
    trainee, batch = _light(config)
    guard = step.Guard(CPU, trainee.optimizer, raises_at_once=at_once)
    trainee.scale.scale.fill_(64.0)
    for number in range(2):
        assert not step.train_step(trainee, batch(number), guard, number, "float16").overflowed
    before, scale = _snapshot(trainee), trainee.scale.scale.item()
    trainee.scale.scale.fill_(3e38)  # any gradient times this is infinite in float32
    seen = step.train_step(trainee, batch(2), guard, 2, "float16")
    assert seen.overflowed and math.isfinite(seen.loss.item())
    after = _snapshot(trainee)
    for part in ("model", "optimizer", "temperature", "learned"):
        assert _equal(before[part], after[part]), part
    assert trainee.scale.scale.item() == pytest.approx(1.5e38)
    # The normalizer has seen the batch: what it then holds is what a step without overflow would have made of it.
    twin, _ = _light(config)
    twin.model.load_state_dict(before["model"])
    twin.load_state({key: value for key, value in before.items() if key != "model"})
    step.train_step(twin, batch(2), step.Guard(CPU, twin.optimizer), 2, "float16")
    assert _equal(after["normalizer"], _snapshot(twin)["normalizer"])
    trainee.scale.scale.fill_(scale)
    for number in (3, 4):
        seen = step.train_step(trainee, batch(number), guard, number, "float16")
        assert not seen.overflowed and math.isfinite(seen.loss.item())
    guard.check()
    assert not _equal(before["model"], trainee.model.state_dict())


def test_a_gradient_that_is_not_finite_at_the_least_scale_is_a_failure(small: Callable[..., TrainConfig]) -> None:
    trainee, batch = _light(small("openclip", batch_size=8, precision="float16"))
    hook = trainee.model.image.weight.register_hook(lambda gradient: gradient * float("inf"))
    guard = step.Guard(CPU, trainee.optimizer)
    skipped = 0
    with pytest.raises(step.NonFinite):
        for number in range(40):
            skipped += bool(step.train_step(trainee, batch(number), guard, number, "float16").overflowed)
    hook.remove()
    assert skipped == 17  # from 2^16 down to 1


def test_the_float16_scale_grows_back_and_travels_with_the_state(small: Callable[..., TrainConfig]) -> None:
    scale = LossScale("float16", CPU, start=8.0, grow_after=3)
    seen = []
    for overflowed in (False, False, False, True, False, False, False, False):
        scale.after(torch.tensor(overflowed))
        seen.append(scale.scale.item())
    assert seen == [8, 8, 16, 8, 8, 8, 16, 16]
    other = LossScale("float16", CPU)
    other.load_state_dict(scale.state_dict())
    assert (other.scale.item(), other.steps.item()) == (16, 1)
    gradients = [torch.full((2,), 32.0)]
    other.unscale(gradients)
    assert gradients[0].tolist() == [2, 2]
    plain = LossScale("bfloat16", CPU)
    assert plain.scaled(torch.tensor(3.0)).item() == 3.0


def test_one_process_gathers_its_own_batch_detached() -> None:
    e = torch.nn.functional.normalize(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), dim=1)
    batch = gather(e.clone().requires_grad_(), e, torch.arange(4))
    assert isinstance(batch, GlobalBatch)
    assert torch.equal(batch.e1, e)
    assert not batch.e1.requires_grad


def test_stale_variables_of_a_launcher_are_a_clear_error_and_one_process_is_fine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert wanted_processes() == 1
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE=8, RANK=3.*lacks LOCAL_RANK.*unset WORLD_SIZE RANK"):
        wanted_processes()
    monkeypatch.setenv("RANK", "9")
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(RuntimeError, match=r"RANK=9"):
        wanted_processes()


def test_whole_sets_of_stale_variables_end_with_advice_and_do_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    stale = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617"}
    for name, value in stale.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("neuclip_lib.training.distributed.MEETING_SECONDS", 1)
    with pytest.raises(RuntimeError, match=r"did not come within 1 s.*unset WORLD_SIZE"), process_group(CPU):
        pass
