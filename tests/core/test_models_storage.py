"""Models on disk: saved and loaded to the bit, whatever wraps them; what does not fit is refused; open_clip folders."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from neuclip_lib.models import (
    ImageTextModel,
    build_model,
    export_open_clip,
    load_model,
    load_weights,
    rebuild,
    save_model,
    unwrap,
)

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


# Saving and loading


@pytest.mark.parametrize("name", OWN)
def test_a_saved_model_comes_back_to_the_bit(name: str, tmp_path: Path) -> None:
    model = build(name, seed=3)
    save_model(model, tmp_path / "model")
    again = load_model(tmp_path / "model")
    assert type(again) is type(model) and equal_weights(again, model)
    assert again.description() == model.description() == json.loads(json.dumps(model.description()))
    assert torch.equal(again.tokenize(ASKED), model.tokenize(ASKED))
    with torch.no_grad():
        mine, theirs = (m(images(5), m.tokenize(ASKED)) for m in (model, again))
    assert torch.equal(torch.cat(mine), torch.cat(theirs))
    assert sorted(file.name for file in (tmp_path / "model").iterdir()) == ["model.json", "model.safetensors"]


def test_an_open_clip_name_comes_back_too(real: ImageTextModel, tmp_path: Path) -> None:
    assert equal_weights(load_model(save_model(real, tmp_path)), real)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One process that is a group, so that DistributedDataParallel can wrap."""
    file = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


WRAPS = ("plain", "compiled", "ddp", "compiled ddp", "ddp compiled")


def wrap(model: nn.Module, how: str) -> nn.Module:
    for part in reversed(how.split()):
        if part == "compiled":
            model = torch.compile(model)  # type: ignore[assignment]
        elif part == "ddp":
            model = DistributedDataParallel(model)
    return model


@pytest.mark.parametrize("source", WRAPS)
@pytest.mark.parametrize("target", WRAPS)
def test_wrapped_weights_load_into_any_other_wrap(source: str, target: str, group: None, tmp_path: Path) -> None:
    model = build("nano", seed=1)
    wrapped = wrap(model, source)
    assert unwrap(wrapped) is model
    fresh = build("nano", seed=2)
    assert not equal_weights(fresh, model)
    load_weights(wrap(fresh, target), wrapped.state_dict(), "test")
    assert equal_weights(fresh, model)
    # As files: ours, and one that holds the prefixes.
    assert equal_weights(load_model(save_model(wrapped, tmp_path)), model)
    save_file(wrapped.state_dict(), tmp_path / "model.safetensors")
    prefixed = source != "plain"
    assert any("_orig_mod." in key or "module." in key for key in load_file(tmp_path / "model.safetensors")) == prefixed
    assert equal_weights(load_model(tmp_path), model)


def test_only_models_are_saved(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="got Linear"):
        save_model(nn.Linear(2, 2), tmp_path)


def renamed(state: dict[str, Tensor], key: str) -> dict[str, Tensor]:
    return {("text.other" if name == key else name): value for name, value in state.items()}


@pytest.mark.parametrize("change", ["missing", "unknown", "renamed", "shape", "type", "twice"])
def test_weights_that_do_not_fit_are_refused_by_key(change: str, tmp_path: Path) -> None:
    key = "text.head.weight"
    save_model(build("small"), tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    changed, said = {
        "missing": ({k: v for k, v in state.items() if k != key}, f"missing: {key}"),
        "unknown": (state | {"text.extra": torch.ones(1)}, "unknown: text.extra"),
        "renamed": (renamed(state, key), f"missing: {key}; unknown: text.other"),
        "shape": (state | {key: state[key].T.contiguous()}, rf"{key} is float32 \[256, 128\] instead of .*128, 256"),
        "type": (state | {key: state[key].half()}, f"{key} is float16"),
        "twice": (state | {f"module.{key}": state[key].clone()}, f"'{key}' stands twice"),
    }[change]
    save_file(changed, file)
    with pytest.raises(RuntimeError, match=said):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["model.json", "model.safetensors"])
@pytest.mark.parametrize("damage", ["halved", "emptied", "removed", "pickle"])
def test_a_damaged_file_is_named(name: str, damage: str, tmp_path: Path) -> None:
    save_model(build("nano"), tmp_path)
    file = tmp_path / name
    data = file.read_bytes()
    if damage == "removed":
        file.unlink()
    elif damage == "pickle":
        torch.save({"weights": torch.ones(1)}, file)
    else:
        file.write_bytes(data[: len(data) // 2] if damage == "halved" else b"")
    with pytest.raises(RuntimeError, match=name.replace(".", r"\.")):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "entries",
    [
        {"name": "os.system"},
        {"name": None},
        {"image_size": "32"},
        {"image_size": True},
        {"image_size": 33},
        {"dim": 64},
        {"vocabulary": "words"},
        {"vocabulary": ["a", 1]},
        {"vocabulary": ["a", "a"]},
        {"context_length": 0},
        {"context_length": None},
        {"extra": 1},
    ],
)
def test_a_description_is_checked_and_is_data_only(entries: dict[str, object], tmp_path: Path) -> None:
    model = build("small")
    description = model.description() | entries
    with pytest.raises(ValueError):
        rebuild(description)
    save_model(model, tmp_path)
    (tmp_path / "model.json").write_text(json.dumps({"format": 1, "model": description}))
    with pytest.raises(RuntimeError, match=r"model\.json"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "kept", [[0, 5, 49406], [0, 7, 5, 49406, 49407], [-1, 0, 49406, 49407], [0, 49406, 49407, 49408]]
)
def test_a_compact_vocabulary_is_checked(kept: list[int]) -> None:
    with pytest.raises(ValueError, match="rising list"):
        rebuild(build("nano").description() | {"vocabulary": kept})


# Export


@pytest.mark.parametrize("name", [*TINY, "nano whole", REAL])
def test_open_clip_loads_an_export_with_equal_embeddings(name: str, real: ImageTextModel, tmp_path: Path) -> None:
    model = {REAL: real, "nano whole": build_model("nano", [], 32, 1)}.get(name) or build(name, seed=1)
    folder = export_open_clip(model, tmp_path / "export", tau=0.05)
    theirs, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
    pixels = np.random.default_rng(0).integers(0, 256, (3, model.image_size, model.image_size, 3), dtype=np.uint8)
    ours = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
    prepared = torch.stack([preprocess(Image.fromarray(picture)) for picture in pixels])
    with torch.no_grad():
        assert (theirs.encode_image(prepared, normalize=True) - model.encode_image(ours)).abs().max() < 1e-5
        text = theirs.encode_text(tokenizer(ASKED), normalize=True)
        assert (text - model.encode_text(model.tokenize(ASKED))).abs().max() < 1e-6
    assert theirs.logit_scale.item() == pytest.approx(math.log(20), abs=1e-6)
    assert theirs.vocab_size == 49408


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'small' is not built from open_clip.*load_model"):
        export_open_clip(build("small"), tmp_path / "x")
    with pytest.raises(ValueError, match="tau must be above 0"):
        export_open_clip(build("nano"), tmp_path / "x", tau=0.0)
    assert not (tmp_path / "x").exists()
