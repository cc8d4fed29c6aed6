"""The tiny models and data sets of the benchmark tests."""

from tests.helpers.bench_fixtures import data, models

__all__ = ["data", "models"]
