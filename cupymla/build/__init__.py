"""The compile service: sources in, cached cubins and loaded kernels out. Knows no operator and no tensor."""
