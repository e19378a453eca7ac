"""Models: cut on meta, made or read in parts, with adapters, quantized weights and attention chosen."""
