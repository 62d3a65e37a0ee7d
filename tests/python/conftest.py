import sys
from pathlib import Path

import numpy as np
import pytest

import twostep

sys.path.append(str(Path(__file__).parents[2] / "integrations" / "vllm"))


@pytest.fixture
def random():
    return np.random.default_rng(7)


@pytest.fixture
def refuses():
    """refuses(code): the block must raise twostep.Error with this code."""

    class Refusal:
        def __init__(self, code):
            self.code = code

        def __enter__(self):
            return self

        def __exit__(self, kind, error, trace):
            assert kind is not None and issubclass(kind, twostep.Error), f"{self.code} was to be raised, not {kind}"
            assert error.code == self.code, str(error)
            self.error = error
            return True

    return Refusal
