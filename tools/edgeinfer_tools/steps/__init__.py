"""Pre- and post-processing that a recipe declares, baked into the graph with standard ONNX operators."""
