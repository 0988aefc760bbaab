"""Zero-shot classification: open_clip's classifier, exact texts, permutations, ties, NaN and few classes."""

from __future__ import annotations

import hashlib
import math

import open_clip
import pytest
import torch
from torch import Tensor, nn

from neuclip_lib.data.spec import ZeroShotTask
from neuclip_lib.evaluation.zero_shot import zero_shot, zero_shot_classifier, zero_shot_scores


class Fake(nn.Module):
    """A fixed random direction for every text; an image points to the text its first byte numbers."""

    image_size = 2
    dim = 24

    def __init__(self, texts: list[str] | None = None, noise: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.pointed, self.noise = texts or [], noise
        self.fed: list[str] = []

    def direction(self, text: str) -> Tensor:
        seed = int(hashlib.md5(text.encode()).hexdigest()[:8], 16)
        return nn.functional.normalize(torch.randn(self.dim, generator=torch.Generator().manual_seed(seed)), dim=0)

    def tokenize(self, texts: list[str]) -> Tensor:
        self.fed += texts
        return torch.tensor([int(hashlib.md5(t.encode()).hexdigest()[:8], 16) for t in texts])

    def encode_text(self, tokens: Tensor, normalize: bool = True) -> Tensor:
        rows = [torch.randn(self.dim, generator=torch.Generator().manual_seed(int(seed))) for seed in tokens]
        return nn.functional.normalize(torch.stack(rows), dim=1)

    def encode_image(self, images: Tensor) -> Tensor:
        which = ((images[:, 0, 0, 0] + 1) * 127.5).round().long().tolist()
        rows = torch.stack([self.direction(self.pointed[k]) for k in which])
        drift = torch.randn(rows.shape, generator=torch.Generator().manual_seed(1)) * self.noise
        return nn.functional.normalize(rows + drift, dim=1)


CLASSES = ["cup", "{1} cup", "red {}", "fir & oak", "cup of tea", "{name}"]
TEMPLATES = ["a photo of {}", "{}", "one {} here"]


def task(classes: list[str], labels: list[int], templates: list[str] = TEMPLATES, pointed: list[int] | None = None):
    first = torch.tensor(labels if pointed is None else pointed, dtype=torch.uint8)
    images = first[:, None, None, None].expand(-1, 3, 2, 2).contiguous()
    return ZeroShotTask("fake", images, torch.tensor(labels), list(classes), templates)


def test_classifier_equals_open_clip() -> None:
    model, it = Fake(), task(CLASSES, [0])
    got = zero_shot_classifier(model, it, batch_size=4)
    templates = [lambda c, t=t: t.replace("{}", c) for t in TEMPLATES]
    want = open_clip.build_zero_shot_classifier(Fake(), Fake().tokenize, CLASSES, templates, use_tqdm=False)
    torch.testing.assert_close(got, want.T, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(got.norm(dim=1), torch.ones(len(CLASSES)))


def test_the_texts_fed_are_the_templates_with_the_names_and_are_recorded() -> None:
    model = Fake(["a photo of cup"])
    got = zero_shot(model, task(CLASSES, [0]))
    assert model.fed == [
        *["a photo of cup", "a photo of {1} cup", "a photo of red {}", "a photo of fir & oak"],
        *["a photo of cup of tea", "a photo of {name}"],
        *CLASSES,
        *["one cup here", "one {1} cup here", "one red {} here", "one fir & oak here", "one cup of tea here"],
        "one {name} here",
    ]
    assert (got["classes"], got["templates"]) == (CLASSES, TEMPLATES)


def test_permuting_classes_and_labels_together_changes_nothing() -> None:
    labels = [i % 6 for i in range(240)]
    model = Fake([f"a photo of {c}" for c in CLASSES], noise=0.25)
    before = zero_shot(model, task(CLASSES, labels))
    assert 60 < before["top1"] < 100
    order = [4, 2, 0, 5, 1, 3]  # no class stays in its place
    place = [order.index(k) for k in range(6)]
    permuted = [CLASSES[k] for k in order]
    after = zero_shot(model, task(permuted, [place[k] for k in labels], pointed=labels))
    same = before.keys() - {"classes", "mean_per_class_recall"}
    assert {key: after[key] for key in same} == {key: before[key] for key in same}
    assert after["mean_per_class_recall"] == pytest.approx(before["mean_per_class_recall"], rel=1e-12)
    one_only = zero_shot(model, task(permuted, labels))
    assert one_only["top1"] < 15  # below chance: the classes were recognised, and named wrongly


def test_accuracies_equal_a_loop() -> None:
    g = torch.Generator().manual_seed(2)
    features = torch.randint(-2, 3, (90, 4), generator=g).float()  # whole numbers: many ties
    classifier = torch.randint(-2, 3, (7, 4), generator=g).float()
    labels = torch.randint(0, 6, (90,), generator=g)  # class 6 has no image
    ranks = []
    for row, label in zip((features @ classifier.T).tolist(), labels.tolist(), strict=True):
        ranks.append(1 + sum(1 for k, s in enumerate(row) if k != label and s >= row[label]))
    per_class = [[r for r, y in zip(ranks, labels.tolist(), strict=True) if y == k] for k in range(6)]
    got = zero_shot_scores(features, classifier, labels)
    assert got["top1"] == pytest.approx(100 * sum(r == 1 for r in ranks) / 90)
    assert got["top5"] == pytest.approx(100 * sum(r <= 5 for r in ranks) / 90)
    recalls = [sum(r == 1 for r in some) / len(some) for some in per_class]
    assert got["mean_per_class_recall"] == pytest.approx(100 * sum(recalls) / 6)
    assert got["majority"] == pytest.approx(100 * max(map(len, per_class)) / 90)
    assert (got["chance"], got["chance_top5"]) == (pytest.approx(100 / 7), pytest.approx(500 / 7))
    assert (got["n"], got["num_classes"], got["classes_with_images"], got["nan"]) == (90, 7, 6, 0)


@pytest.mark.parametrize(("classes", "top5"), [(2, None), (3, None), (4, None), (5, 100)])
def test_top5_of_few_classes_is_not_available(classes: int, top5: float | None) -> None:
    features = torch.eye(classes).repeat(2, 1)
    got = zero_shot_scores(features, torch.eye(classes), torch.arange(classes).repeat(2))
    assert (got["top1"], got["top5"]) == (100, top5)
    assert got["chance_top5"] == top5


def test_constant_features_and_nan_are_misses() -> None:
    labels = torch.arange(6) % 3
    flat = zero_shot_scores(torch.ones(6, 4), torch.ones(3, 4), labels)
    assert (flat["top1"], flat["mean_per_class_recall"], flat["nan"]) == (0, 0, 0)
    features = torch.eye(3).repeat(2, 1)
    features[4] = math.nan
    got = zero_shot_scores(features, torch.eye(3), labels)
    assert (got["top1"], got["nan"]) == (pytest.approx(500 / 6), 1)
    classifier = torch.eye(3)
    classifier[1, 1] = math.nan
    assert zero_shot_scores(torch.eye(3), classifier, torch.arange(3))["nan"] == 3


def test_bad_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'a photo' must hold \{\}"):
        task(CLASSES, [0], ["a photo"])
    with pytest.raises(ValueError, match="no template"):
        task(CLASSES, [0], [])
    with pytest.raises(ValueError, match="labels must lie in"):
        task(["cup"], [1])
    with pytest.raises(ValueError, match="more than one class named 'cup'"):
        zero_shot(Fake(["cup"]), task(["cup", "pot", "cup"], [0]))
    with pytest.raises(ValueError, match="labels must be from 0 to 1; 1 are not, such as 2"):
        zero_shot_scores(torch.eye(2), torch.eye(2), torch.tensor([0, 2]))
