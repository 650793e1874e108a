"""The engine's front end: HTTP server, OpenAI protocol, offline use, output, metrics."""
