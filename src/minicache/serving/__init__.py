"""Serving: the engine behind OpenAI's HTTP API, in processes of its own, behind a proxy, under load.

| package | owns |
|---|---|
| `replica` | the engine in a process of its own, several of them if need be, and their client |
| `http` | OpenAI's API over it: routes, streams, metrics, the live page; phase 10 builds `streaming` |
| `proxy` | one address in front of several servers |
| `load` | the load client, which measures any of these |
"""
