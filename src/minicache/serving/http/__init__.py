"""The engine behind OpenAI's HTTP API: routes, streams, metrics, the live page. Phase 10 builds `streaming`."""
