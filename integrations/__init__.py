"""Plug-ins for serving engines. Nothing in the package imports them."""
