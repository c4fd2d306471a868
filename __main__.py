"""`python -m nvfp4` is the `nvfp4` command."""

from .cli import main

if __name__ == "__main__":  # worker processes import this module under another name
    main()
