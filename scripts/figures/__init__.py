"""Every figure of the docs is drawn here: `python -m scripts.figures` draws them all, one module a phase."""
