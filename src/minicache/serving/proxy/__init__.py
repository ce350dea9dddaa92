"""`minicache route`: one address in front of several OpenAI-compatible servers. Given, not built.

| module | owns |
|---|---|
| `prompts` | what a router sees of a request: hashes of its prompt |
| `workers` | the servers behind it: who is healthy, what each has, one request to one of them |
| `events` | server-sent events: where one ends, what it says |
| `streams` | one client's stream over all attempts: what the client gets of each event, what is asked next |
| `relay` | one request from its client to its workers and back |
| `metrics`, `live` | the numbers for Prometheus and the page |
| `app` | the routes |

The decisions are `minicache.fleet`'s, and so may be a learner's: the router, the membership, and the failover of a
stream.
"""
