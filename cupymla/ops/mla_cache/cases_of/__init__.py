"""Problems of the other functions of the family, a module each; those of `quantize_fp8` are in `..cases`.

All of these functions are exact: kernels give the bits of the reference.
"""
