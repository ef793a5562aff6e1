"""What every participant shares. Never imports torch."""
