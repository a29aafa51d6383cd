"""`longhelix chat`: an interactive conversation with a model."""
