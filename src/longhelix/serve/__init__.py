"""The server: HTTP in OpenAI's form over the engine."""
