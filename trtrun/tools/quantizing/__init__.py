"""Post-training quantization of a checkpoint, decoder layer by decoder layer: `trtrun quantize`.

Plain torch on any device. It knows checkpoints, plans of layers and how quantized matrices are stored. It does not know
engines, ranks, or the command line.
"""
