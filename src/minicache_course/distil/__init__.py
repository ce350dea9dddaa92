"""`minicache distil`: a learner's engine as one file that a person can read, and that needs torch and safetensors only.

`write` takes definitions out of modules, in the order of `SECTIONS`: a learner's file, or the reference's. `sources`
reads them, `strip` shortens docstrings and drops checks of misuse, `flatten` makes one class of the stages of a
scheduler, and `tidy` drops what has no use then. `llama` and `engine` are written by hand, to be read and not imported.
"""
