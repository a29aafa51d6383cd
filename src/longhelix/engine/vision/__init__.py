"""Images: from files to patches, and through a model's vision tower to what the decoder takes in their place."""
