"""The course's schedulers, routers and autoscaler inside production engines. Modules are imported on demand.

| module | what runs inside what |
|---|---|
| `adapter` | pure: our scheduler behind an engine's loop; what `transformers` needs (built in phase 11) |
| `transformers` | any of our schedulers inside the continuous batching of Hugging Face's `transformers` |
| `vllm` | any of our schedulers inside vLLM |
| `export` | MiniGPT as a Hugging Face folder, which both of them load |
| `ray_serve` | our routers and autoscaler, and the engine itself, inside Ray Serve |
"""
