"""Text processing: tokenizer, chat template, stop strings, reasoning and tool calls."""
