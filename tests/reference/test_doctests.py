"""Every public function has an example, and every example of the reference runs."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["softmax", "problem", "attention", "backward", "traffic"])
def test_examples(name):
    module = importlib.import_module(f"reference.{name}")
    results = doctest.testmod(module)
    assert results.attempted and not results.failed


@pytest.mark.parametrize("name", ["softmax", "attention", "backward", "traffic"])
def test_public_functions_have_examples(name):
    module = importlib.import_module(f"reference.{name}")
    public = [f for key, f in vars(module).items()
              if key.endswith(("softmax", "attention", "_1", "_2", "_backward", "_traffic"))]
    assert public and all(">>>" in f.__doc__ for f in public)
