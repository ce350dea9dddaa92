raise ImportError("the whole engine, which needs a GPU")
