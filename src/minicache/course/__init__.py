"""The course room: the table of phases, starters, the import finder, the pytest plugin, grading, classes.

Nothing here knows how a cache works. A phase is known by what `labs/course.toml` says about it.
"""
