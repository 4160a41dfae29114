"""The workstation toolchain: from an ONNX file to a bundle that explains and proves itself."""
