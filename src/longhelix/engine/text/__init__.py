"""Text processing: tokenizers, chat templates, stop strings, reasoning and tool calls."""
