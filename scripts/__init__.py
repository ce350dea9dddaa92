"""The authors' tools: `figures` draws every picture of the docs, `notebooks` executes and renders the notebooks."""
