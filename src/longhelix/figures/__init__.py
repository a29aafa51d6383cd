"""The figures of Helix (arXiv 2507.07120) and Medha (arXiv 2409.17264), modelled: claims, tables, drawings, reports."""
