"""How an engine runs the models that it knows, in ways of their own: `find` chooses.

| module | owns |
|---|---|
| `find` | the runner and the memory for a model; none where the engine's loop runs it |
| `cpu`, `gpu` | a step on each device |
| `parallel` | a step of a model on several processes |
| `verify` | a step with draft tokens, around any of these |
| `sampling`, `memory` | a GPU's: tokens picked there; how much of its memory the cache takes |
"""
