"""A small language model with DeepSeek sparse attention, in JAX and in torch; see train_dsa.py."""
