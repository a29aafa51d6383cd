"""What `resolve` decides: a file for each part of the configuration."""
