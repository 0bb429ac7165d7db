"""The laboratory: engines that run PTX without its GPU, and the tools that check and measure kernels.

It imports cupymla and is never imported by it; no wheel holds it. `python -m cupymla_lab` lists its commands.
"""
