"""Models: unit rows that depend on their own sample only, vocabularies, saving and loading, export to open_clip."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from neuclip_lib.devices import pick_device
from neuclip_lib.models import (
    ImageTextModel,
    build_model,
    check_model_name,
    model_names,
    unit_rows,
    unwrap,
)
from neuclip_lib.models.small import StandardizedConv, TextTower
from neuclip_lib.models.words import WordTokenizer, words_of

TEXTS = ["a red circle", "two blue squares left of a red star", "account box outline"]
ASKED = ["red star", "", "zebra crossing", "a red circle " * 40, "squares BLUE, two!"]
OWN, TINY = ("small", "nano", "micro", "mini"), ("nano", "micro", "mini")
REAL = "ViT-S-32-alt"  # the smallest plain name of open_clip


def build(name: str, seed: int = 0) -> ImageTextModel:
    return build_model(name, TEXTS, 32, seed)


def images(n: int, size: int = 32, seed: int = 0) -> Tensor:
    return torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def equal_weights(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.fixture(scope="module")
def real() -> ImageTextModel:
    return build_model(REAL, [], None, seed=0)


# Embeddings


@pytest.mark.parametrize("name", OWN)
def test_rows_have_length_one(name: str) -> None:
    model = build(name)
    e1, e2 = model(images(5), model.tokenize(ASKED))
    assert e1.shape == e2.shape == (5, model.dim)
    assert (torch.cat([e1, e2]).double().norm(dim=1) - 1).abs().max() < 1e-6


@pytest.mark.parametrize("name", OWN)
def test_nothing_in_gives_finite_values_and_gradients_everywhere(name: str) -> None:
    model = build(name)
    e1, e2 = model(torch.zeros(2, 3, 32, 32), model.tokenize(["", "..."]))
    (e1[:, 0] + 2 * e2[:, 1]).sum().backward()
    trainable = {key: value for key, value in model.named_parameters() if value.requires_grad}
    assert torch.isfinite(e1).all() and torch.isfinite(e2).all()
    # A trainable parameter outside the graph would stop DistributedDataParallel.
    assert [key for key, value in trainable.items() if value.grad is None] == []
    assert [key for key, value in trainable.items() if value.grad is not None and not value.grad.isfinite().all()] == []


def test_unit_rows_of_tiny_and_zero_rows() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [3e-8, 4e-8], [3e30, 4e30]], dtype=torch.float64, requires_grad=True)
    y = unit_rows(x)
    torch.testing.assert_close(y[:3].tolist(), [[0.6, 0.8], [0.0, 0.0], [3e-2, 4e-2]], atol=1e-12, rtol=0)
    y.sum().backward()
    assert x.grad is not None and torch.isfinite(x.grad).all()
    # d/dx of (x + y) / |(x, y)| at (3, 4): (y^2 - x y) / |.|^3 = 4 / 125
    assert x.grad[0, 0].item() == pytest.approx(4 / 125, abs=1e-12)
    assert unit_rows(torch.ones(1, 2, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("name", OWN)
def test_a_row_does_not_depend_on_the_others(name: str) -> None:
    model = build(name).train()
    x, tokens = images(6), model.tokenize([*ASKED, "a star"])
    with torch.no_grad():
        together = torch.cat(model(x, tokens))
        alone = [model(x[i : i + 1], tokens[i : i + 1]) for i in range(6)]
        loud = torch.cat(model(torch.cat([x[:1], 100 * x[1:]]), tokens))
    assert (together - torch.cat([torch.cat(side) for side in zip(*alone, strict=True)])).abs().max() < 1e-6
    assert (together[0] - loud[0]).abs().max() < 1e-6


@pytest.mark.parametrize("name", OWN)
def test_no_batch_statistics(name: str) -> None:
    model = build(name)
    assert not [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm | nn.SyncBatchNorm)]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.train()(images(4), model.tokenize(["red"] * 4))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    # The check sees one when it is there.
    assert [m for m in nn.Sequential(nn.BatchNorm2d(3)).modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


def test_another_image_size_is_refused_by_the_model() -> None:
    with pytest.raises(ValueError, match=r"\[b, 3, 32, 32\], got \[2, 3, 16, 16\]"):
        build("small").encode_image(images(2, 16))


# Parts of small


def test_a_standardized_convolution_equals_a_loop_over_filters() -> None:
    conv = StandardizedConv(3, 5, stride=2).double()
    x = images(2, 8).double()
    want = []
    for weight in conv.weight.detach().numpy():
        weight = weight - weight.mean()
        weight = torch.from_numpy(weight / np.sqrt((weight**2).sum()))
        padded = nn.functional.pad(x, (1, 1, 1, 1))
        rows = [
            [(padded[:, :, i : i + 3, j : j + 3] * weight).sum((1, 2, 3)) for j in range(0, 8, 2)]
            for i in range(0, 8, 2)
        ]
        want.append(torch.stack([torch.stack(row, -1) for row in rows], -2))
    assert (conv(x) - torch.stack(want, 1)).abs().max() < 1e-6
    before = conv(x)
    with torch.no_grad():
        conv.weight.mul_(3.0).add_(0.7)  # neither scale nor mean of a filter matters
    assert (conv(x) - before).abs().max() < 1e-6


def test_the_text_tower_takes_the_mean_of_the_words_there_are() -> None:
    tower = TextTower(6, 4).double()
    tokens = torch.tensor([[2, 5, 3, 0, 0], [4, 0, 0, 0, 0], [0, 0, 0, 0, 0], [3, 2, 5, 0, 0], [1, 0, 0, 0, 0]])
    table = tower.embedding.weight.detach()
    means = [(table[2] + table[5] + table[3]) / 3, table[4], torch.zeros(128).double()]
    want = [tower.head(torch.relu(tower.hidden(mean))) for mean in means]
    got = tower(tokens)
    assert (got[:3] - torch.stack(want)).abs().max() < 1e-12
    assert (got[3] - got[0]).abs().max() < 1e-12, "the order of words must not matter"
    assert torch.equal(got[4], got[2]), "an untrained unknown word says nothing"


def test_words_and_ids_go_round() -> None:
    tokenizer = WordTokenizer.from_texts(iter(["b a b", "c b a"]))
    assert tokenizer.words == ["b", "a", "c"], "most frequent first"
    tokens = tokenizer(["c a b", "b zebra", "", "a " * 20])
    assert tokens.tolist()[:3] == [[4, 3, 2, 0, 0, 0, 0, 0], [2, 1, 0, 0, 0, 0, 0, 0], [0] * 8]
    assert tokens[3].tolist() == [3] * 8
    back = [" ".join(["", "?", *tokenizer.words][i] for i in row if i) for row in tokens[:2].tolist()]
    assert back == ["c a b", "b ?"]
    assert WordTokenizer.from_texts(["c b a", "b a b"]).words == tokenizer.words, "the order of texts must not matter"
    assert WordTokenizer.from_texts(["x " * 30]).length == 30
    assert WordTokenizer.from_texts(["x " * 300]).length == 64
    assert words_of("A Café-bar: ΣΟΦΟΣ, 3×4 ｆｕｌｌ") == ["a", "café", "bar", "σοφοσ", "3", "4", "full"]
    for texts in ([], ["", "!!"]):
        with pytest.raises(ValueError, match="no word"):
            WordTokenizer.from_texts(texts)


# Weights


@pytest.mark.parametrize("name", OWN)
def test_weights_depend_on_the_seed_alone(name: str) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = build(name, seed=7)
    assert torch.equal(torch.get_rng_state(), state), "the global state must stay"
    torch.manual_seed(2)
    torch.rand(3)
    assert equal_weights(first, build(name, seed=7))
    assert not equal_weights(first, build(name, seed=8))


def convolutions() -> int:
    """Weights of small's image tower, counted from the table of its layers."""
    layers = [(12, 32), (32, 64), (64, 64), (64, 128), (128, 128), (128, 160), (160, 160)]
    return sum(9 * inputs * outputs + 2 * outputs for inputs, outputs in layers) + 4 * 160 * 128 + 128


def transformer(width: int, layers: int) -> int:
    """Attention (4 w^2 + 4 w), perceptron (8 w^2 + 5 w) and two norms (4 w) a layer."""
    return layers * (12 * width**2 + 13 * width)


def clip_without_words(width: int, patch: int, layers: tuple[int, int], context: int, dim: int) -> int:
    places = (32 // patch) ** 2 + 1
    image = 3 * patch**2 * width + width + places * width + 4 * width + transformer(width, layers[0]) + width * dim
    return image + context * width + transformer(width, layers[1]) + 2 * width + width * dim + 1


def test_numbers_of_parameters() -> None:
    def count(model: nn.Module) -> int:
        return sum(value.numel() for value in model.parameters())

    small = build("small")
    assert count(small.image) == convolutions() == 778_176  # type: ignore[arg-type]
    words = len({word for text in TEXTS for word in words_of(text)}) + 2
    assert count(small) == 778_176 + 128 * words + 128 * 256 + 256 + 256 * 128 + 128
    without = {
        "nano": clip_without_words(64, 8, (2, 2), 16, 64),
        "micro": clip_without_words(128, 4, (4, 3), 16, 64),
        "mini": clip_without_words(192, 4, (6, 4), 32, 128),
    }
    assert without == {"nano": 222_977, "micro": 1_421_697, "mini": 4_526_977}
    known = {token for text in TEXTS for token in open_clip.tokenize(text)[0].tolist()} | {0}
    for name in TINY:
        width = {"nano": 64, "micro": 128, "mini": 192}[name]
        assert count(build(name)) == without[name] + width * (len(known) + 1)
    assert count(build_model("nano", [], 32, 0)) == without["nano"] + 64 * 49408 == 3_385_089


# Names, sizes, devices


def test_names_and_their_errors() -> None:
    names = model_names()
    assert names[:4] == list(OWN)
    assert set(names[4:]) == set(open_clip.list_models())
    check_model_name("ViT-B/32")
    for wrong, close in (("ViT-B-33", "ViT-B-32"), ("nanno", "nano"), ("", "none")):
        with pytest.raises(ValueError, match=f"unknown model '{wrong}'.*{close}.*small, nano, micro, mini"):
            check_model_name(wrong)
        with pytest.raises(ValueError, match="unknown model"):
            build_model(wrong, TEXTS, 32, 0)


def test_sizes_that_do_not_fit_are_refused_before_building(real: ImageTextModel) -> None:
    assert (real.image_size, real.dim) == (224, 256)
    for name, size, said in (("small", 33, "33"), ("nano", 36, "patches of 8"), ("micro", 2, "4"), (REAL, 32, "224")):
        with pytest.raises(ValueError, match=said):
            build_model(name, TEXTS, size, 0)
    assert build_model("nano", TEXTS, 64, 0).encode_image(images(1, 64)).shape == (1, 64)
    assert build_model("small", TEXTS, 64, 0).encode_image(images(1, 64)).shape == (1, 128)


def test_weights_from_a_file_are_for_open_clip_names_only(real: ImageTextModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no pretrained weights for model 'small'"):
        build_model("small", TEXTS, 32, 0, pretrained="x.pt")
    with pytest.raises(RuntimeError, match=r"absent\.pt is missing"):
        build_model(REAL, [], None, 0, pretrained=tmp_path / "absent.pt")
    (tmp_path / "bad.pt").write_bytes(b"not weights")
    with pytest.raises(RuntimeError, match=r"bad\.pt could not be loaded"):
        build_model(REAL, [], None, 0, pretrained=tmp_path / "bad.pt")
    save_file(unwrap(real).clip.state_dict(), tmp_path / "good.safetensors")  # type: ignore[union-attr]
    assert equal_weights(build_model(REAL, [], None, 1, pretrained=tmp_path / "good.safetensors"), real)


def test_building_an_open_clip_name_leaves_logging_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])  # as in a fresh process, where the first warning installs one
    before = (root.level, root.manager.disable)
    build_model(REAL, [], None, 0)
    assert (root.handlers, root.level, root.manager.disable) == ([], *before)


def test_open_clip_names_get_their_own_normalisation(real: ImageTextModel) -> None:
    x = images(2, 224)
    mean, std = (
        torch.tensor(v).reshape(3, 1, 1) for v in (open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD)
    )
    with torch.no_grad():
        want = real.clip.encode_image(((x + 1) / 2 - mean) / std, normalize=True)  # type: ignore[union-attr, operator]
        assert (real.encode_image(x) - want).abs().max() < 1e-6


def test_devices() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for absent in ("cuda:99", "tpu", "", "CPU", *([] if torch.backends.mps.is_available() else ["mps"])):
        with pytest.raises(ValueError, match=f"no device '{absent}'.*cpu"):
            pick_device(absent)


# Text that is too long


@pytest.mark.parametrize("name", [*TINY, REAL])
@pytest.mark.parametrize("count", [1, 14, 15, 30, 31, 75, 76, 77, 78, 300])
def test_the_last_kept_token_is_the_end_token(name: str, count: int, real: ImageTextModel) -> None:
    model = real if name == REAL else build(name)
    context = {"nano": 16, "micro": 16, "mini": 32, REAL: 77}[name]
    tokens = model.tokenize(["star " * count])
    kept = tokens[0, : min(count + 2, context)].tolist()
    assert tokens.shape == (1, context)
    assert kept[0] == 49406 and kept[-1] == 49407 and 49407 not in kept[:-1]
    assert tokens[0, len(kept) :].tolist() == [0] * (context - len(kept))
    by_hand = model.tokenize(["star " * min(count, context - 2)])
    with torch.no_grad():
        assert (model.encode_text(tokens) - model.encode_text(by_hand)).abs().max() < 1e-6
