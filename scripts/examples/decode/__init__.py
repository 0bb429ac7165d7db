"""Decoding with DeepSeek sparse attention from paged caches, in CuPy and in JAX; see decode_dsa.py."""
