"""The bytes of KV blocks."""
