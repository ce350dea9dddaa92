"""The authors' tools: they draw the figures, execute the notebooks, build the site and its pages of notebooks."""
