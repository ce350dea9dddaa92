"""What grades a learner: the table of phases, starters, the import finder, the pytest plugin, grading, progress.

Nothing here but `incidents`, phase 7's material, `kernels`, phase 4's, and `notebook` knows how a cache works. A phase
is known by what `labs/course.toml` says about it. The engine, `minicache`, imports nothing of this.
"""

from minicache_course.language import prepare

prepare()
