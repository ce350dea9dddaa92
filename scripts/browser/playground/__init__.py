"""The playground's Python: a scheduler runs a workload, and each step becomes a frame that a page can draw.

`workloads` and `schedulers` are what there is to choose from, `frames` is what is drawn of a step, `edited` loads
schedulers from changed sources, and `run` puts them together. Pure standard library: it runs in Pyodide as in CPython.
"""
