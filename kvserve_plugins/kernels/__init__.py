"""The arithmetic behind the components: pure functions on tensors, one operation a file."""
