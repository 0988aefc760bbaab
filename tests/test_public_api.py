"""What a user may import from neuclip_lib: this list changes on purpose or not at all."""

import inspect
import pkgutil

import pytest

import neuclip_lib

PUBLIC = [
    "Run",
    "TrainConfig",
    "__version__",
    "evaluate",
    "load",
    "method_names",
    "open_clip_loss",
    "presets",
    "suggest_rho",
    "train",
]


def test_the_list_is_exactly_this() -> None:
    assert sorted(neuclip_lib.__all__) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_name_is_there_and_says_what_it_is(name: str) -> None:
    thing = getattr(neuclip_lib, name)
    assert name in dir(neuclip_lib)
    if name != "__version__":
        assert inspect.getdoc(thing), f"{name} has no docstring"


def test_no_function_has_the_name_of_a_module() -> None:
    modules = {module.name for module in pkgutil.iter_modules(neuclip_lib.__path__)}
    functions = {name for name in neuclip_lib.__all__ if callable(getattr(neuclip_lib, name))}
    assert functions & modules == set()


def test_an_unknown_name_is_refused_with_its_name() -> None:
    with pytest.raises(AttributeError, match="no_such_thing"):
        neuclip_lib.no_such_thing  # noqa: B018


def test_functions_say_the_types_they_take_and_give() -> None:
    for name in ("evaluate", "load", "method_names", "open_clip_loss", "suggest_rho", "train"):
        signature = inspect.signature(getattr(neuclip_lib, name))
        assert signature.return_annotation is not inspect.Signature.empty, name
        for parameter in signature.parameters.values():
            assert parameter.annotation is not inspect.Parameter.empty, f"{name}({parameter.name})"


def test_the_version_is_the_packages() -> None:
    from importlib.metadata import version

    assert neuclip_lib.__version__ == version("neuclip-course")
