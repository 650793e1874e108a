"""KV connectors: what may keep a request's blocks beyond its end, and bring KV back from outside the pool."""
