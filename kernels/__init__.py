"""What can run: formats, references and candidate kernels."""
