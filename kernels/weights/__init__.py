"""Number formats, the scale swizzle, and one file per weight layout."""
