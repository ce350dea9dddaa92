"""minicache: an LLM serving engine that you build yourself.

Importing the package brings in neither torch nor numpy: each room is imported by name (`minicache.cache`,
`minicache.arithmetic`, …), and the rooms on the lower floor are pure standard library. `BLUEPRINT.md` beside this
file says what each one owns.
"""

__version__ = "0.1.0"
