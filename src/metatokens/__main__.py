"""`python -m metatokens`, for torchrun and accelerate."""

from metatokens.cli import main

if __name__ == "__main__":
    main()
