"""A tiny target and head in a directory."""

from tests.cli.conftest import folder  # noqa: F401  a fixture
