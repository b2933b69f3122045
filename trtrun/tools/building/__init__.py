"""Engine directories of checkpoints: weights cut, fused, quantized and laid down as kernels want them: `trtrun build`.

It knows checkpoints, and how weights are held. It does not know engines that run, or the command line.
"""
