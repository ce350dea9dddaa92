"""A small course of one phase, for the tests of this folder."""

from tests.toys import runtime_folder, toys

__all__ = ["runtime_folder", "toys"]
