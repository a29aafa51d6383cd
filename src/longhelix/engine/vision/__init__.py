"""Images: reads files, cuts them into patches and runs the model's vision tower."""
