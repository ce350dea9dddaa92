"""The errors that the course, its grading of classes and its command line raise on purpose."""

from __future__ import annotations

from minicache.errors import MinicacheError


class LanguageError(MinicacheError):
    """The command line does not speak this language."""


class CourseError(MinicacheError):
    """The course's table, files or a learner's request do not fit together."""


class TamperingError(CourseError):
    """A submission tampers with its grader, so its points are unknown."""
