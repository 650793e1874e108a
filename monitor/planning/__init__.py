"""How large a KV pool is, what a request takes of it, and which settings follow: from a model's configuration."""
