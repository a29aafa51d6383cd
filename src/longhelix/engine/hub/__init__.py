"""Models on the Hugging Face Hub, which users name as `ORG/NAME`."""
