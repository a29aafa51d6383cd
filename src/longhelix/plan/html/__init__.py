"""Pages, each as one self-contained HTML file."""
