"""The HTTP server: OpenAI's API for one engine."""
