"""Fingerprints are equal where the values are, and differ with any of them."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from jetspec.fingerprint import fingerprint, weights_fingerprint

VALUES = [(), (1,), ("1",), (1, 2), ([1, 2],), ("12",), (b"\x01",), ("a", None), ({"a": 1, "b": 2},), (True,), (1.5,)]


def test_other_values_have_other_fingerprints() -> None:
    assert all(fingerprint(*a) != fingerprint(*b) for a, b in itertools.combinations(VALUES, 2))
    assert all(len(fingerprint(*value)) == 32 for value in VALUES)


def test_equal_values_have_equal_fingerprints() -> None:
    assert fingerprint({"b": 2, "a": (1,)}) == fingerprint({"a": [1], "b": 2})
    assert fingerprint(1, "x") == "84894334a33485e239e85f4d0c3a0d71"  # on every machine: stored answers bear it


def test_a_module_is_told_by_every_weight_its_name_and_its_shape() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    known = weights_fingerprint(module)
    assert weights_fingerprint(copy.deepcopy(module)) == known
    for name, _ in module.named_parameters():
        other = copy.deepcopy(module)
        with torch.no_grad():
            other.get_parameter(name).flatten()[-1].add_(1)
        assert weights_fingerprint(other) != known, name
    assert weights_fingerprint(torch.nn.ModuleDict({"a": module})) != known
    assert weights_fingerprint(module.half()) != known


def test_what_has_no_fingerprint_is_refused() -> None:
    with pytest.raises(TypeError):
        fingerprint(object())
