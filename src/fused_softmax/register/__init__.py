"""The operators as others meet them: PyTorch's library, its own names, its DTensors."""
