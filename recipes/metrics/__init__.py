"""What a run measures of itself, and where it says so: console, TensorBoard, Weights & Biases."""
