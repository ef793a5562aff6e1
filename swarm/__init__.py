"""What every participant shares. Never imports torch."""

__version__ = "0.1.0"
