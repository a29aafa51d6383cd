"""HTTP server that gives access to the engine through OpenAI's API."""
