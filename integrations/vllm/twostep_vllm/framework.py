"""What the plug-in calls of vLLM, found by name: all that can move is here and in the attributes that `need` asks for."""

import importlib
from importlib.metadata import PackageNotFoundError, version

TESTED = ("0.33.0",)


class Unserved(Exception):
    """One sentence: why something stays with vLLM."""


class Missing(Unserved):
    """A part of vLLM that is not where the tested releases have it."""


def find(module, name):
    """module.name of vLLM. Raises Missing."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        raise Missing(f"{module}.{name}") from None


def need(owner, *names):
    """The attributes of an object of vLLM; one alone as it is. Raises Missing, with the class and the attribute."""
    values = []
    for name in names:
        value = owner
        for part in name.split("."):
            if not hasattr(value, part):
                raise Missing(f"{type(owner).__name__}.{name}")
            value = getattr(value, part)
        values.append(value)
    return values[0] if len(values) == 1 else values


def release():
    """The installed vLLM, in words."""
    try:
        installed = version("vllm")
    except PackageNotFoundError:
        installed = "of no release"
    return f"vLLM {installed}" + ("" if installed in TESTED else f", not a tested release ({', '.join(TESTED)})")


def layers_of(model, name):
    """The modules of this class, or of one that derives from it: {name in the tree: module}."""
    return {path: layer for path, layer in model.named_modules() if any(c.__name__ == name for c in type(layer).__mro__)}


def captures(tensor):
    """Is the current stream recorded into a CUDA graph?"""
    import torch

    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
