"""What torch computes where no kernel of trtrun's own does, and how it is told to: products with weights of 8 bits,
cuBLAS, captures of graphs. It does not know the kernels beside it.
"""
