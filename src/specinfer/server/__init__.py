"""The HTTP server: OpenAI's interface to one engine."""
