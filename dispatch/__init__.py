"""The online half: ops, packing, binding and warm-up."""
