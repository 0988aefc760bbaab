"""Zero-shot classification: the class whose text is nearest, in open_clip's form (templates averaged per class)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from neuclip_lib.evaluation.embed import embed_images, embed_texts
from neuclip_lib.evaluation.ranks import ranks

if TYPE_CHECKING:
    from neuclip_lib.data.spec import ZeroShotTask
    from neuclip_lib.models import ImageTextModel


def zero_shot(
    model: ImageTextModel, task: ZeroShotTask, batch_size: int = 256, device: torch.device | str | None = None
) -> dict[str, Any]:
    """Accuracy in percent of one task, with the class names and templates that were used.

    Args:
        model: gives unit rows.
        task: n images, their labels, C class names and the templates around them.
        batch_size: images or texts at a time.
        device: where the model is; read from its parameters when not given.

    Raises:
        ValueError: for a task without images, or two classes of the same name (no text can tell them apart).
    """
    classifier = zero_shot_classifier(model, task, batch_size, device)
    features = embed_images(model, task.images, batch_size, device)
    result = zero_shot_scores(features, classifier, task.labels)
    return {**result, "classes": list(task.classes), "templates": list(task.templates)}


def zero_shot_classifier(
    model: ImageTextModel, task: ZeroShotTask, batch_size: int = 256, device: torch.device | str | None = None
) -> Tensor:
    """One unit row a class [C, d]: the mean of its normalised template embeddings, normalised.

    The texts fed are ``task.texts(template)``, every template with every class name.

    Raises:
        ValueError: for two classes of the same name.
    """
    twice = [name for name, count in Counter(task.classes).items() if count > 1]
    if twice:
        raise ValueError(f"task {task.name!r} has more than one class named {twice[0]!r}; give each its own name")
    per_template = [embed_texts(model, task.texts(template), batch_size, device) for template in task.templates]
    return normalize(torch.stack([normalize(e, dim=1) for e in per_template]).mean(0), dim=1)


def zero_shot_scores(features: Tensor, classifier: Tensor, labels: Tensor) -> dict[str, Any]:
    """Accuracies in percent; a tie between classes counts against, an image with a NaN score is a miss and is counted.

    Args:
        features: [n, d] image embeddings, unit rows.
        classifier: [C, d] unit rows.
        labels: [n] integers from 0 to C - 1.

    Returns:
        ``top1``; ``top5`` (None, not available, with fewer than 5 classes); ``mean_per_class_recall`` over the classes
        that have images; ``chance`` and ``chance_top5`` of a random order; ``majority``, the share of the largest
        class, which guessing that class always would reach; ``n``, ``num_classes``, ``classes_with_images``, ``nan``.

    Raises:
        ValueError: on shapes that do not fit or a label outside 0..C-1.
    """
    outside = labels[(labels < 0) | (labels >= len(classifier))]
    if len(outside):
        raise ValueError(
            f"labels must be from 0 to {len(classifier) - 1}; {len(outside)} are not, such as {outside[0]}"
        )
    result = ranks(features, classifier, labels, torch.arange(len(classifier)))
    hit, labels = (result.rank == 1).double().cpu(), labels.cpu()
    size = torch.bincount(labels, minlength=len(classifier))
    recall = torch.bincount(labels, weights=hit, minlength=len(classifier))[size > 0] / size[size > 0]
    return {
        "top1": result.recall(1),
        "top5": result.recall(5),
        "mean_per_class_recall": 100 * float(recall.mean()),
        "n": len(labels),
        "chance": result.chance(1),
        "chance_top5": result.chance(5),
        "majority": 100 * int(size.max()) / len(labels),
        "num_classes": len(classifier),
        "classes_with_images": len(recall),
        "nan": result.nan,
    }
