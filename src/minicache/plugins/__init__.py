"""The course's decisions inside engines that people use in production. A module is imported when it is asked for.

| module | what runs inside what |
|---|---|
| `adapter` | pure: our scheduler behind an engine's loop; what `transformers` needs (built in phase 11) |
| `transformers` | any of our schedulers inside the continuous batching of Hugging Face's `transformers` |
| `vllm` | any of our schedulers inside vLLM |
| `export` | MiniGPT as a Hugging Face folder, which both of them load |
| `ray_serve` | our routers and autoscaler, and the engine itself, inside Ray Serve |
"""
