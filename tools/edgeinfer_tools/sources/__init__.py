"""Where a recipe's float model comes from: ONNX files, Hugging Face folders, PyTorch modules."""
